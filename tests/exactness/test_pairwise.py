"""Speculation never changes an output: bit for bit plain decoding's, whatever else is going on.

A covering array lets every policy meet every proposer, sampling mode, batch size, memory size and so on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from dynaspec import LLM
from support.checkpoints import VOCAB, Pair
from support.controllers import VaryingController
from support.decoder_heads import FittedHead
from support.engines import PlainDecoding, assert_same, kv_bytes, open_llm
from support.pairwise import Choice, Row, covering_array
from support.proposers import ScriptedProposer
from support.state_heads import FittedHeads
from support.workloads import MODES, PROMPTS

PROFILE = "set by the fixture below"

POLICIES: dict[str, dict[str, Any]] = {
    "constant_4": {"policy": "constant", "num_speculative_tokens": 4},
    "constant_8": {"policy": "constant", "num_speculative_tokens": 8},
    "constant_gated": {"policy": "constant", "num_speculative_tokens": 6, "kv_write_gating_threshold": 0.2},
    "heuristic": {"policy": "heuristic", "num_speculative_tokens": 3},
    "heuristic_transient": {"policy": "heuristic_transient", "num_speculative_tokens": 5},
    "off_switch": {"policy": "constant", "num_speculative_tokens": 4, "disable_by_batch_size": 2},
    "confidence_request": {"draft_confidence_threshold": 0.3, "draft_confidence_scope": "request"},
    "confidence_batch_mean": {"draft_confidence_threshold": 0.4, "draft_confidence_scope": "batch_mean"},
    "confidence_token_prob": {"draft_confidence_threshold": 0.2, "signal": "token_prob"},
    "confidence_auto": {"draft_confidence_threshold": "auto", "num_speculative_tokens": 12},
    "schedule": {"num_speculative_tokens_per_batch_size": [[1, 2, 6], [3, 5, 2], [6, 6, 0], [7, 9, 1]]},
    "goodput": {"dynamic_config_path": PROFILE, "num_speculative_tokens": 6},
    "goodput_confidence": {
        "dynamic_config_path": PROFILE,
        "num_speculative_tokens": 6,
        "draft_confidence_threshold": 0.1,
    },
    "elastic": {"policy": "elastic", "draft_length_options": [2, 4, 8]},
    "elastic_gated": {"policy": "elastic", "draft_length_options": [2, 4, 8], "kv_write_gating_threshold": 0.5},
    "tree_fixed": {"speculative_token_tree": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 0, 0]]},
    "tree_grown": {"policy": "constant", "num_speculative_tokens": 5, "tree_width": 3, "tree_nodes": 12},
    "auto": {"policy": "auto", "num_speculative_tokens": 8},
    "auto_measured": {"policy": "auto", "num_speculative_tokens": 8},
    "varying": {"policy": "auto", "num_speculative_tokens": 8},
}
"""``auto`` runs by a clock that makes speculation pay, ``auto_measured`` by the real one, which may not;
``varying`` is the test's own controller."""

FACTORS = {
    "policy": tuple(POLICIES),
    "proposer": (
        *("draft_greedy", "draft_probabilistic", "ngram", "suffix", "mixed", "suffix_mixed", "scripted"),
        *("eagle3_greedy", "eagle3_probabilistic", "eagle3_mixed", "eagle_greedy", "mtp_probabilistic"),
        *("medusa_greedy", "medusa_probabilistic", "mlp_speculator_probabilistic", "mlp_speculator_mixed"),
    ),
    "mode": tuple(MODES),
    "batch": ("1", "3", "8"),
    "memory": ("ample", "tight"),
    "prefix": ("off", "hit"),
    "rows": ("16", "32", "1024"),
    "scheduling": ("serial", "async"),
}
LOOKUPS = ("ngram", "suffix")
STATE_HEADS = ("medusa", "mlp_speculator")
HEADS = ("eagle", "mtp", *STATE_HEADS)
CHAINS = (*LOOKUPS, "scripted", *STATE_HEADS)
"""Beginnings of the proposers that are heads; then of those that draft chains only, whose KV cannot be gated either."""
TIGHT_BLOCKS = 7
"""As many as one request may need."""
AGAIN = 8
"""Times that the prompts are decoded again, at most, until ``auto`` has had a draft accepted."""


