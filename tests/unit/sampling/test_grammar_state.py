"""Following a grammar: what is allowed depends on the tokens alone, not on which drafts were tried before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dynaspec.contract.sampling_params import SamplingParams, StructuredOutputsParams
from dynaspec.sampling.grammar import DeadEnd, Grammar, GrammarCompiler
from dynaspec.sampling.grammar_state import Allowed, GrammarState
from dynaspec.sampling.ops import Rows
from dynaspec.sampling.state import SamplerState
from support.letters import letters_grammar
from unit.engine.texts import ByteTokenizer

TOKENIZER = ByteTokenizer()
VOCAB = TOKENIZER.vocab_size
EOS = TOKENIZER.eos
COMPILER = GrammarCompiler(TOKENIZER.to_json, VOCAB, [EOS])
A, B, C, D, E, END = range(6)


def letters(regex: str, *, ends: tuple[int, ...] = (END,), min_tokens: int = 0) -> GrammarState:
    return GrammarState(letters_grammar(StructuredOutputsParams(regex=regex)), ends, min_tokens)


def tokens_of(allowed: Allowed) -> list[int]:
    return [token for token in range(32 * len(allowed.bits)) if allowed.has(token)]


def test_each_row_has_the_mask_behind_its_drafts() -> None:
    state = letters("a(b|c)d")
    assert [tokens_of(state.allowed([A, B, D][:n])) for n in range(4)] == [[A], [B, C], [D], [END]]
    assert [state.allowed([A, B, D][:n]).complete for n in range(4)] == [False, False, False, True]
    state.commit([A])
    assert tokens_of(state.allowed([])) == [B, C]
    assert tokens_of(state.allowed([C])) == [D]
    state.commit([B, D])
    assert tokens_of(state.allowed([])) == [END]


def test_behind_a_refused_token_and_behind_the_end_everything_goes() -> None:
    state = letters("a(b|c)?")
    everything = list(range(32))
    assert tokens_of(state.allowed([D])) == everything
    assert tokens_of(state.allowed([A, D, B])) == everything
    assert tokens_of(state.allowed([A, END])) == everything
    assert tokens_of(state.allowed([A])) == [B, C, END]
    assert state.refuses([], B)
    assert not state.refuses([A, END], A)


def test_drafts_are_testable_up_to_the_first_refused_token() -> None:
    state = letters("a(b|c)?")
    assert state.testable([]) == 0
    assert state.testable([B, A]) == 1
    assert state.testable([A, D, A]) == 2
    assert state.testable([A, B]) == 2
    assert state.testable([A, END, D, D]) == 4


def test_stop_tokens_come_where_the_form_may_end() -> None:
    state = letters("ab?", ends=(END, D))
    assert tokens_of(state.allowed([])) == [A]
    assert tokens_of(state.allowed([A])) == [B, D, END]
    state = letters("ab?", ends=(D,))  # and an end of sequence that is none of the request's never comes
    assert tokens_of(state.allowed([A, B])) == [D]
    state = letters("a[bd]c", ends=(END, D))  # a form may name a stop token itself
    assert tokens_of(state.allowed([A])) == [B, D]
    assert tokens_of(state.allowed([A, D])) == list(range(32))
    state = letters("ab?", ends=())
    assert tokens_of(state.allowed([A, B])) == []
    assert state.allowed([A, B]).complete


def test_min_tokens_hold_the_end_back_as_long_as_the_form_goes_on() -> None:
    state = letters("a[bc]*", min_tokens=3)
    assert tokens_of(state.allowed([A, B])) == [B, C]
    assert tokens_of(state.allowed([A, B, B])) == [B, C, END]
    state.commit([A, B])
    assert tokens_of(state.allowed([])) == [B, C]
    assert tokens_of(state.allowed([C])) == [B, C, END]
    assert tokens_of(letters("ab?", min_tokens=9).allowed([A, B])) == [END]


FORMS = (
    {"json": {"type": "object", "properties": {"st": {"type": "string", "maxLength": 6}, "op": {"type": "integer"}}}},
    {"json_object": True, "disable_any_whitespace": True},
    {"regex": r"(stop|é| t[a-z]{1,3}|\d+){2,9}"},
    {"choice": ["stop", "stop it", "été", "st"]},
    {"grammar": 'start: sum\nsum: term ("+" term)*\nterm: /[a-z]+/ | "(" sum ")"'},
    {"grammar": "start[max_tokens=5]: /(.|\\n)*/"},  # these three cannot be taken back by llguidance
    {"grammar": 'start: t "."\nt[stop="x"]: /[a-z]*/'},
    {"grammar": 'start: t "." t\nt[max_tokens=2]: /[a-z]+/'},
)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_drafts_tried_before_make_no_difference(form: dict[str, Any]) -> None:
    """Random walks with drafts, right and wrong ones, against a new state for every prefix."""
    grammar = COMPILER.compile(StructuredOutputsParams(**form))
    rng = np.random.default_rng(0)
    for _ in range(6):
        state, output = GrammarState(grammar, [EOS], 3), list[int]()
        for _ in range(12):
            drafted = draft(state, rng)
            for depth in rng.permutation(len(drafted) + 1)[:3].tolist():
                check(state.allowed(drafted[:depth]), grammar, output + drafted[:depth])
            new = drafted[: int(rng.integers(len(drafted) + 1))]
            new += pick(state.allowed(new), rng)[: int(rng.integers(2))]
            state.commit(new)
            output += new
            check(state.allowed([]), grammar, output)
            if not pick(state.allowed([]), rng):
                break


def draft(state: GrammarState, rng: np.random.Generator) -> list[int]:
    """Up to five tokens, now and then with one at the end that is refused."""
    drafted: list[int] = []
    for _ in range(int(rng.integers(6))):
        drafted += pick(state.allowed(drafted), rng)
    if rng.random() < 0.2:
        state.allowed([*drafted, int(rng.integers(VOCAB))])
    return drafted


def pick(allowed: Allowed, rng: np.random.Generator) -> list[int]:
    """One that goes on, if there is any."""
    going_on = [token for token in range(VOCAB) if allowed.has(token) and token != EOS]
    return [int(rng.choice(going_on))] if going_on else []


def check(found: Allowed, grammar: Grammar, output: list[int]) -> None:
    fresh = GrammarState(grammar, [EOS], 3)
    fresh.commit(output)
    expected = fresh.allowed([])
    assert np.array_equal(found.bits, expected.bits)
    assert (found.complete, found.fault) == (expected.complete, expected.fault)


TOO_COMPLEX = StructuredOutputsParams(regex="(a{1000}){1000}")


def test_a_grammar_that_becomes_too_complex_allows_nothing_and_says_why() -> None:
    grammar = COMPILER.compile(TOO_COMPLEX)
    for drafted in ([], [97]):
        state = GrammarState(grammar, [EOS], 0)
        state.allowed(drafted)
        state.commit([97])
        for _ in range(2):
            allowed = state.allowed([])
            assert tokens_of(allowed) == []
            assert "too many expressions" in allowed.fault
            assert not allowed.complete


def test_a_draft_into_what_is_too_complex_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of a draft breaks the matcher; the output goes another way."""
    state = letters("a(b|c)*d")
    state.allowed([A, B])
    assert state._matcher is not None
    state._matcher.consume_token(E)  # an error, which matchers never leave
    assert state._matcher.is_error()
    state.commit([A, C])
    assert tokens_of(state.allowed([])) == [B, C, D]
    assert tokens_of(state.allowed([D])) == [END]


