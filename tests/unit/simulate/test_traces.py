"""Acceptance traces: drawn, written and read, and the arrivals that go with them."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaspec.contract.errors import ConfigError
from dynaspec.simulate import traces as at
from dynaspec.simulate.comparison import Case, spread_over_nodes
from dynaspec.simulate.recorded import from_jsonl, load_trace, save_trace
from dynaspec.simulate.traces import PADDING, Lengths, Synthetic, build_trace, runs_by_reach, runs_of, separation
from unit.simulate.scenes import synthetic


def naive_runs(accepted, output):
    runs, start = [], 0
    for length in output:
        request = accepted[start : start + length]
        for t in range(length):
            run = 0
            while t + run < length and request[t + run]:
                run += 1
            runs.append(run)
        start += length
    return runs


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=5))
def test_runs_end_at_the_first_miss_and_at_the_request_s_end(requests):
    accepted = np.array([value for request in requests for value in request])
    output = np.array([len(request) for request in requests])
    expected = naive_runs(accepted.tolist(), output.tolist())
    assert runs_of(accepted, output).tolist() == expected
    assert runs_by_reach(np.where(accepted, PADDING, 0), output).tolist() == expected


def test_a_token_that_only_shallow_slots_get_right():
    # Position 2 is accepted in slot 1 only.
    assert runs_by_reach(np.array([9, 9, 1, 9]), np.array([4])).tolist() == [2, 1, 2, 1]


@pytest.mark.parametrize("decay", [1.0, 0.8])
def test_acceptance_is_what_was_asked(decay):
    trace = synthetic(400, 0.7, concentration=1e6, decay=decay, output=Lengths(200))
    rates = [0.7 * decay**j for j in range(4)]
    assert trace.survival(4) == pytest.approx(np.cumprod(rates), abs=0.01)


def test_acceptance_varies_between_requests_as_the_beta_does():
    trace = synthetic(3000, 0.6, concentration=4.0, output=Lengths(200))
    rates = np.add.reduceat(trace.runs > 0, trace.first) / trace.output
    # Var of Beta is m(1 − m)/(c + 1), and each rate is measured over 200 tokens.
    assert rates.var() == pytest.approx(0.24 / 5 + 0.24 * (4 / 5) / 200, rel=0.1)


def test_phases():
    drawn = Synthetic(300, (0.9, 0.3), concentration=1e6, output=Lengths(100)).draw(np.random.default_rng(0))
    easy, hard = drawn.take(np.arange(150)), drawn.take(np.arange(150, 300))
    assert easy.survival(1)[0] == pytest.approx(0.9, abs=0.02)
    assert hard.survival(1)[0] == pytest.approx(0.3, abs=0.02)


def verdicts_and_confidence(trace):
    return trace.runs > 0, trace.confidence[: len(trace.runs)]


def area_under_curve(hit, signal):
    rank = np.argsort(np.argsort(signal)) + 1
    hits = hit.sum()
    return (rank[hit].sum() - hits * (hits + 1) / 2) / (hits * (~hit).sum())


@pytest.mark.parametrize("auc", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_the_confidence_tells_as_much_as_asked(auc, noise):
    trace = synthetic(100, 0.7, concentration=1e6, auc=auc, noise=noise, output=Lengths(400))
    assert area_under_curve(*verdicts_and_confidence(trace)) == pytest.approx(auc, abs=0.01)


def test_the_confidence_is_calibrated():
    trace = synthetic(200, 0.6, auc=0.85, concentration=3.0, output=Lengths(400))
    hit, confidence = verdicts_and_confidence(trace)
    for low in np.arange(0.0, 1.0, 0.2):
        inside = (confidence >= low) & (confidence < low + 0.2)
        assert hit[inside].mean() == pytest.approx(confidence[inside].mean(), abs=0.02)


def test_without_signal_there_is_no_separation():
    assert separation(0.5, 0.0) == separation(0.5, 2.0) == 0.0


def test_lengths():
    drawn = Lengths(200, 1.0).draw(50_000, np.random.default_rng(1))
    assert drawn.mean() == pytest.approx(200, rel=0.03)
    assert drawn.min() >= 1
    assert set(Lengths(50).draw(10, np.random.default_rng(1)).tolist()) == {50}


def test_take_keeps_each_request_whole():
    trace = synthetic(12)
    some = np.array([7, 2, 11])
    taken = trace.take(some)
    for i, request in enumerate(some):
        where = slice(trace.first[request], trace.first[request] + trace.output[request])
        here = slice(taken.first[i], taken.first[i] + taken.output[i])
        assert taken.prompt[i] == trace.prompt[request]
        assert taken.runs[here].tolist() == trace.runs[where].tolist()
        assert taken.confidence[here].tolist() == trace.confidence[where].tolist()
    assert len(taken.confidence) == len(taken.runs) + PADDING


def test_the_same_seed_draws_the_same_trace():
    one, two, other = synthetic(seed=3), synthetic(seed=3), synthetic(seed=4)
    assert np.array_equal(one.runs, two.runs)
    assert np.array_equal(one.stray, two.stray)
    assert not np.array_equal(one.output, other.output)


def test_written_and_read(tmp_path):
    trace = synthetic(8)
    save_trace(trace, tmp_path / "trace.jsonl")
    read = load_trace(tmp_path / "trace.jsonl", np.random.default_rng(0))
    for column in ("prompt", "output", "max_tokens", "first", "runs"):
        assert np.array_equal(getattr(read, column), getattr(trace, column)), column
    assert read.confidence == pytest.approx(trace.confidence, abs=1e-4)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("nonsense", "line 1: it is no JSON"),
        ("[1]", "line 1: it is no JSON object"),
        ({"runs": [0]}, "there is no prompt_tokens"),
        ({"prompt_tokens": 0, "runs": [0]}, "prompt_tokens is 0; expected an integer of at least 1"),
        ({"prompt_tokens": 3, "runs": []}, "runs is no list of integers"),
        ({"prompt_tokens": 3, "runs": [0.5]}, "runs is no list of integers"),
        ({"prompt_tokens": 3, "runs": [3, 0]}, "goes beyond its request's end"),
        ({"prompt_tokens": 3, "runs": [1, 0], "confidence": [0.5]}, "confidence is no list of 2 numbers"),
        ({"prompt_tokens": 3, "runs": [1, 0], "confidence": [0.5, 1.5]}, "from 0 to 1"),
        ({"prompt_tokens": 3, "runs": [0, 0], "max_tokens": 1}, "longer than its max_tokens"),
        ({"prompt_tokens": 3, "runs": [0], "tokens": 1}, "the key 'tokens' is unknown"),
    ],
)
def test_malformed_files_are_named(tmp_path, line, said):
    path = tmp_path / "trace.jsonl"
    path.write_text((line if isinstance(line, str) else json.dumps(line)) + "\n")
    with pytest.raises(ConfigError) as error:
        from_jsonl(path)
    assert said in str(error.value)
    assert "trace.jsonl" in str(error.value)


def test_signals_for_some_requests_only(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [{"prompt_tokens": 1, "runs": [0], "confidence": [0.1]}, {"prompt_tokens": 1, "runs": [0]}]
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(ConfigError, match="1 of 2 requests have confidence; expected all or none"):
        from_jsonl(path)


@pytest.mark.parametrize("content", [None, ""])
def test_a_file_that_is_not_there_or_empty(tmp_path, content):
    path = tmp_path / "trace.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"cannot be read|is empty"):
        load_trace(path, np.random.default_rng(0))


@pytest.mark.parametrize(
    "fields",
    [
        {"acceptance": (1.2,)},
        {"acceptance": ()},
        {"auc": 0.4},
        {"decay": 0.0},
        {"concentration": -1.0},
        {"requests": 0},
    ],
)
def test_values_out_of_range(fields):
    with pytest.raises(ConfigError, match=r"expected|phases"):
        Synthetic(**{"requests": 4, **fields})


def test_an_empty_trace():
    none = np.zeros(0, dtype=np.int64)
    with pytest.raises(ConfigError, match="no requests"):
        build_trace(none, none, none)


def rng():
    return np.random.default_rng(5)


def test_poisson():
    times = at.poisson(20_000, 4.0, rng()).times
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.03)


def test_bursts_come_together_at_the_same_rate():
    times = at.bursts(20_000, 4.0, 10, rng()).times
    assert len(np.unique(times)) == 2000
    assert len(times) / times[-1] == pytest.approx(4.0, rel=0.1)
    assert len(at.bursts(7, 4.0, 3, rng()).times) == 7


def test_a_shift_of_the_rate():
    times = at.shift(20_000, [1.0, 10.0], rng()).times
    assert np.diff(times[:10_000]).mean() == pytest.approx(1.0, rel=0.05)
    assert np.diff(times[10_000:]).mean() == pytest.approx(0.1, rel=0.05)


def test_rollout_and_closed_loop():
    assert at.rollout(5).times.tolist() == [0.0] * 5
    assert at.closed_loop(9, 4).times.tolist() == [0.0] * 4
    assert at.closed_loop(2, 4).times.tolist() == [0.0] * 2


@pytest.mark.parametrize("text", ["poisson:2", "burst:2:5", "shift:1:2:3", "rollout", "closed:3", "closed:3:1.5"])
def test_forms(text):
    arrivals = at.parse_arrivals(text, synthetic(6), rng())
    assert (np.diff(arrivals.times) >= 0).all()
    assert len(arrivals.times) == (3 if text.startswith("closed") else 6)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "steady",
        "poisson",
        "poisson:fast",
        "poisson:0",
        "poisson:-1",
        "poisson:nan",
        "poisson:1:2",
        "burst:1:2.5",
        "burst:1:0",
        "closed:0",
        "closed:1:-1",
        "trace",
    ],
)
def test_wrong_forms_say_what_is_expected(text):
    with pytest.raises(ConfigError, match="expected"):
        at.parse_arrivals(text, synthetic(6), rng())


@pytest.mark.parametrize("router", ["round_robin", "random"])
def test_a_fleet_serves_every_request_once(router):
    trace = synthetic(50)
    case = Case(0, trace, at.poisson(50, 3.0, rng()))
    nodes = spread_over_nodes(case, 7, router, rng())
    assert sum(node.trace.output_tokens for node in nodes) == trace.output_tokens
    assert sorted(np.concatenate([node.arrivals.times for node in nodes])) == sorted(case.arrivals.times)
    assert all((np.diff(node.arrivals.times) >= 0).all() for node in nodes)


def test_a_closed_loop_does_not_spread():
    case = Case(0, synthetic(9), at.closed_loop(9, 3))
    assert spread_over_nodes(case, 1, "random", rng()) == [case]
    with pytest.raises(ConfigError, match="runs on one node only"):
        spread_over_nodes(case, 2, "random", rng())
