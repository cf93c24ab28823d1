from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from dynaspec.contract.outputs import FinishReason
from dynaspec.observe.stats import RequestMeter


@dataclass(eq=False)
class Fake:
    """A continuation whose times the test sets."""

    arrival_s: float = 10.0
    scheduled_s: float = 11.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    finished_s: float = 0.0
    finish_reason: FinishReason | None = None
    prompt: list[int] = field(default_factory=lambda: [1, 2, 3])
    output: list[int] = field(default_factory=list)

    def emit(self, tokens: int, now: float, end: FinishReason | None = None) -> Fake:
        if not self.output:
            self.first_token_s = now
        self.output += [7] * tokens
        self.last_token_s = now
        if end is not None:
            self.finish_reason, self.finished_s = end, now
        return self


@pytest.fixture
def meter() -> RequestMeter:
    return RequestMeter()


def arrived(meter: RequestMeter, **values: object) -> Fake:
    request = Fake(**values)  # type: ignore[arg-type]
    meter.arrived(request)
    return request


def test_one_request_from_arrival_to_end(meter: RequestMeter) -> None:
    request = arrived(meter)
    meter.step([request.emit(1, 14.0)])
    meter.step([request.emit(3, 14.5)])
    meter.step([request.emit(1, 15.0, "stop")])
    totals = meter.snapshot()
    assert (totals.prompt_tokens, totals.generation_tokens) == (3, 5)
    assert totals.finished == {"stop": 1, "length": 0, "abort": 0, "error": 0}
    sums = {
        "queue_s": 1.0,
        "prefill_s": 3.0,
        "first_token_s": 4.0,
        "decode_s": 1.0,
        "inference_s": 4.0,
        "e2e_s": 5.0,
        "per_output_token_s": 0.25,
        "prompt_length": 3.0,
        "output_length": 5.0,
    }
    for name, value in sums.items():
        histogram = getattr(totals, name)
        assert (name, histogram.count, histogram.total) == (name, 1, pytest.approx(value))
    assert (totals.inter_token_s.count, totals.inter_token_s.total) == (2, pytest.approx(1.0))


def test_several_tokens_at_once_are_one_output(meter: RequestMeter) -> None:
    request = arrived(meter)
    meter.step([request.emit(1, 12.0)])
    meter.step([request.emit(8, 12.5)])
    assert meter.snapshot().inter_token_s.count == 1


def test_a_step_that_gave_nothing_is_no_output(meter: RequestMeter) -> None:
    request = arrived(meter)
    meter.step([request])
    meter.step([request.emit(1, 12.0)])
    meter.step([request])
    meter.step([request.emit(1, 13.0)])
    totals = meter.snapshot()
    assert totals.first_token_s.count == 1
    assert (totals.inter_token_s.count, totals.inter_token_s.total) == (1, pytest.approx(1.0))


def test_an_output_of_one_token_has_no_time_between_tokens(meter: RequestMeter) -> None:
    meter.step([arrived(meter).emit(1, 12.0, "length")])
    totals = meter.snapshot()
    assert totals.e2e_s.count == totals.decode_s.count == 1
    assert totals.per_output_token_s.count == totals.inter_token_s.count == 0


def test_a_request_may_end_without_a_token(meter: RequestMeter) -> None:
    meter.step([arrived(meter).emit(0, 12.0, "stop")])
    totals = meter.snapshot()
    assert totals.finished["stop"] == totals.e2e_s.count == totals.output_length.count == 1
    assert totals.generation_tokens == totals.first_token_s.count == totals.per_output_token_s.count == 0


def test_aborted_requests_are_counted_but_not_timed(meter: RequestMeter) -> None:
    waiting, running = arrived(meter, scheduled_s=0.0), arrived(meter)
    meter.step([running.emit(2, 12.0)])
    for request in (waiting, running):
        request.finish_reason, request.finished_s = "abort", 13.0
        meter.ended(request)
    totals = meter.snapshot()
    assert totals.finished["abort"] == 2
    assert totals.generation_tokens == 2
    assert totals.first_token_s.count == 1
    assert totals.e2e_s.count == totals.output_length.count == 0


def test_a_request_ends_once(meter: RequestMeter) -> None:
    request = arrived(meter)
    meter.step([request.emit(1, 12.0, "stop")])
    meter.ended(request)
    meter.step([request.emit(1, 13.0)])
    totals = meter.snapshot()
    assert sum(totals.finished.values()) == totals.e2e_s.count == 1
    assert totals.generation_tokens == 1, "a step in flight was meant for it too"


def test_snapshots_do_not_change(meter: RequestMeter) -> None:
    before = meter.snapshot()
    meter.step([arrived(meter).emit(1, 12.0, "stop")])
    assert before == RequestMeter().snapshot()
