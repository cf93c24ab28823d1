"""Options that several commands share, by name, options made of a configuration's fields, and how values are read.

What an engine option means is said once, by ``EngineConfig``'s fields.
"""

from __future__ import annotations

import inspect
import json
import os
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dynaspec.cli.console import note
from dynaspec.contract.errors import ConfigError
from dynaspec.contract.methods import METHODS
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.control.config import SpeculativeConfig
from dynaspec.engine.config import EngineConfig

if TYPE_CHECKING:
    from dynaspec.bench.datasets import BenchPrompt
    from dynaspec.bench.offline import Session

from typer.core import TyperCommand

_SIZES = frozenset({"kv_cache_memory", "max_request_bytes"})
"""Numbers that may be written as 512M."""

Command = Callable[..., None]
N = TypeVar("N", int, float)


def with_fields(
    config: type[BaseModel], panel: str, *, only: Collection[str] | None = None, leave_out: Collection[str] = ()
) -> Callable[[Command], Command]:
    """Gives a command an option for every field; see ``with_options``.

    Args:
        panel: heading of the help for fields that have no ``group`` of their own.
        only: the fields that are options; None = all.
        leave_out: fields that are no options.
    """
    fields = config.model_fields
    names = [name for name in fields if name not in leave_out and (only is None or name in only)]
    return with_options({name: _of_field(name, fields[name], panel) for name in names})


def with_options(options: Mapping[str, Any]) -> Callable[[Command], Command]:
    """Gives a command further options; it takes them as ``**options``, None if not given.

    Args:
        options: name → annotation.
    """
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in options.items()
    ]

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        kept = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        command.__signature__ = signature.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]  # typer's
        return command

    return decorate


def _of_field(name: str, field: FieldInfo, panel: str) -> Any:
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    kind = str if name in _SIZES else _kind(field.annotation)
    text = _with_default(field.description or "", field.default)
    return _option(kind, text, str(extra.get("group", panel)))


def _option(kind: Any, text: str, panel: str, *names: str) -> Any:
    """An option that is None unless given."""
    return Annotated[kind | None, in_panel(panel, text, *names)]


def in_panel(panel: str, text: str, *names: str, **more: Any) -> Any:
    """An option whose help stands in a panel of its own."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def _kind(annotation: Any) -> Any:
    """What the command line has to read: a flag, a number, a text, or several texts."""
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(one for one in get_args(annotation) if one is not type(None))
    if get_origin(annotation) is tuple:
        return list[str]
    return annotation if annotation in (bool, int, float) else str


def _with_default(text: str, default: object) -> str:
    said = default is None or default is False or default in ((), "") or "default:" in text.lower()
    return text if said else f"{text.removesuffix('.')}; default: {_shown(default)}."


def _shown(default: object) -> str:
    if default is True:
        return "on"
    if isinstance(default, float):
        return f"{default:g}"
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)


Model = Annotated[str, typer.Option(help=EngineConfig.model_fields["model"].description)]

_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}
_SAMPLING: Mapping[str, tuple[Any, str]] = {
    "temperature": (float, "0 = greedy."),
    "top_p": (float, "Keep a token while the mass before it is below this."),
    "top_k": (int, "Keep so many of the most probable tokens; 0 = all."),
    "min_p": (float, "Keep tokens with so much of the largest probability."),
    "repetition_penalty": (float, "Above 1: tokens seen are less likely."),
    "max_tokens": (int, "Most tokens of a continuation."),
    "seed": (int, "Makes sampling repeatable, with and without speculation."),
    "stop": (list[str], "End before this string; may be given several times."),
    "ignore_eos": (bool, "Go on after the end-of-sequence token."),
    "n": (int, "Continuations of each prompt."),
}
SAMPLING: Mapping[str, Any] = {
    name: _option(kind, _with_default(text, _DEFAULTS[name]), "Sampling") for name, (kind, text) in _SAMPLING.items()
}
"""Fields of ``SamplingParams`` that are options."""

DraftModel = _option(
    str, "Checkpoint of the model or head that drafts.", "Speculation", "--draft-model", "--speculative-model"
)
SPECULATION: Mapping[str, Any] = {
    "speculative_config": _option(
        str, "All of it as JSON, with vLLM's keys; excludes the options that follow.", "Speculation"
    ),
    "method": _option(str, f"{', '.join(METHODS)}; default: what the other options imply.", "Speculation"),
    "draft_model": DraftModel,
    "policy": _option(
        str,
        "auto, constant, heuristic, heuristic_transient, confidence or elastic; default: auto. schedule and goodput "
        "need a table: see --speculative-config.",
        "Speculation",
    ),
    "num_speculative_tokens": _option(int, "Draft length; with a confidence threshold the longest one.", "Speculation"),
    "draft_confidence_threshold": _option(
        str, "Stop drafting after a token with less confidence (0 to 1), or auto.", "Speculation"
    ),
}
"""What ``speculation`` takes."""


def given(**options: Any) -> dict[str, Any]:
    """The options that have been given; the others keep the default of whatever they are an option of."""
    return {name: value for name, value in options.items() if value is not None and value != []}


def among(options: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Those of the options that have these names."""
    return {name: value for name, value in options.items() if name in names}


