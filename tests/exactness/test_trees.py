"""Draft trees in whole engines: outputs, KV and hidden states are those of plain decoding, whatever comes between."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from dynaspec import LLM, SamplingParams, StructuredOutputsParams
from dynaspec.contract.proposer import Drafts
from dynaspec.contract.step import Limits, SpecPlan, StepOutcome, StepView, TreeRule
from dynaspec.control.planner import ChainPlanner
from dynaspec.control.policies.lengths import Constant, LengthController
from dynaspec.engine.target import TargetVerifier, Verified
from dynaspec.propose.autoregressive import AutoregressiveProposer
from dynaspec.schedule.batch import StepBatch
from support.checkpoints import Pair
from support.decoder_heads import FittedHead
from support.engines import PlainDecoding, assert_same, kv_bytes, open_llm
from support.seen_drafts import check_drafts, watch_drafts
from support.workloads import MODES, PROMPTS

TREES: dict[str, dict[str, Any]] = {
    "fixed": {"speculative_token_tree": [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (1, 0, 0)]},
    "grown": {"policy": "constant", "num_speculative_tokens": 4, "tree_width": 3, "tree_nodes": 12},
}


def speculation(drafter: str, tree: str, **options: Any) -> dict[str, Any]:
    """The drafter by itself; its config.json says of which method it is."""
    return {"model": drafter, "prompt_lookup_max": 0, **TREES[tree], **options}


def greedy(most: int, **options: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": most, "ignore_eos": True} | options))


def seeded(seed: int, most: int, **options: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.8, "seed": seed, "max_tokens": most, "ignore_eos": True} | options))


class Walks:
    """What target passes have verified."""

    def __init__(self) -> None:
        self.accepted = self.moved = self.branched = self.beside_chunks = 0
        self.chains: set[bool] = set()
        """Whether requests were drafted for as chains, in passes with trees."""

    def add(self, batch: StepBatch, drafts: Drafts, verified: Verified) -> None:
        if drafts.parents is None or verified.result.verdict is None:
            return
        for i, n in enumerate(verified.result.verified.tolist()):
            parents, accepted = drafts.parents[i, :n], np.flatnonzero(verified.result.verdict[i, :n] == 1)
            chain = bool(np.array_equal(parents, np.arange(-1, n - 1)))
            self.branched += not chain
            self.accepted += accepted.size
            self.moved += int((accepted != np.arange(accepted.size)).sum())
            if not chain and n and max((chunk.count for chunk in batch.chunks), default=0) > 64:
                self.beside_chunks += 1
            if n > 1:
                self.chains.add(chain)


@contextmanager
def watch_walks() -> Iterator[Walks]:
    """Of all engines that run in the block."""
    walks, honest = Walks(), TargetVerifier.verify

    def verify(self: TargetVerifier, batch: StepBatch, drafts: Drafts, plan: SpecPlan) -> Verified:
        verified = honest(self, batch, drafts, plan)
        walks.add(batch, drafts, verified)
        return verified

    with mock.patch.object(TargetVerifier, "verify", verify):
        yield walks


REQUESTS = (
    greedy(40),
    seeded(1, 40, top_p=0.9),
    greedy(40, repetition_penalty=1.3, frequency_penalty=0.2),
    seeded(2, 40, presence_penalty=0.5, logit_bias={45: 2.0, 9: -100.0}),
    greedy(40, bad_words=["the", "fox", "q"], min_tokens=30, ignore_eos=False, stop_token_ids=range(100, 180)),
    seeded(3, 40, min_tokens=8, ignore_eos=False, stop=["e", "an", "o", "t"], include_stop_str_in_output=True),
    greedy(40, logprobs=3, prompt_logprobs=1),
    seeded(4, 40, logprobs=0, n=2),
    greedy(40, structured_outputs=StructuredOutputsParams(regex=r"([a-z]{2,7} (\d{1,3}|the|fox), ){3,9}end")),
    seeded(5, 40, structured_outputs=StructuredOutputsParams(json={"type": "array", "minItems": 3})),
    greedy(40, structured_outputs=StructuredOutputsParams(choice=["the quick brown fox", "the quick dog", "no dog"])),
    greedy(40, max_draft_tokens=2),
    greedy(40, max_draft_tokens=0),
    greedy(40, allowed_token_ids=(41, 45, 60, 97)),
)
"""Everything that can edit logits or end a text."""
CROWD = [PROMPTS[i % len(PROMPTS)] for i in range(len(REQUESTS))]


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("crowded", [False, True], ids=["ample", "crowded"])
def test_every_kind_of_request(drafter: str, tree: str, crowded: bool, tiny: Pair, plain: PlainDecoding) -> None:
    """``crowded``: preemption, chunked prefill and scheduling ahead."""
    expected = plain.outputs(CROWD, REQUESTS)
    with (
        watch_walks() as walks,
        open_llm(
            tiny.target,
            speculative_config=speculation(drafter, tree),
            max_num_seqs=8,
            max_num_batched_tokens=32 if crowded else 1024,
            async_scheduling=crowded,
            kv_cache_memory=kv_bytes(12, tiny.target, drafter) if crowded else None,
        ) as llm,
    ):
        assert_same(llm.generate(CROWD, REQUESTS), expected)
        assert_same(llm.generate(CROWD, REQUESTS), expected)  # now with prefix hits, where blocks were left
        stats = llm.stats()
    assert stats.proposer_faults == 0
    assert (stats.preemptions > 0) == crowded
    assert walks.branched > 0
    assert stats.verified > stats.accepted > 0
    assert walks.moved > 0


@pytest.mark.parametrize("method", ["eagle3", "eagle", "mtp"])
@pytest.mark.parametrize(("tree", "one_call"), [("fixed", True), ("grown", True), ("grown", False)])
def test_heads_read_the_states_of_the_accepted_path(
    method: str,
    tree: str,
    one_call: bool,
    tiny: Pair,
    fitted_heads: dict[str, FittedHead],
    plain: PlainDecoding,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every path of every tree has the confidences of the head's own passes over text and path."""
    if not one_call:
        pass_by_pass(monkeypatch)
    head, params = fitted_heads[method], [greedy(40 - i) for i in range(4)]
    with (
        watch_drafts() as seen,
        watch_walks() as walks,
        open_llm(tiny.target, speculative_config=speculation(head.path, tree), max_num_seqs=4) as llm,
    ):
        assert_same(llm.generate(PROMPTS[:4], params), plain.outputs(PROMPTS[:4], params))
    assert walks.moved > 0
    check_drafts(seen, head)


