"""Drafting through a pretended vLLM's steps: what is kept of each request from step to step must be right, or drafts
would not be those that the model makes of the text alone."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynaspec.contract.step import SpecPlan
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.registry import build_controller
from dynaspec.hosts.vllm.drafting import build_drafting
from dynaspec.hosts.vllm.texts import compared, load_compiled, recognise, take_over
from dynaspec.observe.decision_log import ObserveCall, PlanCall, read_calls, read_header
from dynaspec.propose.ngram import NgramProposer
from dynaspec.propose.suffix import SuffixDraft, SuffixProposer, SuffixTree
from dynaspec.simulate.recorded import replay
from unit.engine.fakes import ScriptedController
from unit.hosts.vllm.configs import vllm_config
from unit.hosts.vllm.desk import LONGEST, MAX_MODEL_LEN, MAX_NUM_SEQS, VOCAB, Desk, Oracle, write_model
from unit.hosts.vllm.pretended import PASS_S, Clock, Request, Seen, Vllm, mostly, prompts
from unit.propose.batches import batch, plan

POLICIES: dict[str, dict[str, Any]] = {
    "constant": {"policy": "constant"},
    "heuristic": {"policy": "heuristic", "num_speculative_tokens": 2},
    "confidence": {"draft_confidence_threshold": 0.5, "draft_confidence_scope": "request"},
    "gating": {"policy": "constant", "kv_write_gating_threshold": 0.5},
    "schedule": {"num_speculative_tokens_per_batch_size": [[1, 2, 5], [3, 3, 0], [4, 4, 2]]},
    "auto": {"policy": "auto"},
    "auto without look-ups": {"policy": "auto", "prompt_lookup_max": 0},
    "suffixes": {
        "model": None,
        "method": "suffix",
        "policy": "constant",
        "suffix_decoding_max_cached_requests": 0,
        "suffix_decoding_max_spec_factor": 4.0,
    },
    "look-ups": {"model": None, "method": "ngram", "policy": "constant", "prompt_lookup_max": 3},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("drafter"))


@pytest.fixture(scope="module")
def oracle(path: Path) -> Oracle:
    return Oracle(path)


def after(text: list[int]) -> SuffixDraft:
    """What suffix decoding drafts of a text that it has not followed."""
    tree = SuffixTree(24)
    tree.start(0)
    tree.append(0, np.array(text))
    return tree.speculate(np.array(text, np.int32), len(text), LONGEST, 4.0, min_probability=0.1)


class Run:
    """A pretended vLLM whose drafter is a desk's, with everything compared after every step."""

    def __init__(self, desk: Desk, oracle: Oracle, *, seed: int = 0, otherwise_one_in: int = 4) -> None:
        self.desk = desk
        self.oracle = oracle
        target = mostly(oracle.next_token, VOCAB, otherwise_one_in=otherwise_one_in)
        self.target = target
        self.vllm = Vllm(
            target, desk.drafting, desk.clock, max_num_seqs=MAX_NUM_SEQS, max_model_len=MAX_MODEL_LEN, seed=seed
        )
        self.drafted = 0
        """Tokens by the draft model that were compared."""
        self.looked_up = 0
        self._names: dict[Request, str] = {}
        """As of the step before."""
        self._unseen = False

    def add(self, *texts: list[int], most: int = 30) -> list[Request]:
        requests = [Request(text, most) for text in texts]
        self.vllm.waiting += requests
        return requests

    def finish(self, seed: int | None = None) -> None:
        """Steps until nobody is left.

        Args:
            seed: of all that may happen beside them; None = nothing does.
        """
        rng = random.Random(seed)
        for _ in range(600):
            if not self.vllm.busy:
                break
            chances = {"preempt": 0.06, "move": 0.3, "cut": 0.15, "unseen": 0.05}
            self.step(**{name: seed is not None and rng.random() < chance for name, chance in chances.items()})
        assert not self.vllm.busy
        for request, output in self.vllm.outputs.items():
            text = list(request.prompt)
            for token in output:
                assert token == self.target(text)
                text.append(token)
        self.desk.drafting.propose([], np.zeros(1, np.int64), np.zeros((1, MAX_MODEL_LEN), np.int32))
        assert self.desk.tables.pool.free_count == self.desk.tables.pool.num_blocks
        assert self.desk.faults == []

    def step(self, **events: Any) -> Seen:
        told = len(self.desk.recorded.outcomes)
        seen = self.vllm.step(**events)
        self.desk.tables.verify_integrity()
        if events.get("unseen"):
            self._unseen = True
            return seen
        self._compare_outcome(seen, told)
        self._names = {}
        self._unseen = False
        if seen.decoding:
            names = self.desk.recorded.views[-1].ids
            self._names = dict(zip(seen.decoding, names, strict=True))
            self._compare_drafts(seen)
        return seen

    def _compare_outcome(self, seen: Seen, told: int) -> None:
        """What the controller is told is what vLLM did, of those that were there before."""
        stayed = [] if self._unseen else [request for request in seen.decoding if request in self._names]
        assert len(self.desk.recorded.outcomes) - told == bool(stayed)
        if not stayed:
            return
        outcome = self.desk.recorded.outcomes[-1]
        fates = [seen.verified[request] for request in stayed]
        assert outcome.ids == tuple(self._names[request] for request in stayed)
        assert outcome.accepted == tuple(fate.accepted for fate in fates)
        assert outcome.emitted == tuple(fate.emitted for fate in fates)
        columns = zip(fates, outcome.verified, outcome.ended, outcome.drafted, strict=True)
        for fate, verified, ended, drafted in columns:
            assert fate.accepted <= verified <= fate.handed <= drafted
            if not fate.cut:
                whole = fate.accepted == fate.handed
                assert verified == fate.handed
                assert ended == ("none" if not fate.handed else "all_accepted" if whole else "rejected")
        assert outcome.work.verify_rows + outcome.work.prefill_rows == seen.pass_rows
        if not any(fate.cut for fate in seen.verified.values()) and len(stayed) == len(seen.verified):
            assert outcome.work.verify_rows == seen.verify_rows
        assert 0.0 < outcome.draft_s < outcome.verify_s < outcome.step_s

    def _compare_drafts(self, seen: Seen) -> None:
        plan, places = self.desk.recorded.plans[-1], iter(range(len(seen.decoding)))
        for request, sampled, drafts in zip(seen.rows, seen.sampled, seen.drafts, strict=True):
            if not sampled:
                assert drafts == []
                continue
            place = next(places)
            assert len(drafts) <= plan.depth[place]
            assert len(request.text) + len(drafts) + 1 <= MAX_MODEL_LEN or not drafts
            self._compare(plan, place, request.text, drafts)

    def _compare(self, plan_: SpecPlan, place: int, text: list[int], drafts: list[int]) -> None:
        proposer = self.desk.proposers[plan_.proposer[place]]
        if isinstance(proposer, NgramProposer):
            alone = proposer.propose(batch(text), plan(plan_.depth[place])).tokens[0, : len(drafts)].tolist()
            self.looked_up += len(drafts)
        elif isinstance(proposer, SuffixProposer):
            alone = after(text).tokens[: len(drafts)].tolist()
            self.looked_up += len(drafts)
        elif plan_.probe_context:  # of some, only the latest tokens are read
            return
        else:
            if plan_.gate_kv_below:  # within a draft, tokens are made without the KV that is left out
                drafts = drafts[:1]
            alone = self.oracle.continuation(text, len(drafts))
            self.drafted += len(drafts)
        assert drafts == alone


