"""``dynaspec chat``: a conversation with a model, and what drafting did for the answers."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from dynaspec.cli import options as o
from dynaspec.cli.console import StreamedText, StreamView, drafting, note, print_error, status
from dynaspec.cli.demo import demo_target, with_demo_model
from dynaspec.contract.errors import ConfigError, RequestError
from dynaspec.contract.outputs import CompletionOutput, RequestOutput
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.control.config import SpeculativeConfig
from dynaspec.engine.config import EngineConfig

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


_BAR = 40
"""Characters of the longest bar."""


def describe(answers: Sequence[Answer]) -> str:
    """Lines about the last answer, its runs of accepted tokens, and all answers together."""
    if not answers:
        return "No answer yet."
    last = answers[-1]
    lines = [f"last answer: {_speed([last])}, the first after {last.first_s:.2f} s", f"             {_drafts([last])}"]
    lines += _runs(last)
    if len(answers) > 1:
        lines += [f"{len(answers)} answers:   {_speed(answers)}", f"             {_drafts(answers)}"]
    return "\n".join(lines)


def _speed(answers: Sequence[Answer]) -> str:
    tokens = sum(len(answer.completion.token_ids) for answer in answers)
    seconds = sum(answer.seconds for answer in answers)
    return f"{tokens} tokens in {seconds:.2f} s, {tokens / seconds:.0f} tokens/s"


def _drafts(answers: Sequence[Answer]) -> str:
    metrics = [answer.completion.metrics for answer in answers]
    steps, drafts = sum(m.steps for m in metrics), sum(m.drafts for m in metrics)
    if not drafts:
        return f"{steps} steps, none with a draft"
    emitted = sum(m.draft_emitted for m in metrics)
    drafted, accepted = sum(m.drafted for m in metrics), sum(m.accepted for m in metrics)
    return (
        f"{drafts} of {steps} steps with a draft, acceptance length {emitted / drafts:.2f}; "
        f"{accepted} of {drafted} drafted tokens accepted"
    )


def _runs(answer: Answer) -> list[str]:
    """A bar for every number of tokens that a step's draft had accepted: how many steps had it."""
    counts = Counter(accepted for drafted, accepted in answer.completion.metrics.per_step if drafted)
    if not counts:
        return []
    most = max(counts.values())
    lines = ["  accepted in a row   steps"]
    for accepted in range(max(counts) + 1):
        steps = counts[accepted]
        lines.append(f"  {accepted:17d}   {steps:5d}  {'█' * -(-steps * _BAR // most)}".rstrip())
    return lines


_LOOKUP = {"method": "ngram"}
"""Drafts for a model that was given without a drafter: lookup needs no training, and ``auto`` leaves it off
where it does not pay."""
_COMMANDS = {
    "/stats": "tokens/s, acceptance length and runs of accepted tokens of the last answer, and of all",
    "/reset": "forget the conversation",
    "/system TEXT": "tell the model TEXT before everything else, and begin anew; without TEXT: show it",
    "/help": "these lines",
    "/exit": "leave; so does Ctrl-D",
}
_NO_SYSTEM = "No system message; the model's template may have one of its own."
_HINT = "A line that ends in \\ goes on with the next. Ctrl-C stops an answer."


_ENGINE = frozenset(
    {
        *("tokenizer", "revision", "trust_remote_code", "dtype", "quantization", "device", "max_model_len"),
        *("kv_cache_memory", "kv_cache_dtype", "enable_prefix_caching", "async_scheduling", "decision_log"),
    }
)


@o.with_fields(EngineConfig, "Engine", only=_ENGINE)
@o.with_options(o.SPECULATION)
@o.with_options(o.among(o.SAMPLING, ("top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop")))
def chat(
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Checkpoint folder, GGUF file or hub id; default: the demonstration's model with its EAGLE-3 head.",
        ),
    ] = None,
    *,
    prompt: Annotated[str | None, typer.Option(help="Answer this alone, and leave.")] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before everything else.")] = None,
    show_runs: Annotated[
        bool, typer.Option("--show-runs", help="Colour what was drafted and accepted; each step ends uncoloured.")
    ] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Decode without drafts.")] = False,
    temperature: Annotated[
        float, typer.Option(help="0 = greedy: the same answer every time.", rich_help_panel="Sampling")
    ] = 0.0,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", rich_help_panel="Sampling")] = 512,
    **options: Any,
) -> None:
    """Talk to a model in the terminal. Piped in, every line is a question, and stdout carries the answers alone."""
    given = o.given(**options)
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, **o.among(given, o.SAMPLING))
    model, speculation = _models(checkpoint, plain, o.among(given, o.SPECULATION))
    engine = o.among(given, _ENGINE)
    with status(f"loading {Path(model).name}"):
        from dynaspec.api import LLM  # brings torch, which takes seconds to import

        llm = LLM(model, speculative_config=speculation, max_num_seqs=1, **engine)
    with closing(llm):
        conversation = Conversation(llm, params, system)
        conversation.check()
        screen = _Screen(llm, show_runs)
        if prompt is not None:
            screen.answer(conversation, prompt)
            return
        _talk(conversation, screen)


