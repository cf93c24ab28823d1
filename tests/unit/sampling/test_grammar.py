"""Forms are compiled once, and what cannot be compiled is refused in a sentence and in bounded time."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dynaspec.contract.errors import RequestError
from dynaspec.contract.sampling_params import StructuredOutputsParams
from dynaspec.sampling import grammar as module
from dynaspec.sampling.grammar import Grammar, GrammarCompiler
from dynaspec.sampling.grammar_state import GrammarState
from unit.engine.texts import ByteTokenizer

TOKENIZER = ByteTokenizer()
EOS = TOKENIZER.eos


def compiler(**options: Any) -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER.to_json, TOKENIZER.vocab_size, [EOS], **options)


@pytest.fixture(scope="module")
def shared() -> GrammarCompiler:
    return compiler()


def takes(grammar: Grammar, text: str) -> bool:
    """Whether a text has the form as a whole."""
    state, tokens = GrammarState(grammar, [EOS], min_tokens=0), TOKENIZER.encode(text)
    for i, token in enumerate(tokens):
        if state.refuses(tokens[:i], token):
            return False
    return state.allowed(tokens).complete


OBJECT = '{"a": 1}'
CHOICES = ['say "x"', "back\\slash", "new\nline", "日🙂"]
GOOD: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"regex": r"a/b\d\\"}, ["a/b3\\"], ["a/b\\", "ab3\\"]),
    ({"regex": "a\n|é+"}, ["a\n", "éé"], ["a"]),
    ({"choice": CHOICES}, CHOICES, ["x"]),
    ({"json": {"type": "integer"}}, ["12", "-3"], ["1.5", "x"]),
    ({"json": "true"}, ["12", '"x"', OBJECT], ["x"]),
    ({"json": {"enum": ["é"]}}, ['"é"'], ["é"]),
    ({"json_object": True}, [OBJECT, '{"a":1}', "{}", '{\n"a" :\t1}'], ["[]", "1"]),
    ({"json_object": True, "disable_any_whitespace": True}, ['{"a":1}'], [OBJECT]),
    ({"json_object": True, "whitespace_pattern": " ?"}, [OBJECT, '{"a":1}'], ['{"a":  1}']),
    ({"json": "true", "disable_any_whitespace": True}, ['{"a":1}'], [OBJECT]),
    ({"grammar": 'start: A start | "."\nA: /[ab]/'}, [".", "ab."], ["ab"]),
    ({"grammar": 'start: "::=" %json {"type": "integer"}'}, ["::=5"], ["::=x"]),
    ({"grammar": 'root ::= pair ("," pair)*\npair ::= [a-c] "=" [0-9]+'}, ["a=1", "a=1,b=23"], ["a="]),
    ({"json": {"type": "number", "multipleOf": 0.01}}, ["1.25"], ["1.255"]),
    ({"json": {"type": "integer", "multipleOf": 1_000_000}}, ["2000000"], ["2000001"]),
]


@pytest.mark.parametrize(("form", "good", "bad"), GOOD, ids=lambda value: str(value)[:50])
def test_forms_of_every_kind(form: dict[str, Any], good: list[str], bad: list[str], shared: GrammarCompiler) -> None:
    grammar = shared.compile(StructuredOutputsParams(**form))
    assert [takes(grammar, text) for text in good] == [True] * len(good)
    assert [takes(grammar, text) for text in bad] == [False] * len(bad)


MANY = {
    "common beginnings": [f"item-{i:05d}" for i in range(12_000)],
    "common ends": [f"{i * 7919 % 99_991}-item" for i in range(12_000)],
    "one the beginning of another": [f"{'a' * i}" for i in range(1, 500)],
    "short": [f"{i:x}" for i in range(60_000)],
    "with quotes and signs": [f'"{i}"\n\\é🙂' for i in range(5000)],
}


@pytest.mark.parametrize("name", MANY)
def test_thousands_of_choices(name: str, shared: GrammarCompiler) -> None:
    choices = MANY[name]
    grammar = shared.compile(StructuredOutputsParams(choice=choices))
    assert all(takes(grammar, choice) for choice in (choices[0], choices[len(choices) // 2], choices[-1]))
    assert not takes(grammar, f"{choices[-1]}x")
    assert not takes(grammar, choices[0][1:])


def test_thousands_of_values_in_a_schema(shared: GrammarCompiler) -> None:
    grammar = shared.compile(StructuredOutputsParams(json={"enum": MANY["common ends"]}))
    assert takes(grammar, f'"{MANY["common ends"][-1]}"')
    assert not takes(grammar, '"item"')


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def doubling(levels: int) -> dict[str, Any]:
    """2^levels alternatives, written shortly."""
    parts = {f"d{i}": {"allOf": [{"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2}] * 2} for i in range(levels)}
    return {"$defs": parts | {f"d{levels}": {"type": "integer"}}, "$ref": "#/$defs/d0"}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"regex": "(a"}, "cannot be used: .*unclosed group"),
    ({"regex": "(?=a)b"}, "look-around"),
    ({"regex": r"[^\s\S]"}, "no token of the vocabulary fits"),
    ({"regex": "x" * 300_000}, "structured_outputs.regex has 300000 characters; expected at most 262144"),
    ({"regex": "(" * 2000 + "a" + ")" * 2000}, "cannot be used: "),
    ({"choice": [f"value {i}" for i in range(30_000)]}, "choice has 318890 characters; expected at most 262144"),
    ({"json": {"type": "strin"}}, "Invalid type: strin"),
    ({"json": "false"}, "Unsatisfiable"),
    ({"json": {"$ref": "#/$defs/missing"}}, "cannot be used: "),
    ({"json": {"$ref": "http://127.0.0.1:9/x"}}, "cannot be used: "),
    ({"json": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable"),
    ({"json": {"not": {"type": "integer"}}}, "Unimplemented keys"),
    ({"json": nested(200)}, "recursion limit"),
    ({"json": doubling(30)}, "schema too large"),
    ({"json": {"enum": [f"value {i}" for i in range(30_000)]}}, "cannot be used: |characters"),
    ({"json": {"type": "integer", "multipleOf": 1_000_003}}, "common multiple 1000003"),
    ({"json": {"allOf": [{"multipleOf": 1009}, {"multipleOf": 10.13}]}}, "common multiple 1022117"),
    ({"grammar": "start: foo"}, 'unknown name: "foo"'),
    ({"grammar": "root ::= x"}, "is not GBNF: Rule 'x' not found"),
    ({"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000}, "nested too deeply"),
    ({"grammar": "root ::= [a]\n" * 5000}, "in GBNF has 65000 characters; expected at most 32768"),
    ({"grammar": 'start: %json {"multiple\\u004ff": 1000003}'}, "common multiple 1000003"),
    ({"grammar": "start: %json"}, "cannot be used: "),
    ({"grammar": "start: %json [1"}, "%json without JSON"),
    ({"grammar": "\n" * 200_000}, "cannot be used: "),
    ({"grammar": json.dumps({"grammars": [{"json_schema": {}}]})}, "cannot be used: "),
    ({"json_object": True, "whitespace_pattern": "("}, "cannot be used: "),
]


@pytest.mark.parametrize(("form", "said"), BAD, ids=lambda value: str(value)[:50])
def test_what_cannot_be_compiled_is_refused(form: dict[str, Any], said: str, shared: GrammarCompiler) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        shared.compile(StructuredOutputsParams(**form))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 450


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that are compiled from now on."""
    texts: list[str] = []

    class Counted(Grammar):
        def __init__(self, text: str, tokenizer: Any) -> None:
            texts.append(text)
            super().__init__(text, tokenizer)

    monkeypatch.setattr(module, "Grammar", Counted)
    return texts


