"""Options that several commands share, by name, and options made of a configuration's fields. What an engine option
means is said once, by ``EngineConfig``'s fields."""

from __future__ import annotations

import inspect
import json
import os
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.methods import METHODS
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.control.config import SpeculativeConfig
from dynaspec.engine.config import EngineConfig

SIZES = frozenset({"kv_cache_memory", "max_request_bytes"})
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
    kind = str if name in SIZES else _kind(field.annotation)
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
