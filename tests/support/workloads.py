"""Prompts and sampling modes that the exactness tests combine."""

from __future__ import annotations

from collections.abc import Callable

from dynaspec import SamplingParams, StructuredOutputsParams

PROMPTS = (
    "the quick brown fox jumps over the lazy dog and then the fox is over the dog",
    "the quick brown fox jumps over the lazy dog and the dog chases the brown fox",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n",
    "1 2 3 4",
    "one two three four five six seven eight nine ten, one two three four five six",
    "x",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return",
    "¿quién? — naïve 日本 🙂",
)


def _greedy(i: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=44 - i)


def _greedy_penalised(i: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=40, repetition_penalty=1.1 + i / 20, ignore_eos=True)


def _truncated(i: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.8, top_p=0.9, top_k=40 - i, min_p=0.01, seed=100 + i, max_tokens=40, ignore_eos=i % 2 == 0
    )


def _edited(i: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.9,
        seed=200 + i,
        max_tokens=48,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias={45: 2.0, 9: -100.0, 70 + i: 1.5},
        bad_words=["the", "q"],
        min_tokens=34,
        stop=["e", "an", "o", "t", "r", "1"] if i % 2 else None,
        stop_token_ids=range(100, 130),
        include_stop_str_in_output=i % 4 == 1,
    )


def _several(i: int) -> SamplingParams:
    return SamplingParams(n=2, temperature=0.7, seed=300 + i, max_tokens=36)


def _logprobs(i: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.7 if i % 3 else 0.0,
        seed=400 + i,
        max_tokens=40,
        logprobs=i % 4,
        prompt_logprobs=2 if i % 2 else None,
    )


def _capped(i: int) -> SamplingParams:
    """Every wish about drafts that a request can have."""
    return SamplingParams(
        temperature=0.8 * (i % 2),
        seed=500 + i,
        max_tokens=44,
        ignore_eos=True,
        truncate_prompt_tokens=None if i % 3 == 0 else 7 + 3 * i,
        max_draft_tokens=(3, 0, None, 1)[i % 4],
        expected_acceptance=(None, 0.9, 0.1)[i % 3],
        speculation_metrics=("detailed", "off", "summary")[i % 3],
    )


def _repetitive(i: int) -> SamplingParams:
    """Text of a few tokens, which soon repeats itself: what lookup needs."""
    return SamplingParams(
        temperature=2.0, seed=600 + i, max_tokens=40, ignore_eos=True, allowed_token_ids=(41, 45, 60, 97, 104 + i)
    )


FORMS = (
    StructuredOutputsParams(
        json={
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 9}, "dog": {"type": "integer"}},
                "required": ["name", "dog"],
                "additionalProperties": False,
            },
            "minItems": 2,
        },
        disable_any_whitespace=True,
    ),
    StructuredOutputsParams(regex=r"([a-z]{2,7} (\d{1,3}|the|fox), ){3,9}end"),
    StructuredOutputsParams(
        grammar='start: sum\nsum: term (("+" | " - ") term)+\nterm: NAME | "(" sum ")"\nNAME: /[a-z]{1,5}/'
    ),
    StructuredOutputsParams(json={"type": "object", "minProperties": 2}),
    StructuredOutputsParams(choice=["the quick brown fox jumps over the dog", "the quick red dog", "no dog jumps"]),
)
"""Forms that random models fill with long, short, and unfinished texts."""


def _formed(i: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0 if i % 3 == 2 else 0.9,
        seed=700 + i,
        max_tokens=44,
        structured_outputs=FORMS[i % len(FORMS)],
        min_tokens=6 * (i % 2),
        ignore_eos=i % 4 == 0,
        n=2 if i == 4 else 1,
        repetition_penalty=1.1 if i == 1 else 1.0,
    )


def _mixed(i: int) -> SamplingParams:
    kinds = (_truncated, _greedy, _edited, _several, _logprobs, _greedy_penalised)
    if i == len(PROMPTS) - 1:
        return SamplingParams(temperature=0.0, max_tokens=40, max_draft_tokens=0)
    return kinds[i % len(kinds)](i)


MODES: dict[str, Callable[[int], SamplingParams]] = {
    "greedy": _greedy,
    "greedy_penalised": _greedy_penalised,
    "truncated": _truncated,
    "edited": _edited,
    "several": _several,
    "logprobs": _logprobs,
    "capped": _capped,
    "repetitive": _repetitive,
    "formed": _formed,
    "mixed": _mixed,
}
"""Name → parameters of the i-th prompt. All are greedy or seeded, so that outputs are a function of the prompt."""