FORMS = [StructuredOutputsParams(regex=f"a{{{i}}}") for i in range(1, 5)]


def test_a_form_is_compiled_once_while_it_is_in_use(compiled: list[str]) -> None:
    one = compiler(capacity=2)
    first = one.compile(FORMS[0])
    assert one.compile(StructuredOutputsParams(regex="a{1}")) is first
    one.compile(FORMS[1])
    assert one.compile(FORMS[0]) is first
    one.compile(FORMS[2])  # the second is the one not used for longest
    assert one.compile(FORMS[0]) is first
    assert len(compiled) == 3
    one.compile(FORMS[1])
    assert len(compiled) == 4


def test_a_bad_form_is_compiled_once_too(compiled: list[str]) -> None:
    one, errors = compiler(), []
    for _ in range(2):
        with pytest.raises(RequestError, match="unclosed group") as caught:
            one.compile(StructuredOutputsParams(regex="(a"))
        errors.append(caught.value)
    assert len(compiled) == 1
    assert errors[0] is not errors[1]


def together(work: Callable[[], None], threads: int = 8) -> None:
    running = [threading.Thread(target=work) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


def test_threads_that_ask_together_share_one_compilation(compiled: list[str]) -> None:
    one, found = compiler(), []
    together(lambda: found.append(one.compile(FORMS[0])))
    assert len(found) == 8
    assert len(set(map(id, found))) == 1
    assert len(compiled) == 1


def test_matchers_of_one_grammar_do_not_disturb_each_other(shared: GrammarCompiler) -> None:
    grammar = shared.compile(StructuredOutputsParams(json_object=True))
    text = TOKENIZER.encode('{"ab": [1, 2, {"c": "stop"}], "é": null}')
    alone = GrammarState(grammar, [EOS], min_tokens=0)
    expected = [alone.allowed(text[:n]).bits for n in range(len(text) + 1)]
    wrong: list[int] = []

    def follow() -> None:
        state = GrammarState(grammar, [EOS], min_tokens=0)
        for n, bits in enumerate(expected):
            if not np.array_equal(state.allowed(text[:n]).bits, bits):
                wrong.append(n)

    together(follow, threads=4)
    assert wrong == []


def test_a_compilation_that_breaks_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    one = GrammarCompiler(lambda: (_ for _ in ()).throw(OSError("gone")), TOKENIZER.vocab_size, [EOS])
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            one.compile(FORMS[0])


def test_a_tokenizer_that_the_library_does_not_know_is_said() -> None:
    one = GrammarCompiler(lambda: "{}", TOKENIZER.vocab_size, [EOS])
    with pytest.raises(RequestError, match="do not go with the model's tokenizer"):
        one.compile(FORMS[0])


@pytest.mark.parametrize("eos", [[], [EOS], [EOS, 65]])
def test_vocabularies_wider_than_the_tokenizers(eos: list[int]) -> None:
    wide = GrammarCompiler(TOKENIZER.to_json, TOKENIZER.vocab_size + 70, eos)
    state = GrammarState(wide.compile(FORMS[0]), eos, min_tokens=0)
    allowed = [token for token in range(TOKENIZER.vocab_size + 70) if state.allowed([]).has(token)]
    assert allowed == [97]
    assert [token for token in range(TOKENIZER.vocab_size + 70) if state.allowed([97]).has(token)] == sorted(eos)