def test_what_other_matchers_have_learned_may_be_too_much_once(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = letters_grammar(StructuredOutputsParams(regex="a(b|c)*d"))
    renewed: list[Callable[[], Any]] = []
    honest = grammar.renew
    monkeypatch.setattr(grammar, "renew", lambda: renewed.append(honest) or honest())
    state = GrammarState(grammar, [END], 0)
    state.commit([A])
    assert state._matcher is not None
    state._matcher.consume_token(E)
    assert tokens_of(state.allowed([])) == [B, C, D]
    assert len(renewed) == 1


# --- through the sampler ----------------------------------------------------------------------------------------------


def sampler(*params: SamplingParams, vocab: int = 6) -> SamplerState:
    state = SamplerState(len(params), vocab)
    for lane, one in enumerate(params):
        form = one.structured_outputs
        state.add(
            lane,
            one,
            seed=lane,
            n_index=0,
            eos_token_ids=[END],
            bad_words=[],
            prompt=[],
            grammar=None if form is None else letters_grammar(form),
        )
    return state


def form(regex: str, **options: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(regex=regex), **options)


def finite(scores: torch.Tensor) -> list[list[int]]:
    return [torch.nonzero(row > -torch.inf).flatten().tolist() for row in scores]


def rows_of(drafts: list[list[int]], lens: list[int]) -> Rows:
    request = np.repeat(np.arange(len(lens)), np.array(lens) + 1)
    depth = np.concatenate([np.arange(n + 1) for n in lens])
    return Rows(request, request, depth, np.array(drafts, np.int64))


def test_rows_are_masked_beside_rows_without_a_grammar() -> None:
    state = sampler(form("a(b|c)d"), SamplingParams(), form("[ab]c", min_tokens=9, temperature=0.5))
    rows = rows_of([[A, B], [A, B], [B, C]], [2, 1, 2])
    logits = torch.zeros(8, 6)
    assert finite(state.process(logits, rows)) == [[A], [B, C], [D], [*range(6)], [*range(6)], [A, B], [C], [END]]
    assert (logits == 0).all()


def test_logits_wider_than_the_vocabulary_are_cut() -> None:
    state = sampler(form("[abc]"))
    rows = rows_of([[A]], [1])
    assert finite(state.process(torch.zeros(2, 70), rows)) == [[A, B, C], [END]]


def test_a_grammar_goes_together_with_the_other_rules() -> None:
    state = sampler(
        form("[abc]*", allowed_token_ids=[B, C, D]),
        form("[abc]*", logit_bias={A: 5.0, D: 100.0}, top_k=2),
        form("[ab]c", allowed_token_ids=[A, B]),
        form("[abc]", allowed_token_ids=[A]),
    )
    rows = rows_of([[B], [B], [A], [A]], [1, 0, 1, 1])
    scores = state.process(torch.arange(6.0).repeat(7, 1), rows)
    assert finite(scores) == [[B, C], [B, C], [A, END], [A, B], [], [A], []]
    assert state.without_token(scores, rows).tolist() == [False, False, False, False, True, False, True]
    assert state.grammars.dead_end(3, [A]) == DeadEnd("stop", None)
    stuck = state.grammars.dead_end(2, [A])
    assert stuck.finish_reason == "error"
    assert "leave no token" in (stuck.why or "")


def test_lanes_are_handed_on_without_their_grammar() -> None:
    state = sampler(form("a+"), form("b+"))
    state.remove(0)
    state.add(0, SamplingParams(), seed=0, n_index=0, eos_token_ids=[END], bad_words=[], prompt=[])
    rows = rows_of([[C], [B]], [0, 0])
    assert finite(state.process(torch.zeros(2, 6), rows)) == [[*range(6)], [B]]
    lanes = np.array([0, 1])
    assert state.grammars.testable(lanes, np.array([[C, C], [C, C]]), np.array([2, 2])).tolist() == [2, 1]
    assert state.grammars.refused(rows, np.array([0, 1]), np.array([C, C])).tolist() == [False, True]
    assert state.reads_drafts(lanes)
    assert not state.reads_drafts(lanes[:1])


def test_after_a_preemption_the_output_is_followed_anew() -> None:
    state = SamplerState(1, 6)
    state.add(
        0,
        form("abcd"),
        seed=0,
        n_index=0,
        eos_token_ids=[END],
        bad_words=[],
        prompt=[],
        output=[A, B],
        grammar=letters_grammar(StructuredOutputsParams(regex="abcd")),
    )
    assert finite(state.process(torch.zeros(2, 6), rows_of([[C]], [1]))) == [[C], [D]]