# --- whatever happens ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_drafts_are_those_of_the_text_alone_whatever_has_happened(policy: str, path: Path, oracle: Oracle) -> None:
    run = Run(Desk(path, **POLICIES[policy]), oracle, seed=3)
    run.add(*prompts(9, VOCAB), most=24)
    run.finish(seed=5)
    assert run.looked_up > 20 if policy in ("look-ups", "suffixes") else run.drafted > 80
    outcomes = run.desk.recorded.outcomes
    assert {"rejected", "all_accepted"} <= {end for outcome in outcomes for end in outcome.ended}
    assert sum(sum(outcome.accepted) for outcome in outcomes) > 0
    if policy == "confidence":
        assert any(any(outcome.early_exit) for outcome in outcomes)
        assert any(len({*outcome.drafted}) > 1 for outcome in outcomes)
    if policy == "gating":
        assert sum(outcome.work.kv_skipped for outcome in outcomes) > 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("one_in", [2, 1000])
def test_drafters_that_are_often_wrong_and_that_are_always_right(
    one_in: int, seed: int, path: Path, oracle: Oracle
) -> None:
    run = Run(Desk(path, policy="constant"), oracle, seed=seed, otherwise_one_in=one_in)
    run.add(*prompts(6, VOCAB, seed=seed), most=20)
    run.finish(seed=seed)
    outcomes = run.desk.recorded.outcomes
    accepted, verified = (sum(sum(getattr(o, column)) for o in outcomes) for column in ("accepted", "verified"))
    assert accepted > 0.9 * verified if one_in == 1000 else accepted < 0.7 * verified
    assert run.drafted > 100


