"""A conversation with a model: what has been said, and the next answer as it grows."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING

from dynaspec.contract.errors import RequestError
from dynaspec.contract.outputs import CompletionOutput, RequestOutput
from dynaspec.contract.sampling_params import SamplingParams

if TYPE_CHECKING:
    from dynaspec.api import LLM

Listener = Callable[[RequestOutput], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, whole or as far as it came, and what it took."""

    completion: CompletionOutput
    seconds: float
    first_s: float
    """Until its first tokens were there."""
    stopped: bool = False
    """By the user."""
    filled: bool = False
    """It ended because the model's context was full."""


class Conversation:
    """Messages, and a model that answers the last of them.

    Args:
        params: for every answer; ``max_tokens`` None = as many as there is room for.
        system: what the model is told before everything else.
    """

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        self._llm = llm
        self._params = replace(params, speculation_metrics="detailed")
        self._messages: list[Mapping[str, str]] = []
        self.system = system

    @property
    def turns(self) -> int:
        """Questions that have been answered."""
        return len(self._messages) // 2

    def reset(self) -> None:
        """Forgets what was said; the system message stays."""
        self._messages.clear()

    def check(self) -> None:
        """
        Raises:
            RequestError: the model has no chat template, or one that refuses the system message.
        """
        self._render("hello")

    def ask(self, question: str, on_output: Listener) -> Answer:
        """The model's answer, which becomes part of the conversation even if it was stopped.

        Ctrl-C stops it between two steps, so that the engine stays whole; a second one raises.

        Args:
            on_output: called with the answer so far whenever it has grown.

        Raises:
            RequestError: there is no room for an answer, or the chat template refuses; the question is forgotten.
        """
        tokens = self._llm.tokenizer.encode(self._render(question), special_tokens=False)
        room = self._llm.max_model_len - len(tokens)
        if room < 1:
            raise RequestError(
                f"the conversation has {len(tokens)} tokens and the model's context {self._llm.max_model_len}; "
                "expected a shorter one, such as after /reset"
            )
        wanted = self._params.max_tokens
        params = replace(self._params, max_tokens=room if wanted is None else min(wanted, room))
        answer = self._decode(tokens, params, on_output)
        self._messages += [_message("user", question), _message("assistant", answer.completion.text)]
        length = answer.completion.finish_reason == "length"
        return replace(answer, filled=length and (wanted is None or room <= wanted))

    def _render(self, question: str) -> str:
        system = [] if self.system is None else [_message("system", self.system)]
        return self._llm.tokenizer.render_chat([*system, *self._messages, _message("user", question)])

    def _decode(self, tokens: list[int], params: SamplingParams, on_output: Listener) -> Answer:
        started = time.perf_counter()
        first_s: float | None = None
        with _interrupts() as asked_to_stop:

            def listen(_: int, output: RequestOutput) -> None:
                nonlocal first_s
                if first_s is None:
                    first_s = time.perf_counter() - started
                on_output(output)
                if asked_to_stop() and not output.finished:
                    raise _Stopped(output)

            stopped = False
            try:
                [output] = self._llm.generate({"prompt_token_ids": tokens}, params, on_output=listen)
            except _Stopped as stop:
                output, stopped = stop.output, True
        return Answer(output.outputs[0], time.perf_counter() - started, first_s or 0.0, stopped)


class _Stopped(Exception):
    """Ctrl-C came; what there is of the answer."""

    def __init__(self, output: RequestOutput) -> None:
        super().__init__()
        self.output = output


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C has been pressed meanwhile, which the yielded function says; the second time it raises."""
    asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    if threading.current_thread() is not threading.main_thread():  # which alone gets signals
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


def _message(role: str, content: str) -> Mapping[str, str]:
    return {"role": role, "content": content}
