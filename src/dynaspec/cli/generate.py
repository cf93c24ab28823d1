"""``dynaspec generate``: one answer for every prompt that is given, piped or in a file.

What it writes is results only, the same bytes however they were decoded.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Protocol, TextIO

import typer

from dynaspec.cli import options as o
from dynaspec.cli.console import StreamedText, status, stderr_console
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.outputs import RequestOutput
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.engine.config import EngineConfig
from dynaspec.observe.format import format_table

STDIN = "-"


def collect_prompts(arguments: Sequence[str], file: Path | None) -> list[str]:
    """Prompts of the arguments (``-`` is what stdin holds), then of the file; stdin alone if it is piped.

    Raises:
        ConfigError: no prompt at all, or a file that cannot be read.
    """
    if not arguments and file is None:
        if sys.stdin.isatty():
            raise ConfigError("no prompt was given; expected prompts as arguments, --prompt-file, or text on stdin")
        arguments = [STDIN]
    if list(arguments).count(STDIN) > 1:
        raise ConfigError("'-' is given more than once; expected it once, as stdin can be read once")
    prompts = [_stdin() if argument == STDIN else argument for argument in arguments]
    return prompts + (_file(file) if file is not None else [])


def _stdin() -> str:
    """All of stdin as one prompt, without the newline that ends a piped line."""
    text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise ConfigError("stdin is empty; expected a prompt")
    return text


def _file(path: Path) -> list[str]:
    from dynaspec.bench.datasets import load_prompts

    return [prompt.text for prompt in load_prompts(path)]


_ENGINE = EngineConfig.model_fields.keys() - {
    *("model", "seed", "stream_interval_s", "override_generation_config", "speculative_config")
}


@o.with_fields(EngineConfig, "Engine", only=_ENGINE)
@o.with_options(o.SPECULATION)
@o.with_options(o.SAMPLING)
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; - reads one from stdin.")] = None,
    *,
    model: o.Model,
    prompt_file: Annotated[
        Path | None, typer.Option(help="One prompt a line; .jsonl: objects with prompt, turns or question.")
    ] = None,
    output: Annotated[str, typer.Option(help="text: the continuations; jsonl: one object a prompt.")] = "text",
    output_file: Annotated[Path | None, typer.Option(help="Write results here instead of stdout.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Say on stderr what speculation did.")] = False,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", hidden=True)
    ] = None,  # to be told what to write instead
    **options: Any,
) -> None:
    """Continue prompts. Stdout carries the continuations, without the prompts, and nothing else."""
    if prompt is not None:
        raise ConfigError(f"--prompt {shlex.quote(prompt[0])} is given; expected the prompt alone, as an argument")
    texts = collect_prompts(prompts or (), prompt_file)
    given = o.given(**options)
    sampling, engine = o.among(given, o.SAMPLING), o.among(given, _ENGINE)
    params = SamplingParams(**sampling)  # before the model is loaded, so that what is wrong is said at once
    engine.setdefault("max_num_seqs", _needed_seqs(len(texts) * params.n))
    speculation = o.speculation(**o.among(given, o.SPECULATION))
    with _destination(output_file) as file, ExitStack() as stack:
        writer = _make_writer(output, file, len(texts), params.n)
        with status(f"loading {model}"):
            from dynaspec.api import LLM  # brings torch, which takes seconds to import

            llm = stack.enter_context(closing(LLM(model, speculative_config=speculation, **engine)))
        params = replace(llm.get_default_sampling_params(), **sampling)
        started = time.perf_counter()
        # Two things moving on one terminal would spoil each other.
        with status("decoding", hidden=file.isatty()) as tell:
            llm.generate(texts, params, on_output=_listener(writer, len(texts), tell))
        if stats:
            stderr_console().print(format_table(llm.stats(), time.perf_counter() - started), markup=False)


def _needed_seqs(continuations: int) -> int:
    """Room for no more requests than there are: what the KV cache reserves grows with it."""
    return min(continuations, int(EngineConfig.model_fields["max_num_seqs"].default))


def _listener(writer: _Writer, prompts: int, tell: Callable[[str], None]) -> Callable[[int, RequestOutput], None]:
    finished = 0

    def listen(index: int, output: RequestOutput) -> None:
        nonlocal finished
        writer.update(index, output)
        if output.finished:
            finished += 1
            tell(f"decoding: {finished} of {prompts} prompts are finished")

    return listen


@contextmanager
def _destination(path: Path | None) -> Iterator[TextIO]:
    """Stdout, or the file named."""
    if path is None:
        yield sys.stdout
        return
    try:
        file = path.open("w", encoding="utf-8", newline="")
    except OSError as error:
        raise ConfigError(f"--output-file cannot be written: {error}") from None
    with file:
        yield file


class _Writer(Protocol):
    """Takes outputs as they grow, in any order of the prompts."""

    def update(self, index: int, output: RequestOutput) -> None:
        """The output of prompt ``index`` so far, cumulative."""
        ...


class _InOrder:
    """Writes each prompt's finished output as soon as those before it are written."""

    def __init__(self, file: TextIO, render: Callable[[int, RequestOutput], str]) -> None:
        self._file = file
        self._render = render
        self._waiting: dict[int, RequestOutput] = {}
        self._next = 0

    def update(self, index: int, output: RequestOutput) -> None:
        if output.finished:
            self._waiting[index] = output
        while self._next in self._waiting:
            self._file.write(self._render(self._next, self._waiting.pop(self._next)))
            self._next += 1
        self._file.flush()


def _make_writer(kind: str, file: TextIO, prompts: int, continuations: int) -> _Writer:
    """The writer for ``--output``.

    Raises:
        ConfigError: an unknown kind.
    """
    if kind == "jsonl":
        return _InOrder(file, _as_json_line)
    if kind == "text":
        return StreamedText(file) if prompts == continuations == 1 else _InOrder(file, _as_text)
    raise ConfigError(f"--output is {kind!r}; expected text or jsonl")


def _as_text(index: int, output: RequestOutput) -> str:
    """Continuations under headings that count prompts and continuations from 1."""
    several = len(output.outputs) > 1
    return "".join(
        f"==> {index + 1}{f'.{completion.index + 1}' if several else ''} <==\n{completion.text}\n"
        for completion in output.outputs
    )


def _as_json_line(index: int, output: RequestOutput) -> str:
    """One object: nothing in it depends on how it was decoded, so that two runs can be compared."""
    record = {
        "index": index,
        "prompt": output.prompt,
        "prompt_tokens": len(output.prompt_token_ids),
        "outputs": [
            {
                "text": completion.text,
                "token_ids": list(completion.token_ids),
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }
            for completion in output.outputs
        ],
    }
    return json.dumps(record, ensure_ascii=False) + "\n"
