"""Unseeded sampling end to end: the law of the first tokens is the target's, computed from plain log-probabilities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from dynaspec import LLM, SamplingParams
from dynaspec.contract.proposer import DecodeBatch, Drafts
from dynaspec.contract.step import SpecPlan
from dynaspec.propose.autoregressive import AutoregressiveProposer
from dynaspec.propose.state_heads import StateHeadsProposer
from dynaspec.sampling.ops import pick
from dynaspec.verify import chain, tree
from support.checkpoints import VOCAB, Pair
from support.controllers import VaryingController
from support.engines import PlainDecoding, open_llm
from support.proposers import ScriptedProposer
from support.state_heads import FittedHeads

PROMPT = "the dog and the fox, the dog"
ALLOWED = (41, 45, 60, 97, 104)
TEMPERATURE = 2.0
DEPTH = 3
SAMPLES = 4000
RUNS = -(-SAMPLES // 1000)
LAST = ALLOWED[-1]


def exact_law(llm: LLM) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of ``DEPTH`` allowed tokens."""
    prompt = tuple(llm.tokenizer.encode(PROMPT))
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(DEPTH):
        conditionals = next_tokens(llm, [prompt + tokens for tokens in law])
        law = {
            (*tokens, token): probability * float(row[j])
            for (tokens, probability), row in zip(law.items(), conditionals, strict=True)
            for j, token in enumerate(ALLOWED)
        }
    return law


def next_tokens(llm: LLM, contexts: list[tuple[int, ...]]) -> np.ndarray:
    """[contexts, allowed] probabilities after temperature, from raw log-probabilities."""
    greedy = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1)
    outputs = llm.generate(contexts, greedy)
    rows = []
    for output in outputs:
        (entries,) = output.outputs[0].logprobs or ()
        rows.append([entries[token].logprob / TEMPERATURE for token in ALLOWED])
    weights = np.exp(np.array(rows))
    shares: np.ndarray = weights / weights.sum(axis=1, keepdims=True)
    return shares


def p_value(llm: LLM, law: dict[tuple[int, ...], float], runs: int = RUNS) -> float:
    """Pearson's test of 1000 continuations a run against the law; rare ones share a cell."""
    params = SamplingParams(
        n=1000, temperature=TEMPERATURE, max_tokens=DEPTH + 2, allowed_token_ids=ALLOWED, detokenize=False
    )
    outputs = llm.generate([PROMPT] * runs, params)
    seen = Counter(tuple(c.token_ids[:DEPTH]) for output in outputs for c in output.outputs)
    assert set(seen) <= set(product(ALLOWED, repeat=DEPTH))
    total = seen.total()
    common = [tokens for tokens, probability in law.items() if probability * total >= 8]
    found = [seen[tokens] for tokens in common]
    expected = [law[tokens] * total for tokens in common]
    found.append(total - sum(found))
    expected.append(total - sum(expected))
    statistic = sum((f - e) ** 2 / e for f, e in zip(found, expected, strict=True) if e > 0)
    return float(chi2.sf(statistic, len(common)))


@pytest.fixture(scope="module")
def law(plain: PlainDecoding) -> dict[tuple[int, ...], float]:
    law = exact_law(plain.llm)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-9)
    assert sum(probability * SAMPLES >= 8 for probability in law.values()) > 20, "too peaked to tell much"
    return law