def json_object(option: str, text: str | None) -> dict[str, Any]:
    """The value of an option that is a JSON object; empty where it is not given.

    Raises:
        ConfigError: no JSON object.
    """
    try:
        value = json.loads(text) if text is not None else {}
    except json.JSONDecodeError as error:
        raise ConfigError(f"{option} is {text!r}, which is not JSON ({error.msg}); expected a JSON object") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{option} is {text!r}; expected a JSON object")
    return value


def numbers(option: str, text: str, kind: type[N], count: int) -> list[N]:
    """The value of an option that is so many positive numbers.

    Raises:
        ConfigError: it is not.
    """
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        found = []
    if len(found) != count or min(found) <= 0:
        raise ConfigError(f"{option}: got {text!r}, expected {count} positive numbers separated by commas")
    return found


def speculation(
    speculative_config: str | Mapping[str, Any] | None = None, *, draft_model: str | None = None, **options: Any
) -> SpeculativeConfig | None:
    """The speculation asked for, as JSON or by single options; the environment decides what they leave open.

    Raises:
        ConfigError: both were given, or what was given is wrong.
    """
    single = given(draft_model=draft_model, **options)
    if speculative_config is not None and single:
        flags = ", ".join("--" + name.replace("_", "-") for name in single)
        raise ConfigError(f"--speculative-config was given together with {flags}; expected one or the other")
    if "draft_confidence_threshold" in single:
        single["draft_confidence_threshold"] = _threshold(single["draft_confidence_threshold"])
    if draft_model is not None:
        single["model"] = single.pop("draft_model")
    return SpeculativeConfig.parse(speculative_config if speculative_config is not None else single or None, os.environ)


def _threshold(text: str) -> float | str:
    try:
        return text if text == "auto" else float(text)
    except ValueError:
        raise ConfigError(f"--draft-confidence-threshold is {text!r}; expected a number from 0 to 1, or auto") from None


Dataset = Annotated[
    Path,
    typer.Option(
        help="Spec-Bench, GSM8K or other JSON lines with prompt, turns or question; plain lines; or edits, for "
        "requests that change a little about few documents, over and over."
    ),
]
Methods = Annotated[
    str | None,
    typer.Option(
        help="Methods to compare, separated by commas, each perhaps with a policy (ngram:constant:3), and auto; "
        "default: all that can run."
    ),
]
NumPrompts = Annotated[int, typer.Option(min=1, help="Prompts, taken at even distances from the data.")]
Chat = Annotated[bool, typer.Option("--chat", help="Prompts are a user's turns, in the model's chat template.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Tokens of each continuation.")]
Rounds = Annotated[int, typer.Option(min=1, help="Times that every side runs; medians are shown.")]
BatchSize = Annotated[
    int, typer.Option("--batch-size", "--max-num-seqs", min=1, help="Most requests that run at once.")
]
Temperature = Annotated[float, typer.Option(min=0, help="0 = greedy.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the sampling; outputs are compared, so there is always one.")]
IgnoreEos = Annotated[bool, typer.Option(help="Go on after the end-of-sequence token.")]
OutputJson = Annotated[Path | None, typer.Option(help="Write everything measured to this file.")]


def dataset_prompts(path: Path, count: int) -> list[BenchPrompt]:
    """``count`` prompts of a file, or of a data set that comes along.

    Raises:
        ConfigError: see ``named_or_file``.
    """
    from dynaspec.bench.datasets import named_or_file, spread

    return spread(named_or_file(path).prompts, count)


def note_cut(session: Session, prompts: Sequence[BenchPrompt]) -> None:
    if session.cut:
        note(f"note: {session.cut} of {len(prompts)} prompts did not fit into the model and lost their beginning")


_SPACED = ("--goodput", "--metadata", "--header", "--batch-size-list", "--num-speculative-tokens-list")


class SpacedValues(TyperCommand):
    """Takes ``--goodput ttft:200 tpot:20`` as it takes the option given twice."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread(args))


def spread(args: Sequence[str]) -> list[str]:
    """Arguments in which an option with several values is given once for each of them."""
    result: list[str] = []
    option: str | None = None
    first = False
    for arg in args:
        if arg.startswith("-"):
            option = arg if arg in _SPACED else None
            first = True
        elif option is not None and not first:
            result.append(option)
        else:
            first = False
        result.append(arg)
    return result