def test_steps_of_plain_decoding_are_caught_up_when_drafting_goes_on(path: Path, oracle: Oracle) -> None:
    desk = Desk(path, controller=ScriptedController((3, 0, 0, 0, 5, 0)))
    run = Run(desk, oracle)
    run.add(*prompts(2, VOCAB))
    run.finish()
    assert run.drafted > 40
    assert {0} < {lag for view in desk.recorded.views for lag in view.lag[0]}
    plain = [o for o in desk.recorded.outcomes if not any(o.requested)]
    assert plain
    assert {o.work.rows_per_pass for o in plain} == {()}  # the drafter rests


def test_what_has_been_drafted_and_accepted_is_not_read_again(path: Path, oracle: Oracle) -> None:
    """Where a request is drafted for in every step, the drafter reads one token, or two after a draft without fault."""
    run = Run(Desk(path, policy="constant"), oracle)
    run.add(*prompts(3, VOCAB))
    run.finish()
    recorded = run.desk.recorded
    lags = [
        lag
        for before, view in pairwise(recorded.views)
        for name, lag in zip(view.ids, view.lag[0], strict=True)
        if name in before.ids
    ]
    assert {*lags} == {0, 1}
    for outcome in recorded.outcomes:
        view = recorded.views[outcome.plan_step]
        assert outcome.work.rows_per_pass[0] == len(view.ids) + sum(view.lag[0])


def test_the_target_s_pace_is_that_of_steps_without_prompts(path: Path, oracle: Oracle) -> None:
    """By which a drafter is told to be late."""
    desk = Desk(path, policy="constant")
    run = Run(desk, oracle, otherwise_one_in=1)
    run.add([1, 2, 3], most=90)
    for _ in range(10):
        run.step()
    before = desk.pace.seconds
    assert before == pytest.approx(PASS_S, rel=0.05)
    desk.clock.slow = 100.0
    for i in range(10):
        run.add([4 + i] * 30, most=1)
        for _ in range(2):
            run.step(budget=15)
    assert desk.pace.seconds == before


def test_drafts_that_are_cut_by_the_policy_are_verified_as_far(path: Path, oracle: Oracle) -> None:
    run = Run(Desk(path, controller=ScriptedController((4,), keep=2)), oracle)
    run.add(*prompts(2, VOCAB))
    run.finish()
    assert {n for outcome in run.desk.recorded.outcomes for n in outcome.drafted} == {4}
    assert {n for outcome in run.desk.recorded.outcomes for n in outcome.verified} == {2}


def test_two_requests_that_say_the_same(path: Path, oracle: Oracle) -> None:
    """Whoever is taken for whom: drafts are a function of the text."""
    desk = Desk(path, policy="constant")
    run = Run(desk, oracle)
    (text,) = prompts(1, VOCAB)
    run.add(text, text, text)
    for _ in range(12):
        seen = run.vllm.step(move=True, budget=100)
        desk.tables.verify_integrity()
        for request, drafts in zip(seen.rows, seen.drafts, strict=True):
            assert drafts == oracle.continuation(request.text, len(drafts))
            assert len(drafts) == min(LONGEST, MAX_MODEL_LEN - 1 - len(request.text))