def speculation(kind: str, drafter: str) -> dict[str, Any]:
    """Drafting by a draft model or a head, or beside it, or by lookup alone."""
    if kind == "ngram":
        return {
            "method": "ngram",
            "policy": "constant",
            "num_speculative_tokens": DEPTH,
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 2,
        }
    if kind == "suffix":
        return {"method": "suffix", "policy": "constant", "num_speculative_tokens": DEPTH}
    if kind == "suffix trees":
        return speculation("suffix", drafter) | {
            "tree_width": 3,
            "tree_nodes": 8,
            "suffix_decoding_max_spec_factor": 4.0,
            "suffix_decoding_min_token_prob": 0.0,
        }
    if kind == "early exit":
        return {"assistant_early_exit": 1, "policy": "constant", "num_speculative_tokens": DEPTH}
    config = {"model": drafter, "num_speculative_tokens": DEPTH}
    if kind in ("auto", "varying"):  # with lookup beside
        return config | {"policy": "auto", "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    if kind == "stopping":  # on what was drawn, which must not favour any token
        return config | {"draft_confidence_threshold": 0.3, "signal": "token_prob"}
    if kind == "gated":
        return config | {"policy": "elastic", "draft_length_options": [1, 2, 3], "kv_write_gating_threshold": 0.5}
    if kind == "blocks":
        return config | {"policy": "constant", "rejection_sample_method": "block"}
    if kind == "blocks with auto":
        return speculation("auto", drafter) | {"rejection_sample_method": "block"}
    if kind == "fixed tree":
        return config | {"speculative_token_tree": [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]}
    if kind == "grown tree":
        return config | {"policy": "constant", "tree_width": 3, "tree_nodes": 8}
    return config | {"policy": "constant", "draft_sample_method": kind}


class Guess(ScriptedProposer):
    """Drafts one token over and over, as sure as lookup is, or claims to have drawn it from some distribution."""

    def __init__(self, q: np.ndarray | None = None) -> None:
        super().__init__([], VOCAB, fixed_length=True)
        self._q = q

    def propose(self, batch: DecodeBatch, plan: SpecPlan) -> Drafts:
        drafts = super().propose(batch, plan)
        drafts.tokens[...] = LAST
        if self._q is not None:
            drafts.q = torch.from_numpy(self._q).expand(*drafts.tokens.shape, VOCAB)
        return drafts


BOTH = [
    (kind, scheduling)
    for kind in ("probabilistic", "stopping", "ngram", "suffix")
    for scheduling in ("serial", "async")
]


@pytest.mark.parametrize(
    ("kind", "scheduling"),
    [
        *BOTH,
        *(
            ("suffix trees", "serial"),
            ("greedy", "async"),
            ("auto", "serial"),
            ("varying", "async"),
            ("gated", "serial"),
            ("early exit", "async"),
        ),
        *(("blocks", "serial"), ("blocks", "async"), ("blocks with auto", "serial")),
        *(("fixed tree", "async"), ("grown tree", "serial")),
    ],
)
def test_unseeded_output_follows_the_targets_law(
    kind: str, scheduling: str, tiny: Pair, law: dict[tuple[int, ...], float]
) -> None:
    with open_llm(
        tiny.target,
        controller=VaryingController if kind == "varying" else None,
        ticking=kind in ("auto", "blocks with auto"),
        speculative_config=speculation(kind, tiny.drafter),
        max_model_len=64,
        max_num_seqs=250,
        async_scheduling=scheduling == "async",
    ) as llm:
        assert p_value(llm, law) > 1e-4
        stats = llm.stats()
    assert stats.verified > stats.accepted > 0


HEAD_KINDS = "probabilistic", "greedy", "stopping", "auto", "gated", "blocks", "fixed tree", "grown tree"


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_unseeded_output_follows_it_with_a_head(
    kind: str, tiny: Pair, head: str, law: dict[tuple[int, ...], float]
) -> None:
    """It does not know two of the allowed tokens."""
    with open_llm(
        tiny.target,
        ticking=kind == "auto",
        speculative_config=speculation(kind, head),
        max_model_len=64,
        max_num_seqs=250,
    ) as llm:
        assert p_value(llm, law) > 1e-4
        stats = llm.stats()
    assert stats.verified > stats.accepted > 0


@pytest.mark.parametrize("kind", ["probabilistic", "greedy", "stopping", "auto", "blocks"])
@pytest.mark.parametrize("method", ["medusa", "mlp_speculator"])
def test_unseeded_output_follows_it_with_heads_without_kv(
    method: str, kind: str, tiny: Pair, fitted_state_heads: dict[str, FittedHeads], law: dict[tuple[int, ...], float]
) -> None:
    with open_llm(
        tiny.target,
        ticking=kind == "auto",
        speculative_config=speculation(kind, fitted_state_heads[method].path),
        max_model_len=64,
        max_num_seqs=250,
    ) as llm:
        assert p_value(llm, law) > 1e-4
        stats = llm.stats()
    assert stats.verified > stats.accepted > 0


@pytest.mark.parametrize("kind", ["probabilistic", "greedy", "auto"])
def test_unseeded_output_follows_it_with_another_vocabulary(
    kind: str, tiny: Pair, tiny_other: str, law: dict[tuple[int, ...], float]
) -> None:
    with open_llm(
        tiny.target,
        ticking=kind == "auto",
        speculative_config={**speculation(kind, tiny_other), "use_heterogeneous_vocab": True},
        max_model_len=64,
        max_num_seqs=250,
    ) as llm:
        assert p_value(llm, law) > 1e-4
        stats = llm.stats()
    assert stats.verified > stats.accepted > 0
    assert stats.proposer_faults == 0


def test_certain_drafts_of_a_poor_proposer_follow_it_too(tiny: Pair, law: dict[tuple[int, ...], float]) -> None:
    with open_llm(
        tiny.target,
        proposer=Guess(),
        speculative_config=speculation("probabilistic", tiny.drafter),
        max_model_len=64,
        max_num_seqs=250,
    ) as llm:
        assert p_value(llm, law) > 1e-4


# --- the check can fail -----------------------------------------------------------------------------------------------


def flattens_q(patch: pytest.MonkeyPatch) -> None:
    """After the tokens were drawn from it."""

    def flattened(drafts: Drafts) -> Drafts:
        if drafts.q is None:
            return drafts
        q = drafts.q.sqrt()
        return replace(drafts, q=q / q.sum(-1, keepdim=True).clamp_min(1e-9))

    change_drafts(patch, flattened)


def change_drafts(patch: pytest.MonkeyPatch, change: Callable[[Drafts], Drafts]) -> None:
    """Of every proposer that draws them."""
    for kind in (AutoregressiveProposer, StateHeadsProposer):
        patch.setattr(kind, "propose", changed(kind.propose, change))  # type: ignore[arg-type]


def changed(honest: Callable[..., Drafts], change: Callable[[Drafts], Drafts]) -> Callable[..., Drafts]:
    return lambda self, batch, plan: change(honest(self, batch, plan))


def forgets_the_residual(patch: pytest.MonkeyPatch) -> None:
    """Draws from p where a draft was rejected."""
    patch.setattr(chain, "residual", lambda p, q, tokens: p)


def takes_what_is_possible(patch: pytest.MonkeyPatch) -> None:
    """Accepts a draft wherever p is not 0."""

    def accept(self: chain.RejectionSampling, index: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return pick(self._p, self._place[index], tokens) > 0.0

    patch.setattr(chain.RejectionSampling, "accept", accept)


def withholds_a_token(patch: pytest.MonkeyPatch) -> None:
    """Does not have a token verified, because it is that token."""

    def cut(drafts: Drafts) -> Drafts:
        kept = (drafts.tokens != ALLOWED[0]).cumprod(-1).sum(-1)
        return replace(drafts, lens=np.minimum(drafts.lens, kept))

    change_drafts(patch, cut)


@pytest.mark.parametrize("fault", [flattens_q, takes_what_is_possible, withholds_a_token])
def test_a_faulty_sampler_is_seen(
    fault: Callable[[pytest.MonkeyPatch], None],
    drafter: str,
    tiny: Pair,
    law: dict[tuple[int, ...], float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_fault(fault, drafter, tiny, law, monkeypatch)


def test_a_faulty_sampler_is_seen_with_another_vocabulary(
    tiny_other: str, tiny: Pair, law: dict[tuple[int, ...], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_fault(flattens_q, tiny_other, tiny, law, monkeypatch, use_heterogeneous_vocab=True)


@pytest.mark.parametrize("method", ["medusa", "mlp_speculator"])
@pytest.mark.parametrize("fault", [flattens_q, forgets_the_residual, takes_what_is_possible])
def test_a_faulty_sampler_is_seen_with_heads_without_kv(
    fault: Callable[[pytest.MonkeyPatch], None],
    method: str,
    fitted_state_heads: dict[str, FittedHeads],
    tiny: Pair,
    law: dict[tuple[int, ...], float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_fault(fault, fitted_state_heads[method].path, tiny, law, monkeypatch)


def test_a_residual_forgotten_is_seen_with_a_head(
    head: str, tiny: Pair, law: dict[tuple[int, ...], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose drafts are rejected often enough."""
    check_fault(forgets_the_residual, head, tiny, law, monkeypatch)


def check_fault(
    fault: Callable[[pytest.MonkeyPatch], None],
    drafter: str,
    tiny: Pair,
    law: dict[tuple[int, ...], float],
    monkeypatch: pytest.MonkeyPatch,
    kind: str = "probabilistic",
    **options: Any,
) -> None:
    fault(monkeypatch)
    with open_llm(
        tiny.target,
        speculative_config={**speculation(kind, drafter), **options},
        max_model_len=64,
        max_num_seqs=250,
    ) as llm:
        assert p_value(llm, law) < 1e-8
        assert llm.stats().proposer_faults == 0


def test_a_ratio_forgotten_is_seen_in_blocks(
    head: str, tiny: Pair, law: dict[tuple[int, ...], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefix passes with the chance that only a whole draft has."""
    monkeypatch.setattr(chain, "passes", lambda numbers, joint, excess, tested: numbers < joint)
    with open_llm(
        tiny.target, speculative_config=speculation("blocks", head), max_model_len=64, max_num_seqs=250
    ) as llm:
        # The head is fitted on this machine, and how often it is accepted depends on its arithmetic: hence so many.
        assert p_value(llm, law, 3 * RUNS) < 1e-8


def takes_the_first_child(patch: pytest.MonkeyPatch) -> None:
    """Takes the drafter's likeliest child where the target's token is any of them."""
    honest = tree.walk

    def walk(own: np.ndarray, nothing: np.ndarray, roots: np.ndarray, *columns: Any) -> Any:
        tokens, parents, lens = columns[:3]
        own = own.copy()
        for b, n in enumerate(lens.tolist()):
            for above in range(-1, n):
                children = np.flatnonzero(parents[b, :n] == above)
                if children.size and own[roots[b] + 1 + above] in tokens[b, children]:
                    own[roots[b] + 1 + above] = tokens[b, children[0]]
        return honest(own, nothing, roots, *columns)

    patch.setattr(tree, "walk", walk)


def draws_twice_for_the_likeliest(patch: pytest.MonkeyPatch) -> None:
    """Draws again in half of the rows, and keeps that if it is the token that a good drafter has there."""
    honest, coin = tree.draw, np.random.default_rng(0)

    def draw(scores: torch.Tensor, rows: Any, state: Any, purpose: Any) -> Any:
        drawn, q = honest(scores, rows, state, purpose)
        second = torch.multinomial(scores.softmax(-1), 1)[:, 0]
        best = scores.argmax(-1)
        keep = torch.from_numpy(coin.random(len(drawn)) < 0.5)
        return torch.where((second == best) & keep, second, drawn), q

    patch.setattr(tree, "draw", draw)


@pytest.mark.parametrize("kind", ["fixed tree", "grown tree"])
@pytest.mark.parametrize("fault", [takes_the_first_child, draws_twice_for_the_likeliest])
def test_a_tree_verified_wrongly_is_seen(
    fault: Callable[[pytest.MonkeyPatch], None],
    kind: str,
    drafter: str,
    tiny: Pair,
    law: dict[tuple[int, ...], float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_fault(fault, drafter, tiny, law, monkeypatch, kind)


def test_a_certain_draft_that_claims_to_be_drawn_is_seen(tiny: Pair, law: dict[tuple[int, ...], float]) -> None:
    """The same with an accepted token that was never random."""
    q = np.zeros(VOCAB, dtype=np.float32)
    q[list(ALLOWED)] = 1 / len(ALLOWED)
    with open_llm(
        tiny.target,
        proposer=Guess(q),
        speculative_config=speculation("probabilistic", tiny.drafter),
        max_model_len=64,
        max_num_seqs=250,
    ) as llm:
        assert p_value(llm, law) < 1e-8
