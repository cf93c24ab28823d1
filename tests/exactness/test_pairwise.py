"""Speculation never changes an output: bit for bit plain decoding's, whatever else is going on.

A covering array lets every policy meet every proposer, sampling mode, batch size, memory size and so on.
"""

from __future__ import annotations

from typing import Any

import pytest

from dynaspec import LLM
from support.checkpoints import VOCAB, Pair
from support.engines import PlainDecoding, assert_same, kv_bytes, open_llm
from support.pairwise import Choice, Row, covering_array
from support.proposers import ScriptedProposer
from support.workloads import MODES, PROMPTS

POLICIES: dict[str, dict[str, Any]] = {
    "constant_1": {"policy": "constant", "num_speculative_tokens": 1},
    "constant_4": {"policy": "constant", "num_speculative_tokens": 4},
    "constant_8": {"policy": "constant", "num_speculative_tokens": 8},
    "heuristic": {"policy": "heuristic", "num_speculative_tokens": 3},
    "heuristic_transient": {"policy": "heuristic_transient", "num_speculative_tokens": 5},
    "off_switch": {"num_speculative_tokens": 4, "disable_by_batch_size": 2},
    "confidence_request": {"draft_confidence_threshold": 0.3, "draft_confidence_scope": "request"},
    "confidence_batch_mean": {"draft_confidence_threshold": 0.4, "draft_confidence_scope": "batch_mean"},
    "confidence_token_prob": {"draft_confidence_threshold": 0.2, "signal": "token_prob"},
    "confidence_auto": {"draft_confidence_threshold": "auto", "num_speculative_tokens": 12},
}
FACTORS = {
    "policy": tuple(POLICIES),
    "proposer": ("draft_greedy", "draft_probabilistic", "ngram", "scripted"),
    "mode": tuple(MODES),
    "batch": ("1", "3", "8"),
    "memory": ("ample", "tight"),
    "prefix": ("off", "hit"),
    "rows": ("16", "32", "1024"),
    "scheduling": ("serial", "async"),
}
TIGHT_BLOCKS = 8
"""One request needs up to 7."""


def conflict(a: Choice, b: Choice) -> bool:
    """Lookup has no confidence; one request alone (or as two) can have all the memory it needs."""
    no_confidence = a == ("proposer", "ngram") and b[0] == "policy" and b[1].startswith("confidence")
    return no_confidence or (a, b) == (("memory", "tight"), ("batch", "1"))


ROWS = covering_array(FACTORS, conflict)


@pytest.mark.parametrize("row", ROWS, ids=["-".join(row.values()) for row in ROWS])
def test_output_is_that_of_plain_decoding(row: Row, tiny: Pair, plain: PlainDecoding) -> None:
    prompts = PROMPTS[: int(row["batch"])]
    params = [MODES[row["mode"]](i) for i in range(len(prompts))]
    expected = plain.outputs(prompts, params)
    scripted = None
    if row["proposer"] == "scripted":
        scripted = ScriptedProposer(plain.texts(expected), VOCAB)
    with open_llm(tiny.target, proposer=scripted, **engine_options(row, tiny)) as llm:
        assert_same(llm.generate(prompts, params), expected)
        if row["prefix"] == "hit":
            again = llm.generate(prompts, params)
            assert_same(again, expected)
            if row["memory"] == "tight":  # where the batch's blocks may have gone to others
                again = [llm.generate(prompts[:1], params[:1])[0] for _ in range(2)]
                assert_same(again, expected[:1] * 2)
            assert again[-1].num_cached_tokens + again[0].num_cached_tokens > 0
        check_that_it_happened(llm, row)


def engine_options(row: Row, tiny: Pair) -> dict[str, Any]:
    """The row's engine; the scripted proposer runs under a draft model's configuration, which has a confidence."""
    speculation = dict(POLICIES[row["policy"]])
    models = [tiny.target]
    if row["proposer"] == "ngram":
        speculation |= {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    else:
        speculation |= {"method": "draft_model", "model": tiny.drafter}
        speculation["draft_sample_method"] = "greedy" if row["proposer"] == "draft_greedy" else "probabilistic"
        models.append(tiny.drafter)
    return {
        "speculative_config": speculation,
        "max_num_seqs": 8,
        "max_num_batched_tokens": int(row["rows"]),
        "enable_prefix_caching": row["prefix"] == "hit",
        "async_scheduling": row["scheduling"] == "async",
        "kv_cache_memory": kv_bytes(TIGHT_BLOCKS, *models) if row["memory"] == "tight" else None,
    }


def check_that_it_happened(llm: LLM, row: Row) -> None:
    """The run had drafts, some of them right and some wrong, and preemptions where memory is tight."""
    stats = llm.stats()
    assert stats.proposer_faults == 0
    assert stats.verified > stats.accepted
    assert stats.accepted > 0 or row["proposer"] == "ngram"  # random text seldom repeats itself
    if row["memory"] == "tight":
        assert stats.preemptions > 0


def test_the_workloads_are_what_the_rows_need(plain: PlainDecoding) -> None:
    """Prompts longer than a chunk of 16, texts that do not repeat one token, and every way to end."""
    lengths = [len(plain.llm.tokenizer.encode(prompt)) for prompt in PROMPTS]
    assert min(lengths[:3]) > 16
    ends = set()
    for mode in MODES.values():
        outputs = plain.outputs(PROMPTS, [mode(i) for i in range(len(PROMPTS))])
        completions = [completion for output in outputs for completion in output.outputs]
        assert sum(len(set(c.token_ids)) for c in completions) / len(completions) > 12
        ends |= {(c.finish_reason, type(c.stop_reason)) for c in completions}
    assert ends >= {("length", type(None)), ("stop", type(None)), ("stop", int), ("stop", str)}
