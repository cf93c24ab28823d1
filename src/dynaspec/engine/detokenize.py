"""Text of one request, grown token by token, and the stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence

from dynaspec.contract.sampling_params import SamplingParams

from .tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 6
"""Prompt tokens decoded along, since the first token's text may depend on what stands before it."""


class Detokenizer:
    """Decodes a sliding window, so that the cost of a token does not grow with the text."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt: Sequence[int]) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._params = params
        self._window: list[int] = list(prompt[-_CONTEXT:])
        self._shown = self._decode(self._window).rstrip(_REPLACEMENT)
        """Text of the window that has been emitted, or belongs to the prompt; half a character does not."""
        self._longest_stop = max(map(len, params.stop_strings), default=0)

    def push(self, token: int, *, may_stop: bool = True) -> str | None:
        """Adds a token; cuts the text at a stop string that it completes, if it may, and returns the string."""
        self._window.append(token)
        decoded = self._decode(self._window)
        if decoded.endswith(_REPLACEMENT):  # in the middle of a character
            return None
        added = decoded[len(self._shown) :]
        self._slide(decoded)
        self.text += added
        return self._cut(len(added)) if may_stop and self._longest_stop else None

    def finish(self) -> None:
        """Emits what was held back because a character was incomplete."""
        decoded = self._decode(self._window)
        self.text += decoded[len(self._shown) :]
        self._shown = decoded

    def stable_length(self) -> int:
        """Characters that no later stop string can take back."""
        hold = self._longest_stop - 1 if self._longest_stop and not self._params.include_stop_str_in_output else 0
        return max(0, len(self.text) - hold)

    def _slide(self, decoded: str) -> None:
        self._shown = decoded
        if len(self._window) > 4 * _CONTEXT:
            shorter = self._window[-_CONTEXT:]
            text = self._decode(shorter)
            if decoded.endswith(text) and _REPLACEMENT not in text:
                self._window, self._shown = shorter, text

    def _cut(self, added: int) -> str | None:
        before = len(self.text) - added
        hits = [(self.text.find(stop, max(0, before - len(stop) + 1)), stop) for stop in self._params.stop_strings]
        at, stop = min(((at, stop) for at, stop in hits if at >= 0), default=(-1, ""))
        if at < 0:
            return None
        end = at + len(stop) if self._params.include_stop_str_in_output else at
        self.text = self.text[:end]
        self._window, self._shown = [], ""
        return stop

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._params.skip_special_tokens)