def pass_by_pass(patch: pytest.MonkeyPatch) -> None:
    """Trees are drafted so, also where nothing has to be done between passes."""
    honest = AutoregressiveProposer.__init__

    def init(self: AutoregressiveProposer, *args: Any, **options: Any) -> None:
        honest(self, *args, **options)
        self._tree = None

    patch.setattr(AutoregressiveProposer, "__init__", init)


# --- KV, states and blocks --------------------------------------------------------------------------------------------


def kept(llm: LLM, lane: int, count: int) -> list[torch.Tensor]:
    """KV of a lane's first tokens in every layer, and what was kept of their hidden states, by place in the text."""
    scheduler, verifier = llm._engine._scheduler, llm._engine._loop._step._verifier  # type: ignore[attr-defined]
    blocks = torch.tensor(scheduler.tables.blocks(lane))
    found = []
    for keys, values in verifier._arena.layers:  # [blocks, heads, dim, 16] and [blocks, heads, 16, width]
        by_place = keys[blocks].permute(0, 3, 1, 2), values[blocks].permute(0, 2, 1, 3)
        found += [column.flatten(0, 1)[:count].clone() for column in by_place]
    if verifier._taps is not None:
        states = torch.as_tensor(verifier._taps.arena)
        slots = (blocks[:, None] * 16 + torch.arange(16)).flatten()
        found.append(states[slots[:count]].clone())
    return found


