from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.engine.tokenizer import Detokenizer
from unit.engine.texts import ByteTokenizer

TOKENIZER = ByteTokenizer()
TOKENS = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=70)


def start(prompt: str = "ab", **params: object) -> Detokenizer:
    return Detokenizer(TOKENIZER, SamplingParams(**params), TOKENIZER.encode(prompt))  # type: ignore[arg-type]


def push(text: Detokenizer, tokens: Sequence[int]) -> str | None:
    """Until a stop string comes up."""
    return next((hit for hit in map(text.push, tokens) if hit is not None), None)


@given(tokens=TOKENS, prompt=st.sampled_from(["a", "é", "stop 🙂", "long enough to fill the window 🙂"]))
@settings(max_examples=150)
def test_at_the_end_the_text_is_that_of_a_full_decode(tokens: list[int], prompt: str) -> None:
    text = start(prompt)
    shown = ""
    for token in tokens:
        assert text.push(token) is None
        assert text.text.startswith(shown)
        shown = text.text
    text.finish()
    assert text.text == TOKENIZER.decode(tokens)


@given(text=st.text(max_size=30))
@settings(max_examples=60)
def test_what_is_shown_never_ends_in_half_a_character(text: str) -> None:
    one = start()
    for byte in text.encode():
        one.push(byte)
        assert text.startswith(one.text)
    one.finish()
    assert one.text == text


def test_a_character_of_several_tokens_appears_when_it_is_complete() -> None:
    text = start()
    seen = []
    for byte in "🙂".encode():
        text.push(byte)
        seen.append(text.text)
    assert seen == ["", "", "", "🙂"]


def test_a_character_that_the_prompt_began_belongs_to_the_output() -> None:
    first, *rest = "é".encode()
    text = Detokenizer(TOKENIZER, SamplingParams(), [ord("a"), first])
    for byte in rest:
        text.push(byte)
    assert text.text == "é"


def test_the_window_slides() -> None:
    text = start()
    for _ in range(500):
        text.push(97)
    assert text.text == "a" * 500
    assert len(text._window) <= 25


def test_special_tokens_are_left_out_unless_wanted() -> None:
    for skip, expected in ((True, "x"), (False, "x<eos>")):
        text = start(skip_special_tokens=skip)
        push(text, [120, TOKENIZER.eos])
        text.finish()
        assert text.text == expected


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("tokens", [TOKENIZER.bytes_of("one stop two"), TOKENIZER.encode("one stop two")])
def test_a_stop_string_over_several_tokens_cuts_the_text(tokens: list[int], include: bool) -> None:
    text = start(stop="stop", include_stop_str_in_output=include)
    assert push(text, tokens) == "stop"
    text.finish()
    assert text.text == ("one stop" if include else "one ")


def test_the_rest_of_a_token_behind_the_stop_string_is_cut_too() -> None:
    for include, expected in ((False, "s"), (True, "st")):
        text = start(stop="t", include_stop_str_in_output=include)
        assert push(text, TOKENIZER.encode("stop")) == "t"  # one token
        text.finish()
        assert text.text == expected


def test_the_first_of_several_stop_strings_counts() -> None:
    assert push(start(stop=["op", "to"]), TOKENIZER.encode("stop")) == "to"
    assert push(start(stop=["opx", "p"]), TOKENIZER.encode("stop")) == "p"


def test_a_stop_string_in_the_prompt_does_not_count() -> None:
    text = start("sto", stop="stop")
    assert push(text, [ord("p"), ord("q")]) is None
    assert text.text == "pq"


def test_stop_strings_of_several_bytes_a_character() -> None:
    text = start(stop="é🙂")
    assert push(text, TOKENIZER.bytes_of("xé🙂")) == "é🙂"
    assert text.text == "x"


def test_where_it_may_not_stop_the_text_stays_whole() -> None:
    text = start(stop=["stop", "q"])
    for byte in b"a stop q":
        assert text.push(byte, may_stop=False) is None
    assert text.text == "a stop q"
    assert text.push(ord("x")) is None  # the ones from before do not come up later
    assert text.push(ord("q")) == "q"
    assert text.text == "a stop qx"


def test_a_stop_string_may_begin_before_the_least_length_and_end_after_it() -> None:
    text = start(stop="stop")
    for byte in b"sto":
        text.push(byte, may_stop=False)
    assert text.push(ord("p")) == "stop"
    assert text.text == ""


@given(text=st.text("stopx", max_size=25), include=st.booleans())
@settings(max_examples=100)
def test_what_is_stable_is_never_taken_back(text: str, include: bool) -> None:
    one = start(stop=["stop", "ox"], include_stop_str_in_output=include)
    shown = ""
    for byte in text.encode():
        hit = one.push(byte)
        assert one.text.startswith(shown)
        shown = one.text[: one.stable_length()]
        if hit is not None:
            break
    ends = [(text.index(stop) + len(stop), text.index(stop), stop) for stop in ("stop", "ox") if stop in text]
    end, at, _ = min(ends, default=(len(text), len(text), ""))
    assert one.text == text[: end if include else at]


def test_without_stop_strings_everything_is_stable() -> None:
    text = start()
    push(text, TOKENIZER.encode("abc"))
    assert text.stable_length() == 3
    held = start(stop="four")
    push(held, TOKENIZER.encode("abcde"))
    assert held.stable_length() == 2
