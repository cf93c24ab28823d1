from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dynaspec
from dynaspec.contract.costs import PassCosts
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.step import (
    DraftView,
    Explains,
    Limits,
    ProposerTraits,
    SpecPlan,
    StepOutcome,
    StepView,
    StopRule,
    Work,
)
from dynaspec.observe.decision_log import (
    DecisionLog,
    ForgetCall,
    LoggedController,
    ObserveCall,
    PlanCall,
    TrimCall,
    read_calls,
    read_header,
    read_log,
)

HOST = Limits(tuple(range(9)), proposers=(ProposerTraits("draft_model"),), verify_budget=64, plan_lag=1)


class Scripted:
    """Answers what it is told to; its estimates are the latest ones given."""

    def __init__(self) -> None:
        self.answer: SpecPlan | None = None
        self.believed: Mapping[str, Any] = {}
        self.seen: list[object] = []

    def plan(self, view: StepView) -> SpecPlan:
        return self._answer(view)

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        return self._answer(drafts)

    def observe(self, outcome: StepOutcome) -> None:
        self.seen.append(outcome)

    def forget(self, ids: Sequence[str]) -> None:
        self.seen.append(ids)

    def estimates(self) -> Mapping[str, Any]:
        return self.believed

    def _answer(self, seen: object) -> SpecPlan:
        self.seen.append(seen)
        time.sleep(0)  # another thread's turn, which must not come before the call is logged
        assert self.answer is not None
        return self.answer


def make_view(step: int, ids: Sequence[str] = ("a", "b"), host: Limits = HOST) -> StepView:
    size = len(ids)
    return StepView(
        step=step,
        ids=tuple(ids),
        context_len=(10,) * size,
        room_depth=(8,) * size,
        room_nodes=(8,) * size,
        max_draft=(None, 3, 0, None)[:size],
        temperature=(0.7,) * size,
        lag=((1,) * size,),
        offers=(None,),
        prefill_tokens=0,
        waiting=2,
        limits=host,
    )


def make_plan(step: int, *depth: int, **fields: Any) -> SpecPlan:
    return SpecPlan(step=step, depth=depth, proposer=(0,) * len(depth), nodes=depth, **fields)