def conflict(a: Choice, b: Choice) -> bool:
    """Pairs that cannot be, or that cannot come about."""
    if a[0] == "proposer" and b[0] == "policy":
        needs_confidence = b[1].startswith("confidence") or b[1] == "goodput_confidence"
        return (
            (a[1] in LOOKUPS and needs_confidence)
            or (a[1].startswith(CHAINS) and (b[1].endswith("gated") or b[1].startswith("tree")))
            or (a[1].endswith("mixed") and b[1] not in ("auto", "auto_measured", "varying"))  # nobody else routes
        )
    return (a, b) == (("memory", "tight"), ("batch", "1"))  # one request, or two, have all the memory they need


ROWS = covering_array(FACTORS, conflict)


def certain(row: Row) -> bool:
    """Whether drafts must have been accepted and rejected.

    Lookup finds little in random text unless it has seen the answer before, a head has not learnt what is forced to
    repeat itself, measured costs decide freely, and a batch may never become small enough.
    """
    seen = row["proposer"] == "suffix" and row["prefix"] == "hit"
    looks_up = row["proposer"] in LOOKUPS and row["mode"] != "repetitive" and not seen
    too_many = row["policy"] == "off_switch" and row["batch"] != "1"
    unlearnt = row["proposer"].startswith(HEADS) and (row["mode"], row["batch"]) == ("repetitive", "1")
    return not looks_up and not unlearnt and not too_many and row["policy"] != "auto_measured"


