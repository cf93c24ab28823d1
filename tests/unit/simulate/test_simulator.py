"""Stop rules on traces: worked cases, and the same lengths as the engine's proposers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynaspec.contract.errors import CapacityError, ConfigError, IntegrityError
from dynaspec.contract.step import LOGIT_RANGE, SpecPlan, StopRule
from dynaspec.control.policies.wrappers import PlainController
from dynaspec.propose.stopping import stop_mask
from dynaspec.simulate import traces as at
from dynaspec.simulate.comparison import Totals, course
from dynaspec.simulate.policies import OracleController
from dynaspec.simulate.simulator import HostConfig, draft, simulate
from dynaspec.simulate.traces import Lengths, build_trace
from unit.control.seam import FIFTY_CASES
from unit.simulate.scenes import Spying, flat_costs, production, synthetic

WIDTH = 6


def trace_of(rows):
    """One request a row, whose drafts from position 0 see these confidences."""
    size = len(rows)
    signal = np.array(rows, dtype=np.float64).reshape(-1)
    output = np.full(size, len(rows[0]))
    runs = np.concatenate([np.arange(n, 0, -1) for n in output])
    return build_trace(np.ones(size, dtype=np.int64), output, runs, confidence=signal, stray=np.zeros(len(signal)))


def lengths(rows, depth, rule):
    trace = trace_of(rows)
    drafted = draft(trace, trace.first, trace.output, np.array(depth), rule)
    return drafted.lens.tolist()


ROWS = [[0.9, 0.8, 0.3, 0.9], [0.7, 0.2, 0.9, 0.9], [0.9, 0.9, 0.9, 0.9]]


def test_each_request_keeps_the_token_that_fell_below():
    assert lengths(ROWS, [4, 4, 4], StopRule(below=(0.5,))) == [3, 2, 4]
    assert lengths(ROWS, [2, 1, 0], StopRule(below=(0.5,))) == [2, 1, 0]


def test_thresholds_by_position_go_on_with_the_last():
    assert lengths(ROWS, [4, 4, 4], StopRule(below=(0.8, 0.0, 0.0))) == [4, 1, 4]
    assert lengths(ROWS, [4, 4, 4], StopRule(below=(0.0, 0.85))) == [2, 2, 4]


def test_the_mean_of_those_still_drafting():
    # Means over the rows: 0.83, 0.63, 0.70.
    assert lengths(ROWS, [4, 4, 4], StopRule(below=(0.65,), scope="batch_mean")) == [2, 2, 2]
    # Without the second from the second pass on: 0.85, 0.6.
    assert lengths(ROWS, [4, 1, 4], StopRule(below=(0.65,), scope="batch_mean")) == [3, 1, 3]


def test_the_chance_that_all_of_a_draft_is_accepted():
    # 0.9, 0.72, 0.22; 0.7, 0.14; 0.9, 0.81, 0.73, 0.66.
    assert lengths(ROWS, [4, 4, 4], StopRule(below=(0.7,), signal="survival")) == [3, 2, 4]
    doubtful = StopRule(below=(0.7,), signal="survival", offset=(-5.0, 0.0, 0.0))
    assert lengths(ROWS, [4, 4, 4], doubtful) == [1, 2, 4]
    at_once = StopRule(below=(0.7,), signal="survival", bias=(-5.0, 0.0))
    assert lengths(ROWS, [4, 4, 4], at_once) == [1, 1, 1]


@pytest.mark.parametrize(
    ("total_below", "expected"), [(0.5, [4, 2, 4]), (0.6, [3, 2, 3]), (1.2, [2, 2, 2]), (9.0, [1, 1, 1])]
)
def test_a_pass_that_does_not_pay_ends_all_drafts(total_below, expected):
    # Survival beyond 0.2 of those that go on: 0.7 + 0.5 + 0.7, 0.52 + 0.61, 0.02 + 0.53.
    rule = StopRule(below=(0.2,), signal="survival", total_below=(total_below,))
    assert lengths(ROWS, [4, 4, 4], rule) == expected


def test_behind_the_first_miss_the_drafter_strays():
    runs = np.array([1, 0, 0, 0])
    trace = build_trace(np.array([1]), np.array([4]), runs, confidence=np.full(4, 0.8), stray=np.full(4, 0.1))
    drafted = draft(trace, trace.first, trace.output, np.array([4]), None)
    assert drafted.view().confidence == ((0.8, 0.8, 0.1, 0.1),)


def test_without_a_signal_there_is_none():
    trace = build_trace(np.array([1]), np.array([4]), np.array([1, 0, 0, 0]))
    view = draft(trace, trace.first, trace.output, np.array([3]), None).view()
    assert (view.length, view.confidence) == ((3,), ((),))


probabilities = st.floats(2**-10, 1 - 2**-10, width=32)
columns = st.lists(st.floats(-2.0, 2.0), min_size=1, max_size=WIDTH).map(tuple)


@st.composite
def rules(draw):
    return StopRule(
        below=tuple(draw(st.lists(st.floats(0.0, 0.9), min_size=1, max_size=WIDTH))),
        scope=draw(st.sampled_from(["request", "batch_mean"])),
        signal=draw(st.sampled_from(["confidence", "token_prob", "survival"])),
        weight=draw(st.floats(0.0, 3.0)),
        bias=draw(columns),
        offset=tuple(draw(st.lists(st.floats(-2.0, 2.0), min_size=3, max_size=3))),
    )


@FIFTY_CASES
@given(
    st.lists(st.lists(probabilities, min_size=WIDTH, max_size=WIDTH), min_size=3, max_size=3),
    st.lists(st.integers(1, WIDTH), min_size=3, max_size=3),
    rules(),
)
def test_drafts_end_where_the_engine_ends_them(rows, depth, rule):
    mask = stop_mask(rule, np.array(depth, dtype=np.int64), torch.device("cpu"))
    running = np.arange(3)
    for done in range(1, WIDTH + 1):
        shown = torch.tensor([rows[i][done - 1] for i in running], dtype=torch.float64)
        signal = shown.logit().clamp(-LOGIT_RANGE, LOGIT_RANGE) if rule.signal == "survival" else shown
        mask.update(done, running, signal.float())
        running = mask.running(done)
        if not running.size:
            break
    ours, engine = np.array(lengths(rows, depth, rule)), mask.lengths()
    if rule.signal != "survival" or rule.scope == "batch_mean":
        # Thresholds are compared in single precision there: a tie may fall the other way.
        near = [abs(c - below) < 1e-6 for row in rows for c in row for below in rule.below]
        if any(near):
            return
    assert ours.tolist() == engine.tolist()


@pytest.mark.parametrize("depth", [[0, 0, 0], [1, 0, 2]])
def test_nothing_granted_nothing_drafted(depth):
    assert lengths(ROWS, depth, StopRule(below=(0.0,))) == depth


POLICIES = {
    "plain": {},
    "constant": {"num_speculative_tokens": 3, "policy": "constant"},
    "heuristic": {"policy": "heuristic"},
    "confidence": {"draft_confidence_threshold": 0.5, "num_speculative_tokens": 8},
    "request": {"draft_confidence_threshold": 0.6, "draft_confidence_scope": "request", "num_speculative_tokens": 8},
    "fitted": {"draft_confidence_threshold": "auto"},
    "schedule": {"num_speculative_tokens_per_batch_size": [[1, 4, 5], [5, 64, 2]]},
    "elastic": {"draft_length_options": [2, 4, 8], "kv_write_gating_threshold": 0.5},
    "auto": {"policy": "auto"},
}
HOST = HostConfig(max_num_seqs=8, max_num_batched_tokens=64)


STOPPING = ("confidence", "request", "fitted")
"""What needs a drafter that can stop between passes."""


@pytest.mark.parametrize(
    ("policy", "heads"),
    [*((policy, "per_token") for policy in POLICIES), *((p, "one") for p in POLICIES if p not in STOPPING)],
)
def test_every_request_gets_its_tokens_and_every_count_adds_up(policy, heads):
    trace = synthetic(40, max_tokens=60)
    host = HostConfig(max_num_seqs=8, max_num_batched_tokens=64, passes_per_draft=heads, catch_up_tokens=16)
    factory = Spying(production(**POLICIES[policy]))
    run = simulate(trace, at.poisson(40, 0.3, np.random.default_rng(1)), flat_costs(), factory, host)

    assert np.isfinite(run.finished_s).all()
    assert (run.first_token_s >= run.arrival_s).all()
    assert (run.finished_s >= run.first_token_s).all()
    # One token of each request comes with its prompt's last chunk.
    assert run.steps.emitted.sum() == trace.output_tokens - len(trace)
    assert run.steps.prefill_rows.sum() == trace.prompt.sum()
    assert run.steps.requests.max() <= 8
    emitted: dict[str, int] = {}
    for outcome in factory.spy.outcomes:
        for name, count in zip(outcome.ids, outcome.emitted, strict=True):
            emitted[name] = emitted.get(name, 0) + count
    assert emitted == {f"r{i}": n - 1 for i, n in enumerate(trace.output.tolist()) if n > 1}
    assert sorted(factory.spy.forgotten) == sorted(emitted)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_controllers_see_is_consistent(policy):
    trace = synthetic(24, max_tokens=80)
    factory = Spying(production(**POLICIES[policy]))
    simulate(trace, at.rollout(24), flat_costs(), factory, HOST)
    spy = factory.spy
    for view, plan, outcome in zip(spy.views, spy.plans, spy.outcomes, strict=True):
        assert view.ids == outcome.ids
        for i, name in enumerate(view.ids):
            request = int(name[1:])
            position = view.context_len[i] - trace.prompt[request]
            run, left = trace.runs[trace.first[request] + position], trace.output[request] - position
            assert outcome.drafted[i] <= plan.depth[i] <= view.room_depth[i]
            assert outcome.verified[i] <= outcome.drafted[i]
            assert outcome.accepted[i] == min(run, outcome.verified[i])
            assert outcome.emitted[i] == min(outcome.accepted[i] + 1, left)
            assert len(outcome.confidence[i]) == outcome.drafted[i]
            censored = outcome.accepted[i] == outcome.verified[i] and outcome.emitted[i] > outcome.accepted[i]
            if outcome.verified[i]:
                assert (outcome.ended[i] == "all_accepted") == censored
            else:
                assert outcome.ended[i] == "none"
        assert outcome.work.verify_rows == sum(outcome.verified) + len(outcome.ids)
        assert len(outcome.work.rows_per_pass) >= max(outcome.drafted, default=0)


def test_plain_decoding_takes_a_step_for_each_token():
    trace = synthetic(1, output=Lengths(57))
    run = simulate(trace, at.rollout(1), flat_costs(2.0), production())
    assert len(run.steps.step_s) == 57  # the first of them computes the prompt
    assert run.seconds == pytest.approx(57 * 2.0)
    assert run.steps.drafted.sum() == 0


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("k", [1, 3, 6])
def test_acceptance_length_of_a_constant_draft(acceptance, k):
    """E[tokens a step] = (1 − a^(k + 1)) / (1 − a) (Leviathan et al., 2211.17192, equation 1)."""
    trace = synthetic(150, acceptance, concentration=1e6, output=Lengths(400))
    factory = production(num_speculative_tokens=k, policy="constant")
    totals = Totals(((simulate(trace, at.rollout(150), flat_costs(), factory),),))
    # 150 ends cut their last step short, out of 150 · 400 / length steps.
    assert totals.acceptance_length == pytest.approx((1 - acceptance ** (k + 1)) / (1 - acceptance), rel=0.02)


@pytest.mark.parametrize(("acceptance", "length"), [(0.0, 1.0), (1.0, 5.0)])
def test_drafts_that_are_never_or_always_accepted(acceptance, length):
    trace = synthetic(4, acceptance, output=Lengths(101))
    run = simulate(trace, at.rollout(4), flat_costs(), production(num_speculative_tokens=4, policy="constant"))
    assert run.steps.emitted.sum() / run.steps.requests.sum() == pytest.approx(length)


def test_the_drafter_s_passes_and_lag():
    # Accepted whole, then rejected at once: the last draft was not taken in, then nothing is missing.
    trace = build_trace(np.array([10]), np.array([7]), np.array([0, 2, 1, 0, 0, 0, 0]), max_tokens=np.array([50]))
    factory = Spying(production(num_speculative_tokens=2, policy="constant"))
    simulate(trace, at.rollout(1), flat_costs(), factory)
    spy = factory.spy
    assert [view.lag[0] for view in spy.views] == [(), (10,), (1,), (0,), (0,)]
    assert [outcome.work.rows_per_pass for outcome in spy.outcomes] == [(), (11, 1), (2, 1), (1, 1), (1, 1)]
    assert [outcome.accepted for outcome in spy.outcomes[1:]] == [(2,), (0,), (0,), (0,)]


def test_a_drafter_that_lags_far_catches_up_in_chunks():
    trace = synthetic(1, 1.0, prompt=Lengths(100), output=Lengths(30))
    host = HostConfig(catch_up_tokens=40)
    factory = Spying(production(num_speculative_tokens=4, policy="constant"))
    simulate(trace, at.rollout(1), flat_costs(), factory, host)
    outcomes = factory.spy.outcomes[1:]
    assert [outcome.drafted[0] for outcome in outcomes[:3]] == [0, 0, 4]
    assert [outcome.work.rows_per_pass[0] for outcome in outcomes[:3]] == [40, 40, 23]


def test_gated_tokens_are_taken_in_again():
    runs = np.array([0, 4, 3, 2, 1, 0, 0, 0, 0])
    confidence = np.array([0.9, 0.9, 0.2, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9])
    trace = build_trace(np.array([5]), np.array([9]), runs, confidence=confidence)
    keys = {"num_speculative_tokens": 4, "policy": "constant", "kv_write_gating_threshold": 0.5}
    factory = Spying(production(**keys))
    simulate(trace, at.rollout(1), flat_costs(), factory)
    first = factory.spy.outcomes[1]
    assert first.accepted == (4,)
    assert (first.work.kv_skipped, first.work.kv_redone) == (1, 2)
    # The second draft has no KV: it, the two behind it and the target's own are missing, of which one is the last.
    assert factory.spy.views[2].lag == ((3,),)


def test_lengths_are_not_known_beforehand():
    trace = synthetic(1, output=Lengths(10), max_tokens=500)
    factory = Spying(production())
    simulate(trace, at.rollout(1), flat_costs(), factory)
    assert factory.spy.views[1].room_depth == (498,)


def test_a_request_that_ends_inside_its_draft():
    trace = build_trace(np.array([5]), np.array([4]), np.array([0, 3, 2, 1]), max_tokens=np.array([100]))
    factory = Spying(production(num_speculative_tokens=8, policy="constant"))
    simulate(trace, at.rollout(1), flat_costs(), factory)
    last = factory.spy.outcomes[-1]
    assert (last.drafted, last.accepted, last.emitted, last.ended) == ((8,), (3,), (3,), ("stopped",))


def test_kv_memory_limits_who_runs():
    trace = synthetic(12, prompt=Lengths(40), output=Lengths(10))
    run = simulate(trace, at.rollout(12), flat_costs(), production(), HostConfig(kv_tokens=160))
    assert run.steps.requests.max() == 3
    with pytest.raises(CapacityError, match="50 tokens does not fit into KV memory for 49"):
        simulate(trace, at.rollout(12), flat_costs(), production(), HostConfig(kv_tokens=49))


def test_a_closed_loop_keeps_its_users_busy():
    trace = synthetic(30, prompt=Lengths(4), output=Lengths(20))
    run = simulate(trace, at.closed_loop(30, 5), flat_costs(), production())
    assert run.steps.requests.max() <= 5
    assert np.isfinite(run.arrival_s).all()
    assert (np.sort(run.arrival_s)[5:] >= run.finished_s.min()).all()
    thinking = simulate(trace, at.closed_loop(30, 5, 100.0), flat_costs(), production())
    assert thinking.seconds > run.seconds + 400


@pytest.mark.parametrize("policy", ["constant", "fitted", "auto"])
def test_the_same_seed_gives_the_same_run(policy):
    def once(seed):
        rng = np.random.default_rng(seed)
        return simulate(
            synthetic(20),
            at.poisson(20, 0.2, np.random.default_rng(0)),
            flat_costs(),
            production(**POLICIES[policy]),
            HOST,
            time_noise=0.1,
            rng=rng,
        )

    one, two, other = once(1), once(1), once(2)
    assert np.array_equal(one.finished_s, two.finished_s)
    assert np.array_equal(one.steps.drafted, two.steps.drafted)
    assert not np.array_equal(one.finished_s, other.finished_s)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("acceptance", [0.3, 0.8])
def test_nobody_beats_the_oracle_alone(policy, acceptance):
    trace = synthetic(6, acceptance, output=Lengths(80))
    costs = flat_costs(1.0, 0.15)

    def seconds(factory):
        # One request after the other.
        return simulate(trace, at.closed_loop(6, 1), costs, factory).seconds

    best = seconds(lambda limits: OracleController(trace, limits))
    assert seconds(lambda limits: OracleController(trace, limits, costs)) == pytest.approx(best)
    assert seconds(production(**POLICIES[policy])) >= best - 1e-9


@pytest.mark.parametrize("drafter_s", [0.02, 0.3, 2.0])
def test_the_oracle_that_knows_costs_drafts_what_pays(drafter_s):
    trace = synthetic(60, 0.7, output=Lengths(60))
    costs = flat_costs(1.0, drafter_s)

    def rate(factory):
        run = simulate(trace, at.closed_loop(60, 8), costs, factory, HOST)
        return Totals(((run,),)).tokens_per_second

    best = rate(lambda limits: OracleController(trace, limits, costs))
    for k in (1, 2, 4, 8):
        assert best >= rate(production(num_speculative_tokens=k, policy="constant"))
    assert best >= rate(production())
    assert best >= 0.999 * rate(lambda limits: OracleController(trace, limits))


def test_the_oracle_wastes_nothing():
    trace = synthetic(20, 0.6)
    run = simulate(trace, at.rollout(20), flat_costs(), lambda limits: OracleController(trace, limits), HOST)
    assert run.steps.accepted.sum() == run.steps.drafted.sum() > 0


class Greedy(PlainController):
    """Plans more than there is room for."""

    def plan(self, view):
        lens = tuple(room + 1 for room in view.room_depth)
        return SpecPlan(step=view.step, depth=lens, proposer=(0,) * len(lens), nodes=lens)


def test_a_plan_beyond_its_room_is_a_bug():
    with pytest.raises(IntegrityError, match="does not fit its view"):
        simulate(synthetic(1), at.rollout(1), flat_costs(), lambda limits: Greedy())


@pytest.mark.parametrize(
    "fields",
    [{"max_num_seqs": 0}, {"max_draft": 65}, {"max_num_batched_tokens": 64}, {"passes_per_draft": "two"}],
)
def test_impossible_hosts(fields):
    with pytest.raises(ConfigError, match="expected"):
        HostConfig(**fields)


def test_a_policy_that_needs_a_signal_the_trace_lacks():
    trace = build_trace(np.array([5]), np.array([2]), np.array([0, 1]))
    with pytest.raises(ConfigError, match="has no confidence"):
        simulate(trace, at.rollout(1), flat_costs(), production(draft_confidence_threshold=0.5))


def test_totals_and_course():
    trace = synthetic(20)
    run = simulate(trace, at.rollout(20), flat_costs(), production(num_speculative_tokens=2, policy="constant"), HOST)
    fleet, repeated = Totals(((run, run),)), Totals(((run,), (run,)))
    assert fleet.tokens_per_second == pytest.approx(2 * repeated.tokens_per_second)
    assert fleet.document()["latency_s"]["p50"] == pytest.approx(float(np.median(run.finished_s)))
    line = course(fleet, bins=10)
    assert (line.requests * line.at_s[0] * 2).sum() == pytest.approx((run.steps.requests * run.steps.step_s).sum())
    assert np.nanmax(line.draft_length) <= 2
