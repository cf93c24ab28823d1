"""Figures from records, and the server's counters."""

from __future__ import annotations

import pytest

from dynaspec.bench.serving.results import measure, peak_requests, peak_tokens, read_counters, spread
from dynaspec.bench.serving.server import METRICS, Reported
from unit.bench.serving.records import answered, failed, load

ALL = Reported(metrics=METRICS, percentiles=(50.0, 99.0))
TWO = (
    answered(0.0, [0.1, 0.2, 0.5], tokens=9, queued=0.25),
    answered(1.0, [0.3, 0.4], tokens=2),
)


def test_figures():
    measured = measure(load(*TWO, failed("HTTP 400")), ALL)
    assert measured.completed == 2
    assert measured.input_tokens == 20
    assert measured.cached_tokens == 6
    assert measured.output_tokens == 11
    assert measured.per_second(measured.output_tokens) == pytest.approx(11 / 4)
    assert measured.good is None
    means = {name: times.mean for name, times in measured.spreads.items()}
    assert means == pytest.approx(
        {
            "ttft": 200,
            "tpot": (400 / 8 + 100 / 1) / 2,
            "itl": (100 + 300 + 100) / 3,
            "e2el": 450,
            "client_queue_time": 125,
            "e2el_including_client_queue": 575,
        }
    )
    ttft = measured.spreads["ttft"]
    assert (ttft.median, ttft.std) == (pytest.approx(200), pytest.approx(100))
    assert ttft.percentiles == pytest.approx({50.0: 200, 99.0: 298})


def test_a_single_token_has_no_time_per_token():
    measured = measure(load(answered(0.0, [0.2], tokens=1)), ALL)
    assert measured.spreads["tpot"].mean is None
    assert measured.spreads["itl"].percentiles == {50.0: None, 99.0: None}
    assert measured.spreads["e2el"].mean == pytest.approx(200)


def test_several_tokens_in_one_chunk():
    """With speculation a request may end with its first chunk: no time passes after the first token."""
    measured = measure(load(answered(0.0, [0.2], tokens=4)), ALL)
    assert measured.spreads["tpot"].mean == 0.0


@pytest.mark.parametrize(
    ("goals", "good"),
    [
        ({"ttft": 200}, 1),
        ({"ttft": 310, "e2el": 450}, 1),
        ({"tpot": 110, "e2el": 500}, 2),
        ({"tpot": 49}, 0),
    ],
)
def test_goodput(goals, good):
    measured = measure(load(*TWO, failed("x")), Reported(goals_ms=goals))
    assert measured.good == good


def test_a_single_token_meets_any_time_per_token():
    assert measure(load(answered(0.0, [0.2], tokens=1)), Reported(goals_ms={"tpot": 1})).good == 1


def test_failures_by_kind():
    records = [failed("HTTP 400", "a"), failed("connection lost"), failed("HTTP 400", "b")]
    measured = measure(load(*records), ALL)
    assert measured.completed == 0
    assert measured.spreads["ttft"].mean is None
    assert measured.peak_requests == 0
    kinds = [(failure.kind, failure.message, count) for failure, count in measured.failure_kinds]
    assert kinds == [("HTTP 400", "a", 2), ("connection lost", "no", 1)]


def test_peak_of_requests():
    """The second starts when the first ends, the third while the second runs."""
    records = [answered(0.0, [1.0], 1), answered(1.0, [1.0], 1), answered(1.5, [1.0], 1)]
    assert peak_requests(records) == 2
    assert peak_requests(records[:2]) == 1


def test_peak_of_tokens():
    """Nine tokens in three chunks: two chunks in the first second, one in the third; then six more there."""
    records = [answered(5.0, [0.1, 0.9, 2.5], 9), answered(7.0, [0.2], 6)]
    assert peak_tokens(records) == 9.0
    assert peak_tokens([]) == 0.0


def test_spread_of_one():
    found = spread([0.5], (99.9,))
    assert (found.mean, found.std, found.percentiles) == (500, 0, {99.9: 500})


def page(namespace: str, drafts: int, drafted: int, per_position: tuple[int, ...]) -> str:
    lines = [
        "# HELP other Something else",
        "# TYPE other gauge",
        "other 3",
        f'{namespace}:spec_decode_num_drafts_total{{engine="0"}} {drafts}',
        f'{namespace}:spec_decode_num_drafts_total{{engine="1"}} 1.0',
        f'{namespace}:spec_decode_num_draft_tokens_total{{engine="0"}} {drafted}',
        f'{namespace}:spec_decode_num_draft_tokens_created{{engine="0"}} 1.7e9',
        f'{namespace}:spec_decode_num_accepted_tokens_total{{engine="0"}} {sum(per_position)}',
    ]
    for position, accepted in enumerate(per_position):
        name = "spec_decode_num_accepted_tokens_per_pos_total"
        lines.append(f'{namespace}:{name}{{engine="0",position="{position}"}} {accepted}')
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("namespace", ["dynaspec", "vllm"])
def test_difference(namespace):
    before = read_counters(page(namespace, 9, 30, (8, 4)))
    after = read_counters(page(namespace, 19, 60, (16, 10, 2)))
    assert (before.drafts, before.draft_tokens, before.accepted) == (10, 30, 12), "all engines together"
    assert before.accepted_per_pos == (8, 4)
    during = after - before
    assert (during.drafts, during.draft_tokens, during.accepted) == (10, 30, 16)
    assert during.accepted_per_pos == (8, 6, 2)
    assert during.draft_acceptance_rate == pytest.approx(16 / 30)
    assert during.mean_acceptance_length == pytest.approx(2.6)
    assert during.rate_per_position == pytest.approx((0.8, 0.6, 0.2))


def test_ours_come_first():
    assert read_counters(page("vllm", 9, 30, (8,)) + page("dynaspec", 1, 2, (1,))).draft_tokens == 2


@pytest.mark.parametrize("text", ["", "python_info 1\n", "<html>no metrics</html>"])
def test_no_counters(text):
    assert read_counters(text) is None


def test_nothing_drafted():
    nothing = read_counters(page("vllm", 0, 0, ())) - read_counters(page("vllm", 0, 0, ()))
    assert nothing.draft_acceptance_rate is nothing.mean_acceptance_length is None
    assert nothing.rate_per_position == ()