def make_outcome(step: int, drafts: DraftView, ids: Sequence[str] = ("a", "b")) -> StepOutcome:
    return StepOutcome(
        plan_step=step,
        ids=tuple(ids),
        proposer=(0,) * len(ids),
        requested=drafts.length,
        drafted=drafts.length,
        verified=drafts.length,
        accepted=tuple(max(0, n - 1) for n in drafts.length),
        emitted=tuple(max(1, n) for n in drafts.length),
        ended=tuple("rejected" if n else "none" for n in drafts.length),
        early_exit=(False,) * len(ids),
        confidence=tuple(tuple(row) for row in drafts.confidence),
        signal=drafts.signal,
        work=Work(rows_per_pass=(2, 1), verify_rows=5, kv_tokens=60, kv_skipped=1),
        draft_s=0.1 + 0.2,
        verify_s=1e-5,
        step_s=1 / 3,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "decisions.jsonl"


def record(path: Path, story: Callable[[LoggedController, Scripted], None], **header: Any) -> list[Any]:
    log, inner = DecisionLog(path, header), Scripted()
    story(LoggedController(inner, log), inner)
    log.close()
    return list(read_calls(path))


def one_step(logged: LoggedController, inner: Scripted, step: int = 1) -> StepOutcome:
    seen, drafts = make_view(step), DraftView((3, 1), ((0.9, 0.5, 0.1), (1 / 3,)), ((6.0, 1 / 7, -2.5), ()))
    inner.answer = granted = make_plan(step, 4, 2, stop=StopRule((0.25,) * 4))
    logged.plan(seen)
    inner.answer = make_plan(step, 2, 1, stop=granted.stop)
    logged.trim(seen, granted, drafts)
    result = make_outcome(step, drafts)
    logged.observe(result)
    return result


def test_a_step_comes_back_as_it_was(path: Path) -> None:
    def story(logged: LoggedController, inner: Scripted) -> None:
        inner.believed = {"mode": "speculate", "plain_goodput": np.float32(0.5), "acceptance": np.array([0.5, 0.25])}
        one_step(logged, inner)
        logged.forget(["a"])
        logged.forget([])

    plan, trim, observe, forget = record(path, story)
    assert plan == PlanCall(3, 1, make_view(1), make_plan(1, 4, 2, stop=StopRule((0.25,) * 4)), plan.estimates)
    assert plan.estimates == {"mode": "speculate", "plain_goodput": 0.5, "acceptance": [0.5, 0.25]}
    assert isinstance(trim, TrimCall)
    assert trim.plan == plan.plan
    assert trim.view == plan.view
    assert trim.trimmed == make_plan(1, 2, 1, stop=StopRule((0.25,) * 4))
    assert observe == ObserveCall(5, 1, make_outcome(1, trim.drafts))
    assert forget == ForgetCall(6, ("a",))


def test_what_is_the_same_is_written_once(path: Path) -> None:
    record(path, lambda logged, inner: [one_step(logged, inner, step) for step in (1, 2)])
    lines = [json.loads(line) for line in path.read_text("ascii").splitlines()]
    assert [line.get("call") for line in lines] == [None, "limits", *["plan", "trim", "observe"] * 2]
    assert not {"view", "granted"} & lines[3].keys()
    assert lines[3]["trimmed"] == {"depth": [2, 1], "nodes": [2, 1]}
    assert lines[3]["drafts"]["signal"] == [[6.0, 1 / 7, -2.5], []]
    assert not {"ids", "confidence", "signal"} & lines[4]["outcome"].keys()


def test_a_signal_that_changed_after_drafting_is_the_outcomes(path: Path) -> None:
    """Whatever the outcome says stands, also that it has none."""
    drafts = DraftView((2, 0), ((0.9, 0.5), ()), ((1.5, -1.0), ()))
    told = (drafts.signal, (), ((2.5, -1.0), ()))

    def story(logged: LoggedController, inner: Scripted) -> None:
        for step, signal in enumerate(told):
            inner.answer = make_plan(step, 2, 0)
            logged.plan(make_view(step))
            logged.trim(make_view(step), inner.answer, drafts)
            logged.observe(replace(make_outcome(step, drafts), signal=signal))

    calls = record(path, story)
    assert [call.drafts.signal for call in calls if isinstance(call, TrimCall)] == [drafts.signal] * 3
    assert [call.outcome.signal for call in calls if isinstance(call, ObserveCall)] == list(told)


def test_signals_that_are_left_out_are_empty(path: Path) -> None:
    record(path, lambda logged, inner: one_step(logged, inner) and None)
    old = path.read_text("ascii").replace(json.dumps([[6.0, 1 / 7, -2.5], []], separators=(",", ":")), "null")
    assert old.count(',"signal":null') == 1
    path.write_text(old.replace(',"signal":null', ""), "ascii")
    _, trim, observe, *_ = read_calls(path)
    assert isinstance(trim, TrimCall)
    assert isinstance(observe, ObserveCall)
    assert trim.drafts.signal == observe.outcome.signal == ()
    assert observe.outcome.confidence == ((0.9, 0.5, 0.1), (1 / 3,))


numbers = st.floats() | st.sampled_from([0.1, 5e-324, float("nan"), float("inf"), float("-inf"), -0.0])
names = st.text(max_size=4) | st.sampled_from(["\ud800", "a\u2028b\n"])


@st.composite
def anything(draw: st.DrawFn) -> tuple[StepView, SpecPlan, SpecPlan, DraftView, StepOutcome]:
    """A step of values that need not make sense together, only have columns of the same length."""
    step = draw(st.integers(0, 2**63))
    ids = tuple(draw(st.lists(names, max_size=3, unique=True)))
    size = len(ids)

    def column(values: st.SearchStrategy[Any]) -> tuple[Any, ...]:
        return tuple(draw(st.lists(values, min_size=size, max_size=size)))

    counts, flags = st.integers(0, 2**40), st.booleans()
    confidence, signal = (column(st.lists(numbers, max_size=3).map(tuple)) for _ in range(2))
    rule = st.builds(
        StopRule,
        below=st.lists(numbers, max_size=3).map(tuple),
        scope=st.sampled_from(["request", "batch_mean"]),
        signal=st.sampled_from(["confidence", "token_prob", "survival"]),
        weight=numbers,
        bias=st.lists(numbers, max_size=3).map(tuple),
        offset=st.just(column(numbers)),
    )

    def plan() -> SpecPlan:
        columns = {name: column(counts) for name in ("depth", "proposer", "nodes")}
        stop, nodes = draw(st.none() | rule), draw(st.none() | counts)
        return SpecPlan(step=step, stop=stop, verify_nodes=nodes, gate_kv_below=draw(numbers), **columns)

    seen = StepView(
        step=step,
        ids=ids,
        context_len=column(counts),
        room_depth=column(counts),
        room_nodes=column(counts),
        max_draft=column(st.none() | counts),
        temperature=column(numbers),
        lag=(column(counts), column(counts)),
        offers=(None, column(st.tuples(counts, counts))),
        prefill_tokens=draw(counts),
        waiting=draw(counts),
        limits=HOST,
        expected_acceptance=draw(st.sampled_from([(), column(st.none() | numbers)])),
    )
    drafts = DraftView(
        column(counts),
        confidence,
        draw(st.sampled_from([(), signal])),
        repeat_bonus=draw(st.sampled_from([(), signal])),
        parents=draw(st.none() | st.just(column(st.lists(counts, max_size=2).map(tuple)))),
    )
    result = StepOutcome(
        plan_step=step,
        ids=draw(st.sampled_from([ids, ids[::-1]])),
        ended=column(st.sampled_from(["none", "rejected", "all_accepted", "stopped", "invalid"])),
        early_exit=column(flags),
        confidence=draw(st.sampled_from([confidence, ((),) * size])),
        signal=draw(st.sampled_from([(), signal, ((),) * size])),
        work=Work(tuple(draw(st.lists(counts, max_size=3))), draw(counts), draw(counts), draw(counts), draw(counts)),
        draft_s=draw(numbers),
        verify_s=draw(numbers),
        step_s=draw(numbers),
        came_true=draw(st.sampled_from([(), (None, column(st.tuples(counts, counts, counts)))])),
        **{name: column(counts) for name in ("proposer", "requested", "drafted", "verified", "accepted", "emitted")},
    )
    return seen, plan(), plan(), drafts, result


@settings(max_examples=60)
@given(step=anything(), same_plan=st.booleans())
def test_nothing_is_lost(tmp_path_factory: pytest.TempPathFactory, step: Any, same_plan: bool) -> None:
    seen, planned, granted, drafts, result = step
    granted = planned if same_plan else granted

    def story(logged: LoggedController, inner: Scripted) -> None:
        inner.answer = planned
        inner.believed = {"plain_goodput": float("nan"), "stop_below": [float("inf")]}
        logged.plan(seen)
        logged.trim(seen, granted, drafts)
        logged.observe(result)

    calls = record(tmp_path_factory.mktemp("log") / "log.jsonl", story)
    expected = [
        PlanCall(3, seen.step, seen, planned, {"plain_goodput": float("nan"), "stop_below": [float("inf")]}),
        TrimCall(4, seen.step, seen, granted, drafts, planned),
        ObserveCall(5, seen.step, result),
    ]
    assert as_text(calls) == as_text(expected)


def as_text(calls: Sequence[object]) -> str:
    """Every bit of every float; NaN equals itself, and −0.0 equals 0.0."""
    return repr(calls).replace("-0.0,", "0.0,").replace("-0.0)", "0.0)")


def test_requests_may_leave_between_plan_and_trim(path: Path) -> None:
    def story(logged: LoggedController, inner: Scripted) -> None:
        seen = make_view(1, ("a", "b", "c"))
        inner.answer = plan = make_plan(1, 4, 3, 2)
        logged.plan(seen)
        drafts = DraftView((4, 2), ((0.1,) * 4, (0.2,) * 2))
        inner.answer = plan.select([0, 2])
        logged.trim(seen.select([0, 2]), plan.select([0, 2]), drafts)
        logged.observe(make_outcome(1, drafts, ("a", "c")))

    plan, trim, observe = record(path, story)
    assert trim.view == make_view(1, ("a", "b", "c")).select([0, 2])
    assert trim.plan == plan.plan.select([0, 2]) == trim.trimmed
    assert observe.outcome.ids == ("a", "c")
    (step,) = read_log(path)
    assert step.view.ids == ("a", "c")
    assert step.plan == plan.plan.select([0, 2])


def test_late_outcomes_keep_their_place_among_calls_and_join_their_step(path: Path) -> None:
    drafts = DraftView((1,), ((0.5,),))

    def story(logged: LoggedController, inner: Scripted) -> None:
        for step in (1, 2, 3):
            inner.answer = make_plan(step, 1)
            logged.plan(make_view(step, ("a",)))
            logged.trim(make_view(step, ("a",)), inner.answer, drafts)
            if step == 3:
                logged.observe(make_outcome(2, drafts, ("a",)))
                logged.observe(make_outcome(1, drafts, ("a",)))

    calls = record(path, story)
    kinds = [(type(call).__name__[0], call.step) for call in calls]
    assert kinds == [("P", 1), ("T", 1), ("P", 2), ("T", 2), ("P", 3), ("T", 3), ("O", 2), ("O", 1)]
    steps = list(read_log(path))
    assert [step.step for step in steps] == [1, 2, 3]
    assert [step.outcome and step.outcome.plan_step for step in steps] == [1, 2, None]


def test_steps_that_were_given_up_have_no_drafts(path: Path) -> None:
    def story(logged: LoggedController, inner: Scripted) -> None:
        for step in range(200):  # far more than are remembered
            inner.answer = make_plan(step, 1, 1)
            logged.plan(make_view(step))
        inner.answer = make_plan(0, 1, 0)
        logged.trim(make_view(0), make_plan(0, 1, 1), DraftView((1, 0), ((0.5,), ())))
        logged.observe(make_outcome(0, DraftView((1, 0), ((0.5,), ()))))
        one_step(logged, inner, 200)

    calls = record(path, story)
    assert len(calls) == 200 + 2 + 3
    assert calls[200].plan == make_plan(0, 1, 1)
    steps = list(read_log(path))
    assert [step.step for step in steps] == list(range(201))
    assert [step.drafts is not None for step in steps] == [False] * 200 + [True]


def test_changed_limits_are_written_again(path: Path) -> None:
    other = Limits((0, 4))

    def story(logged: LoggedController, inner: Scripted) -> None:
        for step, host in enumerate((HOST, HOST, other)):
            inner.answer = make_plan(step, 0, 0)
            logged.plan(make_view(step, host=host))

    calls = record(path, story)
    assert [call.view.limits for call in calls] == [HOST, HOST, other]
    assert path.read_text("ascii").count('"call":"limits"') == 2


def test_the_header_says_what_it_was_given(path: Path) -> None:
    costs = PassCosts(((1, 0.01), (8, 0.02)), (((1, 0.001),), ()), first_s=(0.0003, 0.0), context_s=1e-9, read_s=4e-9)
    config = {"policy": "auto", "num_speculative_tokens": 5}
    record(path, lambda logged, inner: None, speculative_config=config, seed=7, costs=costs, host="vllm")
    header = read_header(path)
    assert header.dynaspec == dynaspec.__version__
    assert header.speculative_config == config
    assert header.seed == 7
    assert header.costs == costs
    assert header.fields["host"] == "vllm"


def test_without_a_header(path: Path) -> None:
    DecisionLog(path).close()
    header = read_header(path)
    assert (header.speculative_config, header.seed, header.costs) == (None, 0, None)
    assert list(read_log(path)) == []


def test_estimates_pass_through(path: Path) -> None:
    log, inner = DecisionLog(path), Scripted()
    inner.believed = {"mode": "plain"}
    logged = LoggedController(inner, log)
    assert isinstance(logged, Explains)
    assert logged.estimates() == {"mode": "plain"}
    log.close()


class Silent:
    """A controller without estimates."""

    def plan(self, view: StepView) -> SpecPlan:
        return make_plan(view.step, *(0 for _ in view.ids))

    def trim(self, view: StepView, plan: SpecPlan, drafts: DraftView) -> SpecPlan:
        return plan

    def observe(self, outcome: StepOutcome) -> None: ...

    def forget(self, ids: Sequence[str]) -> None: ...


def test_a_controller_without_estimates(path: Path) -> None:
    log = DecisionLog(path)
    logged = LoggedController(Silent(), log)
    assert logged.estimates() == {}
    logged.plan(make_view(1))
    log.close()
    (step,) = read_log(path)
    assert step.estimates == {}
    assert step.trimmed is None


def test_threads_are_put_in_one_order(path: Path) -> None:
    """The log's order is the order in which the controller was called."""
    log, inner = DecisionLog(path), Scripted()
    logged = LoggedController(inner, log)
    inner.answer = make_plan(0, 1, 1)
    drafts = DraftView((1, 1), ((), ()))

    def work(first: int) -> None:
        for i in range(100):
            logged.plan(make_view(first + i))
            logged.trim(make_view(first + i), make_plan(first + i, 1, 1), drafts)
            logged.observe(make_outcome(first + i, drafts))

    threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    calls = list(read_calls(path))
    assert len(calls) == 900
    logged_order = [getattr(c, "view", None) if isinstance(c, PlanCall) else getattr(c, "outcome", None) for c in calls]
    seen_order = [value if not isinstance(value, DraftView) else None for value in inner.seen]
    assert logged_order == seen_order


class FullDisk:
    """A file whose disk is full from the ``first`` write on."""

    def __init__(self, first: int) -> None:
        self.left = first
        self.writes = 0

    def write(self, text: bytes) -> int:
        self.writes += 1
        self.left -= 1
        if self.left < 0:
            raise OSError(28, "No space left on device")
        return len(text)

    def close(self) -> None:
        raise OSError(28, "No space left on device")


def test_a_full_disk_is_said_once_and_costs_nothing(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log, inner = DecisionLog(path), Scripted()
    log._file.close()  # type: ignore[union-attr]
    log._file = disk = FullDisk(2)  # type: ignore[assignment]
    logged = LoggedController(inner, log)
    with caplog.at_level(logging.ERROR):
        results = [one_step(logged, inner, step) for step in range(5)]
    log.close()
    assert [value for value in inner.seen if isinstance(value, StepOutcome)] == results
    assert disk.writes == 3
    assert not log.open
    (message,) = caplog.messages
    assert "No space left on device" in message
    assert str(path) in message


@pytest.mark.parametrize("value", [object(), {"\ud800": object()}])
def test_estimates_that_cannot_be_written_cost_nothing(
    path: Path, caplog: pytest.LogCaptureFixture, value: object
) -> None:
    log, inner = DecisionLog(path), Scripted()
    inner.believed = {"mode": value}
    with caplog.at_level(logging.ERROR):
        one_step(LoggedController(inner, log), inner)
    assert len(inner.seen) == 3
    assert "object" in caplog.text


def test_an_error_of_the_controller_is_the_hosts(path: Path) -> None:
    log = DecisionLog(path)
    with pytest.raises(AssertionError):
        LoggedController(Scripted(), log).plan(make_view(1))
    assert log.open
    log.close()


def test_a_file_that_cannot_be_created() -> None:
    with pytest.raises(ConfigError, match=r"the decision log /nowhere/log\.jsonl cannot be written: No such file"):
        DecisionLog("/nowhere/log.jsonl")


GOOD = '{"format":"dynaspec-decision-log","version":2,"dynaspec":"0.1.0","header":{}}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no complete line"),
        ("{", "holds no complete line"),
        ("hello\n", "line 1: it is no JSON"),
        ("[1]\n", "line 1: it holds list; expected a JSON object"),
        ('{"prompt": "x"}\n', "line 1: it is no decision log's header; expected the format"),
        (GOOD.replace(":2,", ":9,"), "line 1: the version is 9; expected 2"),
        (GOOD.replace(',"header":{}', ""), "line 1: the field 'header' is missing"),
        (GOOD.replace('"header":{}', '"header":3'), "line 1: header is 3; expected a JSON object"),
        (GOOD.replace("{}}", '{"seed":"x"}}'), "line 1: seed is 'x'; expected an integer"),
        (GOOD.replace("{}}", '{"costs":{"target":[[1]]}}}'), "line 1: target.0"),
        (GOOD + "{}\n", "line 2: the field 'call' is missing"),
        (GOOD + '{"call": "dance"}\n', "line 2: call is 'dance'; expected limits, plan, trim, observe or forget"),
        (GOOD + "\n", "line 2: it is no JSON"),
        (GOOD + "\xff\n", "line 2: it is no JSON"),
        (GOOD + '{"call": "plan", "step": 1, "view": {}, "plan": {}}\n', "line 2: a view comes before any limits"),
        (GOOD + '{"call": "limits", "limits": {"draft_lens": "x"}}\n', "line 2: draft_lens: input should be"),
        (GOOD + '{"call": "limits", "limits": 3}\n', "line 2: limits is 3; expected a JSON object"),
        (GOOD + '{"call": "trim", "step": 4, "drafts": {}}\n', "line 2: step 4 is trimmed; expected it to be planned"),
        (GOOD + '{"call": "observe", "step": 4, "outcome": {}}\n', "line 2: ids: field required"),
    ],
)
def test_malformed_files(path: Path, text: str, message: str) -> None:
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as raised:
        list(read_log(path))
    assert str(raised.value).startswith(str(path))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_columns_of_different_lengths(path: Path) -> None:
    record(path, one_step)
    path.write_text(path.read_text("ascii").replace('"accepted":[2,0]', '"accepted":[2]'), "ascii")
    with pytest.raises(ConfigError, match="line 5: accepted has 1 entries but ids has 2; expected as many"):
        list(read_calls(path))


def test_signals_of_other_requests(path: Path) -> None:
    record(path, one_step)
    told = json.dumps([[6.0, 1 / 7, -2.5], []], separators=(",", ":"))
    path.write_text(path.read_text("ascii").replace(told, "[[6.0]]"), "ascii")
    with pytest.raises(ConfigError, match="line 4: signal has 1 entries but length has 2; expected as many"):
        list(read_calls(path))


def test_a_log_that_is_still_written(path: Path) -> None:
    calls = record(path, one_step)
    path.write_bytes(path.read_bytes()[:-10])
    assert list(read_calls(path)) == calls[:-1]


def test_a_missing_file(path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_header(path)