def _models(checkpoint: str | None, plain: bool, speculation: dict[str, Any]) -> tuple[str, SpeculativeConfig | None]:
    """The model, and what drafts for it.

    Raises:
        ConfigError: the demonstration's model is missing, or options that contradict each other.
    """
    if plain:
        if speculation:
            flags = ", ".join("--" + name.replace("_", "-") for name in speculation)
            raise ConfigError(f"--plain was given together with {flags}; expected one or the other")
        return checkpoint or demo_target(), None
    options = with_demo_model(speculation) if checkpoint is None else {"model": checkpoint, **speculation}
    model = options.pop("model")
    return model, o.speculation(**options) or SpeculativeConfig.parse(_LOOKUP)


class _Screen:
    """Shows answers as they come, and keeps what they took."""

    def __init__(self, llm: LLM, show_runs: bool) -> None:
        self._llm = llm
        self._show_runs = show_runs
        self.answers: list[Answer] = []

    def introduce(self) -> None:
        config = self._llm.config
        if isinstance(config, EngineConfig):
            note(f"{Path(config.model).name}; drafts: {drafting(config, short=True)}. /help lists commands.")

    def answer(self, conversation: Conversation, question: str) -> None:
        """
        Raises:
            RequestError: there is no room for an answer.
        """
        answer = conversation.ask(question, self._listener())
        self.answers.append(answer)
        if answer.stopped:
            print()
            note("(stopped)")
        elif answer.filled:
            note(f"(the model's context of {self._llm.max_model_len} tokens is full; /reset makes room)")
        elif answer.completion.finish_reason == "length":
            note(f"(cut off after {len(answer.completion.token_ids)} tokens; --max-tokens allows more)")

    def _listener(self) -> Listener:
        if not self._show_runs:
            text = StreamedText(sys.stdout)
            return lambda output: text.update(0, output)
        return StreamView(Console(highlight=False), self._llm.tokenizer).update


def _talk(conversation: Conversation, screen: _Screen) -> None:
    """Questions and commands, until /exit or the end of stdin."""
    interactive = sys.stdin.isatty()
    if interactive:
        screen.introduce()
    for line in _lines(interactive):
        if line.startswith("/"):
            if not _command(line, conversation, screen):
                return
        elif line:
            try:
                screen.answer(conversation, line)
            except RequestError as error:
                print_error(str(error))


def _command(line: str, conversation: Conversation, screen: _Screen) -> bool:
    """Does what a command asks for; False: leave."""
    name, _, argument = line.partition(" ")
    match name:
        case "/exit" | "/quit":
            return False
        case "/stats":
            print(describe(screen.answers))
        case "/reset":
            conversation.reset()
            note("The conversation begins anew.")
        case "/system":
            _system(argument.strip(), conversation)
        case "/help":
            width = max(map(len, _COMMANDS))
            print("\n".join([*(f"{name:<{width}}  {text}" for name, text in _COMMANDS.items()), _HINT]))
        case _:
            print_error(f"{name} is no command; expected one of {', '.join(_COMMANDS)}")
    return True


def _system(text: str, conversation: Conversation) -> None:
    if not text:
        print(conversation.system or _NO_SYSTEM)
        return
    before, conversation.system = conversation.system, text
    try:
        conversation.check()
    except RequestError as error:
        conversation.system = before
        print_error(str(error))
        return
    conversation.reset()
    note("The conversation begins anew.")


def _lines(interactive: bool) -> Iterator[str]:
    """What is typed or piped in, with lines joined that end in a backslash."""
    read = _typed if interactive else _piped
    while (line := read("> ")) is not None:
        while line.endswith("\\") and (more := read("… ")) is not None:
            line = line[:-1] + "\n" + more
        yield line.strip()


def _piped(_: str) -> str | None:
    line = sys.stdin.readline()
    return line.rstrip("\r\n") if line else None


def _typed(prompt: str) -> str | None:
    with suppress(ImportError):
        import readline  # noqa: F401  # gives input() a history and editing
    try:
        return input(prompt)
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:  # forgets the line
        print()
        return ""