def watch_text(llm: LLM, prompt: str, params: SamplingParams, most: int) -> tuple[list[int], list[torch.Tensor]]:
    """A request's text after some steps, and what the target has kept of it."""
    engine = llm._engine
    engine.add("r", prompt, params)
    lanes = engine._scheduler.lanes
    while engine.unfinished:
        engine.step()
        (request,) = [request for request in lanes.requests if request is not None]
        lane, length = request.lane, int(lanes.length[request.lane])
        llm.verify_integrity()
        blocks = engine._scheduler.tables.blocks(lane)
        assert len(blocks) <= -(-length // 16), "blocks of rejected nodes are kept"
        if length >= most:
            text, columns = request.prompt.tolist() + list(request.output), kept(llm, lane, most - 1)
            engine.abort("r")
            return text[:most], columns
    raise AssertionError(f"the request has ended before {most} tokens")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("tree", TREES)
def test_kv_and_states_are_those_of_plain_decoding(
    tree: str, temperature: float, tiny: Pair, fitted_head: FittedHead
) -> None:
    """The head sees to it that states are kept; one engine drafts nothing."""
    found = []
    with watch_walks() as walks:
        for wish in (None, 0):
            params = seeded(3, 120, temperature=temperature, max_draft_tokens=wish)
            with open_llm(tiny.target, speculative_config=speculation(fitted_head.path, tree)) as llm:
                found.append(watch_text(llm, PROMPTS[0], params, 90))
    assert walks.moved > 0
    (text, columns), (expected_text, expected) = found
    assert text == expected_text
    assert len(columns) == len(expected) == 2 * 2 + 1
    for column, wanted in zip(columns, expected, strict=True):
        assert bool(wanted.any())
        assert torch.equal(column, wanted)


@pytest.mark.parametrize("tree", TREES)
def test_a_prefix_hit_on_blocks_that_trees_have_filled(
    drafter: str, tree: str, tiny: Pair, plain: PlainDecoding
) -> None:
    with open_llm(tiny.target, speculative_config=speculation(drafter, tree)) as llm:
        (first,) = llm.generate([PROMPTS[0]], [greedy(80)])
        assert llm.stats().accepted > 0
        text = [*first.prompt_token_ids, *first.outputs[0].token_ids]
        after, params = [text[:n] for n in (70, 90)], [greedy(30), seeded(8, 30)]
        outputs = [llm.generate([prompt], [one])[0] for prompt, one in zip(after, params, strict=True)]
    assert_same(outputs, plain.llm.generate(after, params))
    assert [output.num_cached_tokens for output in outputs] == [64, 80]


# --- where there is little room ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("scheduling", ["serial", "async"])
def test_the_end_of_the_models_length(scheduling: str, drafter: str, tree: str, tiny: Pair) -> None:
    """And answers shorter than a tree is deep."""
    most = 64
    reference = PlainDecoding(tiny.target, max_model_len=most)
    prompts = [list(range(50, 50 + n)) for n in (60, 61, 62, 63, 20, 21, 22)]
    params = [*[greedy(most)] * 3, seeded(1, most), greedy(1), greedy(2), seeded(4, 3)]
    with (
        watch_walks() as walks,
        open_llm(
            tiny.target,
            speculative_config=speculation(drafter, tree),
            max_model_len=most,
            max_num_seqs=4,
            async_scheduling=scheduling == "async",
        ) as llm,
    ):
        assert_same(llm.generate(prompts, params), reference.llm.generate(prompts, params))
        longer = [greedy(most, min_tokens=30), seeded(6, most)]
        assert_same(llm.generate(prompts[4:6], longer), reference.llm.generate(prompts[4:6], longer))
        assert llm.stats().proposer_faults == 0
    reference.llm.close()
    assert walks.branched > 0


def test_a_long_chunk_of_a_prompt_beside_trees(tiny: Pair, head: str, plain: PlainDecoding) -> None:
    """More rows than a set of 64 bits can tell apart."""
    long = list(np.random.default_rng(0).integers(3, 300, 200))
    texts = [plain.llm.tokenizer.encode(PROMPTS[0]), plain.llm.tokenizer.encode(PROMPTS[1]), [int(t) for t in long]]
    params = [greedy(40), seeded(1, 40), greedy(30)]
    with watch_walks() as walks, open_llm(tiny.target, speculative_config=speculation(head, "fixed")) as llm:
        engine, last = llm._engine, {}
        for step in range(400):
            for i, text in enumerate(texts):
                if step == 5 * (i // 2):
                    engine.add(str(i), text, params[i])
            last |= {output.request_id: output for output in engine.step()}
            if not engine.unfinished and step > 5:
                break
    assert walks.beside_chunks > 0
    assert_same([last[str(i)] for i in range(3)], plain.llm.generate(texts, params))


class TakesTurns(LengthController):
    """Trees in every step; requests are drafted for by one proposer after the other."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(Constant(4), ChainPlanner(limits), tree=(TreeRule(3), 10))
        self._proposers = len(limits.proposers)

    def plan(self, view: StepView) -> SpecPlan:
        plan = super().plan(view)
        turns = tuple((view.step + i) % self._proposers for i in range(len(view.ids)))
        return SpecPlan(plan.step, plan.depth, turns, plan.nodes, plan.stop, tree=plan.tree)


@pytest.mark.parametrize("scheduling", ["serial", "async"])
def test_lookup_beside_a_drafter_of_trees(scheduling: str, drafter: str, tiny: Pair, plain: PlainDecoding) -> None:
    config = {"model": drafter, "policy": "auto", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    params = [MODES[("repetitive", "greedy")[i % 2]](i) for i in range(len(PROMPTS))]
    with (
        watch_walks() as walks,
        open_llm(
            tiny.target,
            controller=TakesTurns,
            speculative_config=config,
            max_num_seqs=8,
            async_scheduling=scheduling == "async",
        ) as llm,
    ):
        assert_same(llm.generate(PROMPTS, params), plain.outputs(PROMPTS, params))
        assert llm.stats().proposer_faults == 0
    assert walks.chains == {False, True}
    assert walks.moved > 0


# --- who branches -----------------------------------------------------------------------------------------------------


def test_auto_branches_where_it_pays(tiny: Pair, drafter: str, plain: PlainDecoding) -> None:
    """By a clock that makes rows cost nothing."""
    params = [greedy(60 + i) for i in range(3)]
    config = {"model": drafter, "policy": "auto", "num_speculative_tokens": 6, "prompt_lookup_max": 0}
    with watch_walks() as walks, open_llm(tiny.target, ticking=True, speculative_config=config) as llm:
        for _ in range(4):
            assert_same(llm.generate(PROMPTS[:3], params), plain.outputs(PROMPTS[:3], params))
            if walks.branched:
                break
        assert llm.stats().proposer_faults == 0
    assert walks.branched > 0


def test_auto_drafts_chains_where_its_width_is_one(tiny: Pair, drafter: str, plain: PlainDecoding) -> None:
    params = [greedy(60 + i) for i in range(3)]
    config = {"model": drafter, "policy": "auto", "tree_width": 1, "prompt_lookup_max": 0}
    with watch_walks() as walks, open_llm(tiny.target, ticking=True, speculative_config=config) as llm:
        assert_same(llm.generate(PROMPTS[:3], params), plain.outputs(PROMPTS[:3], params))
        assert llm.stats().draft_tokens > 0
    assert walks.branched == 0


class Remembers(LengthController):
    """Trees of one size, and all that comes of them."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(Constant(4), ChainPlanner(limits), tree=(TreeRule(3), 12))
        self.outcomes: list[StepOutcome] = []

    def observe(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)


def test_outcomes_tell_the_walks(tiny: Pair, drafter: str) -> None:
    """Which children were tested, and which of them were accepted; the sizes of drafts, and why walks ended."""
    made: list[Remembers] = []

    def controller(limits: Limits) -> Remembers:
        made.append(Remembers(limits))
        return made[-1]

    config = {"model": drafter, "policy": "constant", "num_speculative_tokens": 4, "prompt_lookup_max": 0}
    with open_llm(tiny.target, controller=controller, speculative_config=config, max_num_seqs=4) as llm:
        llm.generate(PROMPTS[:4], [greedy(40 + i) for i in range(4)])
    ends, others = set(), 0
    for outcome in made[0].outcomes:
        if not any(outcome.drafted):
            continue
        assert outcome.tested is not None
        assert all(len(row) == n for row, n in zip(outcome.confidence, outcome.drafted, strict=True))
        columns = zip(outcome.tested, outcome.drafted, outcome.verified, outcome.accepted, outcome.ended, strict=True)
        for walk, drafted, verified, accepted, ended in columns:
            assert drafted == verified <= 12
            right = [[node for node in children if node >= 0] for children in walk]
            assert all(len(nodes) <= 1 for nodes in right)
            assert all(right[:-1])  # only the last step of a walk may fail
            told = [node if node >= 0 else ~node for children in walk for node in children]
            assert len(set(told)) == len(told)
            assert set(told) <= set(range(drafted))
            ends.add(ended)
            if ended != "stopped":
                assert sum(map(len, right)) == accepted
            if ended == "rejected":
                assert not right[-1]
            if ended == "all_accepted":
                assert right[-1]
            others += sum(children[0] < 0 and bool(nodes) for children, nodes in zip(walk, right, strict=True))
    assert ends >= {"rejected", "all_accepted"}
    assert others > 0
