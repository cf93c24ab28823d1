from __future__ import annotations

import pytest

from dynaspec.contract.sampling_params import StructuredOutputsParams
from dynaspec.sampling.grammar import DeadEnd
from dynaspec.schedule.request import Request
from support.letters import letters_grammar
from unit.engine.fakes import request


class Letters:
    """A text sink where token i is the i-th letter; finds ``stop`` in the text."""

    def __init__(self, stop: str) -> None:
        self.text = ""
        self.ended = False
        self._stop = stop

    def stable_length(self) -> int:
        return len(self.text)

    def push(self, token: int, *, may_stop: bool = True) -> str | None:
        self.text += chr(ord("a") + token)
        return self._stop if may_stop and self.text.endswith(self._stop) else None

    def finish(self) -> None:
        self.ended = True


def make(*, stop: str = "?", **options: object) -> Request:
    one = request("r", [1, 2, 3], **options)  # type: ignore[arg-type]
    one.text = Letters(stop)
    return one


def test_tokens_are_taken_up_to_the_length() -> None:
    one = make(most=3)
    assert one.commit([5, 6], 1.0) == 2
    assert (one.finished, one.length, one.tokens().tolist()) == (False, 5, [1, 2, 3, 5, 6])
    assert one.commit([7, 8, 9], 2.0) == 1
    assert (one.output, one.finish_reason, one.stop_reason) == ([5, 6, 7], "length", None)
    assert one.first_token_s == 1.0


def test_nothing_behind_a_stop_token_is_taken() -> None:
    one = make(stop_ids=[9])
    assert one.commit([4, 9, 5], 1.0) == 2
    assert (one.output, one.finish_reason, one.stop_reason) == ([4, 9], "stop", 9)


def test_end_of_sequence_has_no_stop_reason() -> None:
    one = make(stop_ids=[9])
    one.eos_ids = (9,)
    one.commit([9], 1.0)
    assert (one.finish_reason, one.stop_reason) == ("stop", None)


def test_a_stop_token_adds_no_text() -> None:
    one = make(stop_ids=[9])
    one.commit([0, 9], 1.0)
    assert one.text is not None
    assert one.text.text == "a"


def test_a_stop_token_before_min_tokens_is_a_token_like_others() -> None:
    one = make(stop_ids=[9], min_tokens=3)
    assert one.commit([9, 9, 9, 9], 1.0) == 3
    assert one.finish_reason == "stop"


def test_a_stop_string_ends_the_request() -> None:
    one = make(stop="bc")
    assert one.commit([0, 1, 2, 3], 1.0) == 3
    assert (one.finish_reason, one.stop_reason) == ("stop", "bc")


def test_a_stop_string_before_min_tokens_does_not() -> None:
    one = make(stop="bc", min_tokens=4)
    assert one.commit([1, 2, 1, 2, 0], 1.0) == 4
    assert (one.output, one.stop_reason) == ([1, 2, 1, 2], "bc")


@pytest.mark.parametrize(
    ("stop_ids", "stop", "reason"),
    [([2], "c", ("stop", 2)), ([], "c", ("stop", "c")), ([], "?", ("length", None))],
)
def test_the_first_check_that_holds_names_the_reason(stop_ids: list[int], stop: str, reason: object) -> None:
    one = make(stop_ids=stop_ids, stop=stop, most=2)
    one.commit([0, 2], 1.0)
    assert (one.finish_reason, one.stop_reason) == reason


def test_ending_lets_the_text_out() -> None:
    one = make()
    one.end("abort", 4.0)
    assert isinstance(one.text, Letters)
    assert (one.finish_reason, one.finished_s, one.text.ended) == ("abort", 4.0, True)


def test_where_no_token_may_follow_it_ends() -> None:
    one = make()
    assert one.commit([0, 1], 1.0, DeadEnd("error", "why")) == 2
    assert (one.output, one.finish_reason, one.stop_reason) == ([0, 1], "error", "why")
    other = make(stop_ids=[1])
    assert other.commit([0, 1], 1.0, DeadEnd("error", "why")) == 2
    assert (other.finish_reason, other.stop_reason) == ("stop", 1)


def test_a_grammar_ends_it_before_min_tokens() -> None:
    one = make(stop_ids=[5], min_tokens=3)
    one.grammar = letters_grammar(StructuredOutputsParams(regex="a"))
    assert one.commit([0, 5, 5], 1.0) == 2
    assert one.finish_reason == "stop"