# --- what there is room for ---------------------------------------------------------------------------------------


def test_a_request_without_room_is_not_drafted_for(path: Path, oracle: Oracle) -> None:
    """There are five blocks for three that need two each; one goes without until the others have ended."""
    desk = Desk(path, policy="constant", blocks=5)
    run = Run(desk, oracle)
    requests = run.add(*([i, *range(19)] for i in range(3)), most=9)
    lengths = [[len(drafts) for drafts in run.step(budget=200).drafts] for _ in range(2)]
    assert lengths == [[LONGEST, LONGEST, 0]] * 2
    assert desk.recorded.outcomes[-1].requested == (LONGEST, LONGEST, 0)
    while requests[1] not in run.vllm.outputs:
        run.step()
    assert run.vllm.rows == [requests[2]]
    assert len(requests[2].drafts) == LONGEST
    run.finish()


@pytest.mark.parametrize("blocks", [1, 2, 5, 9])
def test_little_room_costs_drafts_and_nothing_else(blocks: int, path: Path, oracle: Oracle) -> None:
    run = Run(Desk(path, policy="constant", blocks=blocks), oracle, seed=1)
    run.add(*prompts(6, VOCAB, longest=50), most=20)
    run.finish(seed=2)
    assert (run.drafted > 0) == (blocks > 1)


def test_the_model_s_end_is_respected(path: Path, oracle: Oracle) -> None:
    run = Run(Desk(path, policy="constant"), oracle, otherwise_one_in=1000)
    (request,) = run.add([1] * (MAX_MODEL_LEN - 14), most=100)
    rooms = []
    while run.vllm.busy:
        seen = run.step(budget=200)
        rooms += [(MAX_MODEL_LEN - len(r.text), len(drafts)) for r, drafts in zip(seen.rows, seen.drafts, strict=True)]
    assert len(request.text) == MAX_MODEL_LEN
    assert {(left, drafts) for left, drafts in rooms if left <= LONGEST} <= {(0, 0), *((n, n - 1) for n in range(1, 6))}
    assert any(drafts == LONGEST for _, drafts in rooms)
    assert any(0 < drafts < LONGEST or left == 1 for left, drafts in rooms)


def test_a_drafter_that_reads_less_than_vllm_stops_drafting_there(path: Path, oracle: Oracle) -> None:
    run = Run(Desk(path, policy="constant", drafter_length=50), oracle)
    run.add([1, 2, 3, *range(30)], most=40)
    lengths = []
    while run.vllm.busy:
        seen = run.step(budget=200)
        lengths += [(len(r.text), len(drafts)) for r, drafts in zip(seen.rows, seen.drafts, strict=True)]
    assert all(length + drafts <= 50 for length, drafts in lengths if drafts)
    assert any(drafts for length, drafts in lengths)
    assert any(length > 60 for length, _ in lengths)


# --- what the controller is asked ---------------------------------------------------------------------------------


def test_nobody_is_planned_for_while_all_read_their_prompts(path: Path, oracle: Oracle) -> None:
    desk = Desk(path, policy="constant")
    run = Run(desk, oracle)
    run.add([1] * 40, [2] * 30)
    assert run.step(budget=20).drafts == [[], []]
    assert desk.recorded.views == []
    seen = run.step(budget=20)
    assert [len(drafts) for drafts in seen.drafts] == [LONGEST, 0]
    assert [len(view.ids) for view in desk.recorded.views] == [1]


def test_those_who_have_gone_are_forgotten(path: Path, oracle: Oracle) -> None:
    desk = Desk(path, policy="constant")
    run = Run(desk, oracle)
    run.add(*prompts(5, VOCAB), most=8)
    run.finish(seed=1)
    assert sorted(desk.recorded.forgotten) == sorted({name for view in desk.recorded.views for name in view.ids})


