"""What the commands print: results on stdout, so that they can be piped and compared, and all else on stderr."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.text import Text

from dynaspec.contract.outputs import RequestOutput
from dynaspec.engine.config import EngineConfig
from dynaspec.result_output import Tell, stages
from dynaspec.server.config import ServerConfig
from dynaspec.server.logs import FIELDS
from dynaspec.version import __version__

if TYPE_CHECKING:
    from dynaspec.engine.tokenizer import Tokenizer
    from dynaspec.server.state import ServerState


def stderr_console() -> Console:
    """A console on the current stderr."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


def print_error(message: str) -> None:
    """``error: …`` on one line, red on a terminal."""
    stderr_console().print(Text("error: " + " ".join(message.split()), style="red"))


def note(message: str) -> None:
    """A remark that is no error."""
    stderr_console().print(Text(message, style="dim"))


@contextmanager
def status(first: str, *, hidden: bool = False) -> Iterator[Callable[[str], None]]:
    """A spinner with a text that the yielded function changes; nothing if hidden or stderr is no terminal.

    While functions are being compiled, it says so: on a machine's first start that takes a minute or two.
    """
    console = stderr_console()
    if hidden or not console.is_terminal:
        yield lambda message: None
        return
    with console.status(Text(first)) as spinner, _compiling_shown(lambda remark: spinner.update(Text(remark))):
        yield lambda message: spinner.update(Text(message))


@contextmanager
def _compiling_shown(tell: Callable[[str], None]) -> Iterator[None]:
    """Tells what ``compiled`` logs, in fewer words; without lines of the log where these are not wanted."""
    compiling = logging.getLogger("dynaspec.compiled")
    level, propagate, handler = compiling.level, compiling.propagate, _Compiling(tell)
    compiling.addHandler(handler)
    if not compiling.isEnabledFor(logging.INFO):
        compiling.setLevel(logging.INFO)
        compiling.propagate = False
    try:
        yield
    finally:
        compiling.removeHandler(handler)
        compiling.setLevel(level)
        compiling.propagate = propagate


class _Compiling(logging.Handler):
    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        """The message ends with how many functions there have been so far."""
        self._tell(f"compiling, once on this machine; {record.getMessage().rpartition('; ')[2]}")


logger = logging.getLogger(__name__)


def announce(engine: EngineConfig, state: ServerState, url: str) -> None:
    """What is served, where, and how to stop it: on stderr, or as a line of a JSON log."""
    if state.config.log_format == "json":
        fields = {"model": engine.model, "served_as": state.served_names, "url": url, "drafts": drafting(engine)}
        logger.info("listening", extra={FIELDS: fields})
        return
    console = stderr_console()
    console.print(Text.assemble("dynaspec ", __version__, " serves ", (engine.model, "bold"), *_alias(state)))
    for name, value in [("drafts", drafting(engine)), *addresses(state.config, url), ("stop", stopping(state.config))]:
        console.print(Text.assemble((f"  {name:<9}  ", "dim"), value))


def drafting(engine: EngineConfig, *, short: bool = False) -> str:
    """The drafter, and the policy that decides how much it drafts.

    Args:
        short: a checkpoint's name without the folders that it is in.
    """
    config = engine.speculative_config
    if config is None:
        return "none: plain decoding"
    drafter = config.model or config.method
    if short:
        drafter = Path(drafter).name
    lookup = " and lookup" if config.hybrid_lookup else ""
    return f"{drafter}{lookup}, policy {config.policy}"


def addresses(config: ServerConfig, url: str) -> list[tuple[str, str]]:
    """The pages that there are, with their names."""
    pages = [("API", f"{url}/v1")]
    if not config.disable_docs:
        pages.append(("docs", f"{url}/openapi.json"))
    if config.enable_dashboard:
        pages.append(("dashboard", f"{url}/dashboard"))
    return [*pages, ("metrics", f"{url}/metrics")]


def stopping(config: ServerConfig) -> str:
    """How to end it."""
    return f"Ctrl-C: running requests get {config.drain_timeout_s:g} s to finish; again: at once"


def _alias(state: ServerState) -> tuple[str, ...]:
    return (" as ", ", ".join(state.served_names)) if state.config.served_model_name else ()


_FILE_WIDTH = 120
"""Columns of the tables where there is no terminal to fit them into."""


def result_console(width: int = _FILE_WIDTH) -> Console:
    """A console on stdout, wide enough for the tables where it is no terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=width)


@contextmanager
def progress(*, hidden: bool) -> Iterator[Tell]:
    """Progress on stderr, or none."""
    if hidden:
        yield lambda stage, done, total: None
        return
    with stages() as tell:
        yield tell


class StreamedText:
    """One continuation of one prompt, written as it appears, and a newline."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._shown = 0

    def update(self, index: int, output: RequestOutput) -> None:
        text = output.outputs[0].text
        self._file.write(text[self._shown :] + "\n" * output.finished)
        self._file.flush()
        self._shown = len(text)


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
