"""Text on a terminal as it is decoded, coloured by who found the tokens."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from dynaspec.contract.outputs import RequestOutput
from dynaspec.engine.tokenizer import Tokenizer

DRAFTED = "green"
"""Style of text that was drafted and accepted; the target's own tokens are plain."""
_PROMPT_LINES = 4


class StreamView:
    """Shows one prompt's continuation while it grows.

    Args:
        prompt: what is shown before it; of a long one, the end.
    """

    def __init__(self, console: Console, tokenizer: Tokenizer, prompt: str = "") -> None:
        self._console = console
        self._tokenizer = tokenizer
        self._tokens = 0
        self._accepted = 0
        self._shown = 0
        self._print(_tail(prompt), "dim")

    def update(self, output: RequestOutput) -> None:
        """Adds what a step has brought: accepted drafts first, then the target's own token."""
        completion = output.outputs[0]
        accepted = completion.metrics.accepted - self._accepted
        drafted_until = len(self._tokenizer.decode(completion.token_ids[: self._tokens + accepted]))
        boundary = max(self._shown, min(drafted_until, len(completion.text))) if accepted else self._shown
        self._print(completion.text[self._shown : boundary], DRAFTED)
        self._print(completion.text[boundary:], "")
        self._tokens, self._accepted = len(completion.token_ids), completion.metrics.accepted
        self._shown = len(completion.text)
        if output.finished:
            self._console.print()

    def _print(self, text: str, style: str) -> None:
        if text:
            self._console.print(Text(text, style=style, end=""), end="", soft_wrap=True)


def _tail(prompt: str) -> str:
    """The prompt's last lines, a long one shortened."""
    lines = prompt.splitlines(keepends=True)
    return "…\n" * (len(lines) > _PROMPT_LINES) + "".join(lines[-_PROMPT_LINES:])
