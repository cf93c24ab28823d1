"""What drafting needs is loaded as an engine is built, not in its first steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from numba.core.dispatcher import Dispatcher

from dynaspec import LLM, SamplingParams
from support.checkpoints import Pair

PROMPT = "one two three one two three one two"


@contextmanager
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the functions that are compiled, or loaded from disk."""
    names: list[str] = []
    original = Dispatcher.compile

    def compile_(self: Any, sig: Any) -> Any:
        names.append(self.py_func.__name__)
        return original(self, sig)

    with monkeypatch.context() as patch:
        patch.setattr(Dispatcher, "compile", compile_)
        yield names


@pytest.mark.parametrize("method", ["draft_model", "ngram"])
def test_the_first_draft_compiles_nothing(tiny: Pair, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    speculation = {"method": method, "policy": "auto"} | ({"model": tiny.drafter} if method == "draft_model" else {})
    llm = LLM(tiny.target, speculative_config=speculation)
    try:
        # The target's own kernels are known after this.
        llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=4, max_draft_tokens=0))
        with compiled(monkeypatch) as names:
            output = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    finally:
        llm.close()
    assert len(output[0].outputs[0].token_ids) == 24
    assert names == []
