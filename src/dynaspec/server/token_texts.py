"""The text of single tokens, in their context."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.engine.detokenize import Detokenizer
from dynaspec.engine.tokenizer import Tokenizer


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
