"""What is kept of each continuation while its deltas go out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dynaspec.contract.outputs import CompletionOutput, RequestOutput
from dynaspec.engine.tokenizer import Tokenizer

from .protocol.speculation import WrittenToken
from .token_sources import TokenSources
from .token_texts import TokenTexts


class Choice:
    """One continuation of a stream.

    Args:
        prompt: tokens in front of it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool) -> None:
        self.texts = TokenTexts(tokenizer, prompt, skip_special_tokens=skip_special_tokens)
        self.echoed = ""
        """The prompt, where the text begins with it."""
        self.begun = False
        """A chunk of it has gone out."""
        self.finished = False
        self._sources = TokenSources()

    def written(self, delta: CompletionOutput, texts: Sequence[str]) -> list[WrittenToken]:
        """Who wrote the tokens of a delta, whose metrics must be ``detailed``."""
        sources = self._sources.add(len(delta.token_ids), delta.metrics)
        return [WrittenToken(text=text, source=source) for text, source in zip(texts, sources, strict=True)]


class Choices:
    """All continuations of a request, by their number."""

    def __init__(self, tokenizer: Tokenizer, *, n: int, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._n = n
        self._skip_special_tokens = skip_special_tokens
        self._known: dict[int, Choice] = {}

    def changed(self, prompt: int, output: RequestOutput) -> Iterator[tuple[int, Choice, CompletionOutput]]:
        """(number, choice, delta) of those that have grown or ended since the output before."""
        for delta in output.outputs:
            index = prompt * self._n + delta.index
            choice = self._known.get(index)
            if choice is None:
                choice = Choice(self._tokenizer, output.prompt_token_ids, skip_special_tokens=self._skip_special_tokens)
                self._known[index] = choice
            if delta.token_ids or (delta.finish_reason is not None and not choice.finished):
                yield index, choice, delta
                choice.begun = True
                choice.finished = delta.finish_reason is not None
