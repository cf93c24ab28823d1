"""What is kept of each continuation while its deltas go out: the text of each token, and its source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from dynaspec.contract.outputs import CompletionOutput, RequestMetrics, RequestOutput
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.engine.tokenizer import Detokenizer, Tokenizer

from .protocol.reports import TokenSource, WrittenToken


class TokenSources:
    """Follows one continuation through its deltas, whose metrics must be ``detailed``.

    A step with ``a`` accepted tokens has them from the drafter and one more from the target, unless the last accepted
    one has ended the request. A prompt's completion gives a token of the target's that belongs to no step; so does
    reading it again after a preemption. Where a delta holds such a token and steps besides, it is taken to come first.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._started = False

    def add(self, count: int, metrics: RequestMetrics) -> list[TokenSource]:
        """Sources of the next ``count`` tokens; ``metrics`` cover the continuation up to and with them."""
        new, self._steps = metrics.per_step[self._steps :], len(metrics.per_step)
        sources: list[TokenSource] = ["target"] if count and not self._started else []
        self._started |= count > 0
        for _, accepted in new:
            sources += ["draft"] * accepted
            sources.append("target")
        unknown: list[TokenSource] = ["target"] * (count - len(sources))
        return unknown + sources[:count]


class TokenTexts:
    """What each token adds to a text that grows; put together, it is that text.

    A token that ends within a character adds nothing; the one that completes it adds all of it.

    Args:
        before: tokens that stand in front, which may change how the first one is spaced.
        skip_special_tokens: special tokens add nothing.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._grown = Detokenizer(tokenizer, SamplingParams(skip_special_tokens=skip_special_tokens), before)

    @property
    def length(self) -> int:
        """Characters so far."""
        return len(self._grown.text)

    def add(self, tokens: Iterable[int]) -> list[str]:
        """Texts of the next tokens."""
        texts = []
        for token in tokens:
            start = self.length
            self._grown.push(token)
            texts.append(self._grown.text[start:])
        return texts


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
        """The sources of the tokens of a delta, whose metrics must be ``detailed``."""
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