@pytest.fixture(scope="module", autouse=True)
def profile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A goodput profile whose best length differs by batch size, with measured rates after a few steps."""
    path = tmp_path_factory.mktemp("profile") / "dynamic_speculative_config.json"
    stats = {"1": {"0": 10, "3": 11, "6": 12}, "4": {"0": 10, "3": 14, "6": 21}, "8": {"0": 10, "3": 30, "6": 50}}
    document = {
        "batch_stats": stats,
        "acceptance_rate_per_pos": [0.8, 0.6, 0.5, 0.4, 0.3, 0.2],
        "max_num_speculative_tokens": 6,
        "is_online": True,
        "warmup_steps": 4,
    }
    path.write_text(json.dumps(document))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("goodput", "goodput_confidence"):
            patch.setitem(POLICIES[name], "dynamic_config_path", str(path))
        yield


@pytest.mark.parametrize("row", ROWS, ids=["-".join(row.values()) for row in ROWS])
def test_output_is_that_of_plain_decoding(
    row: Row,
    tiny: Pair,
    fitted_heads: dict[str, FittedHead],
    fitted_state_heads: dict[str, FittedHeads],
    plain: PlainDecoding,
) -> None:
    prompts = PROMPTS[: int(row["batch"])]
    params = [MODES[row["mode"]](i) for i in range(len(prompts))]
    expected = plain.outputs(prompts, params)
    scripted = None
    if row["proposer"] == "scripted":
        scripted = ScriptedProposer(plain.texts(expected), VOCAB)
    with open_llm(
        tiny.target,
        proposer=scripted,
        controller=VaryingController if row["policy"] == "varying" else None,
        ticking=row["policy"] == "auto",
        **engine_options(row, tiny, fitted_heads, fitted_state_heads),
    ) as llm:
        assert_same(llm.generate(prompts, params), expected)
        for _ in range(AGAIN if row["policy"] == "auto" and certain(row) else 0):
            if llm.stats().accepted:
                break
            # Its first trial may have failed, and a later one is waited for.
            assert_same(llm.generate(prompts, params), expected)
        if certain(row) and row["proposer"].startswith(HEADS):
            # Heads of the tiny model are seldom right, and a crowd lets them draft in few steps: single ones follow.
            for prompt, single in [(prompt, MODES[row["mode"]](i)) for i, prompt in enumerate(PROMPTS)]:
                if llm.stats().accepted:
                    break
                assert_same(llm.generate([prompt], [single]), plain.outputs([prompt], [single]))
        if row["prefix"] == "hit":
            again = llm.generate(prompts, params)
            assert_same(again, expected)
            if row["memory"] == "tight":  # where the batch's blocks may have gone to others
                again = [llm.generate(prompts[:1], params[:1])[0] for _ in range(2)]
                assert_same(again, expected[:1] * 2)
            assert again[-1].num_cached_tokens + again[0].num_cached_tokens > 0
        check_that_it_happened(llm, row)


def engine_options(
    row: Row, tiny: Pair, heads: dict[str, FittedHead], state_heads: dict[str, FittedHeads]
) -> dict[str, Any]:
    """The row's engine; the scripted proposer runs under a draft model's configuration, which has a confidence."""
    speculation = dict(POLICIES[row["policy"]])
    who, models = row["proposer"], [tiny.target]
    if who.startswith("suffix"):
        kept = 100 if row["prefix"] == "hit" else 5  # else some leave while they are still written
        speculation |= {"suffix_decoding_max_tree_depth": 12, "suffix_decoding_max_cached_requests": kept}
    elif who == "ngram" or who.endswith("mixed"):
        speculation |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    if who in LOOKUPS:
        speculation["method"] = who
    else:
        method = next((name for name in (*heads, *state_heads) if who.startswith(f"{name}_")), "draft_model")
        model = heads[method].path if method in heads else tiny.drafter
        if method in state_heads:
            model = state_heads[method].path
            speculation = shortened(speculation, state_heads[method].layout.heads)
        speculation |= {"method": method, "model": model}
        speculation["draft_sample_method"] = "greedy" if who.endswith("greedy") else "probabilistic"
        speculation.setdefault("prompt_lookup_max", 0)  # else auto looks up beside the model
        models.append(model)
    return {
        "speculative_config": speculation,
        "max_num_seqs": 8,
        "max_num_batched_tokens": int(row["rows"]),
        "enable_prefix_caching": row["prefix"] == "hit",
        "async_scheduling": row["scheduling"] == "async",
        "kv_cache_memory": kv_bytes(TIGHT_BLOCKS, *models) if row["memory"] == "tight" else None,
    }


def shortened(speculation: dict[str, Any], longest: int) -> dict[str, Any]:
    """The same with no longer drafts than there are heads."""
    changed = dict(speculation)
    if "num_speculative_tokens" in changed:
        changed["num_speculative_tokens"] = min(changed["num_speculative_tokens"], longest)
    if "draft_length_options" in changed:
        changed["draft_length_options"] = sorted({min(k, longest) for k in changed["draft_length_options"]})
    if (key := "num_speculative_tokens_per_batch_size") in changed:
        changed[key] = [[low, high, min(k, longest)] for low, high, k in changed[key]]
    return changed


def check_that_it_happened(llm: LLM, row: Row) -> None:
    """The run had drafts, some of them right and some wrong, and preemptions where memory is tight."""
    stats = llm.stats()
    assert stats.proposer_faults == 0
    if certain(row):
        assert stats.accepted > 0
        # Where noise is coupled and few tokens are allowed, a draft model is sometimes right throughout.
        # So is an answer that was seen before, of the only request.
        always_right = row["mode"] == "repetitive" or (row["proposer"], row["prefix"]) == ("suffix", "hit")
        assert stats.verified > stats.accepted or (always_right and row["batch"] == "1")
    if row["memory"] == "tight":
        assert stats.preemptions > 0


def test_every_proposer_policy_and_mode_has_rows_that_must_accept_and_reject() -> None:
    for name in ("proposer", "policy", "mode"):
        found = {row[name] for row in ROWS if certain(row)}
        assert found == set(FACTORS[name]) - {"auto_measured"}


def test_the_workloads_are_what_the_rows_need(plain: PlainDecoding) -> None:
    """Prompts longer than a chunk of 16, texts that do not repeat one token, and every way to end."""
    lengths = [len(plain.llm.tokenizer.encode(prompt)) for prompt in PROMPTS]
    assert min(lengths[:3]) > 16
    ends = set()
    for name, mode in MODES.items():
        outputs = plain.outputs(PROMPTS, [mode(i) for i in range(len(PROMPTS))])
        completions = [completion for output in outputs for completion in output.outputs]
        varied = sum(len(set(c.token_ids)) for c in completions) / len(completions) > 12
        assert varied == (name != "repetitive")
        ends |= {(c.finish_reason, type(c.stop_reason)) for c in completions}
    assert ends >= {("length", type(None)), ("stop", type(None)), ("stop", int), ("stop", str)}