def test_lags_and_offers_are_found_out_where_the_plan_has_asked_for_them(path: Path, oracle: Oracle) -> None:
    class Sparing(ScriptedController):
        needs: Any = "all"

        def plan(self, view: Any) -> SpecPlan:
            made = super().plan(view)
            return SpecPlan(made.step, made.depth, made.proposer, made.nodes, next_needs=self.needs)

    for needs, lags, offers in (("all", 2, True), ("lag", 2, False), ("nothing", 0, False)):
        sparing = Sparing((2,))
        sparing.needs = needs
        desk = Desk(path, controller=sparing, policy="auto")
        run = Run(desk, oracle)
        run.add(*prompts(1, VOCAB))
        for _ in range(8):
            run.step()
        view = desk.recorded.views[-1]
        assert len(view.lag) == lags
        assert len(view.offers) == 2
        assert [offer is not None for offer in view.offers] == [False, offers]


def test_what_lookups_offered_is_compared_with_what_came(path: Path, oracle: Oracle) -> None:
    desk = Desk(path, policy="auto", controller=ScriptedController((0, 3, 2)))
    run = Run(desk, oracle)
    run.add(*prompts(5, VOCAB), most=30)
    run.finish(seed=1)
    views, right = {view.step: view for view in desk.recorded.views}, 0
    for outcome in desk.recorded.outcomes:
        view, (model, told) = views[outcome.plan_step], outcome.came_true
        assert model is None
        offers = dict(zip(view.ids, view.offers[1] or (), strict=True))
        for request, emitted, (match, reached, agreed) in zip(outcome.ids, outcome.emitted, told or (), strict=True):
            found, offered = offers[request]
            assert match == found
            assert agreed <= reached == min(offered, emitted)
            right += agreed
    assert right > 0


def test_compiled_code_is_that_which_was_loaded_at_start_up(path: Path, oracle: Oracle) -> None:
    """Other types of arrays would be compiled in a step."""
    load_compiled()
    run = Run(Desk(path, policy="constant"), oracle)
    run.add(*prompts(2, VOCAB))
    run.finish()
    for kernel in (recognise, take_over, compared):
        assert len(kernel.signatures) == 1  # type: ignore[attr-defined]  # numba's


# --- built as vLLM's worker builds it -----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_decision_log_replays_to_the_same_plans(
    policy: str, path: Path, oracle: Oracle, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log, clock = tmp_path / "decisions.jsonl", Clock()
    told = {name: value for name, value in ({"model": str(path)} | POLICIES[policy]).items() if value is not None}
    config = vllm_config(
        told | {"decision_log": str(log)},
        vocab=VOCAB,
        longest=2 * LONGEST,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
    )
    drafting = build_drafting(config, clock)
    target = mostly(oracle.next_token, VOCAB)
    vllm = Vllm(target, drafting, clock, max_num_seqs=MAX_NUM_SEQS, max_model_len=MAX_MODEL_LEN)
    vllm.waiting += [*(Request(text, 20) for text in prompts(6, VOCAB)), Request([1] * 60, MAX_MODEL_LEN)]
    while vllm.busy:
        seen = vllm.step(move=True)
        for request, drafts in zip(seen.rows, seen.drafts, strict=True):
            if policy in ("constant", "heuristic", "confidence", "schedule"):
                assert drafts == oracle.continuation(request.text, len(drafts))
    told_of = [record for record in caplog.records if record.name != "dynaspec.compiled"]  # that says what it compiles
    assert [record.getMessage() for record in told_of] == []  # a proposer's faults would be there
    calls = list(read_calls(log))  # which nobody has closed
    drafting._log.close()  # type: ignore[union-attr]
    plans = [call for call in calls if isinstance(call, PlanCall)]
    assert any(any(call.plan.depth) for call in plans)
    assert sum(sum(call.outcome.accepted) for call in calls if isinstance(call, ObserveCall)) > 0
    header = read_header(log)
    assert (header.fields["host"], header.fields["model"]) == ("vllm", "target")
    assert header.costs is not None
    assert bool(any(header.costs.drafters)) == policy.startswith("auto")
    assert header.costs.target == ()
    rebuilt = SpeculativeConfig.parse(header.speculative_config)
    found = replay(log, build_controller(rebuilt, plans[0].view.limits, costs=header.costs))
    assert (found.plans, found.first) == (len(plans), None)
