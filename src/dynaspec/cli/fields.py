"""Options made of a configuration's fields, so that what a field says is said once."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

SIZES = frozenset({"kv_cache_memory", "max_request_bytes"})
"""Numbers that may be written as 512M."""

Command = Callable[..., None]


def with_fields(config: type[BaseModel], panel: str, leave_out: Collection[str] = ()) -> Callable[[Command], Command]:
    """Gives a command an option for every field; it gets them by name, None if not given.

    The command takes them as ``**options``.

    Args:
        panel: heading of the help for fields that have no ``group`` of their own.
        leave_out: fields that are no options.
    """
    options = [_option(name, field, panel) for name, field in config.model_fields.items() if name not in leave_out]

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        kept = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        command.__signature__ = signature.replace(parameters=[*kept, *options])  # type: ignore[attr-defined]  # typer's
        return command

    return decorate


def _option(name: str, field: FieldInfo, panel: str) -> inspect.Parameter:
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    kind = str if name in SIZES else _kind(field.annotation)
    option = typer.Option(help=_help(field), rich_help_panel=str(extra.get("group", panel)))
    annotation = Annotated[kind | None, option]  # type: ignore[valid-type]  # made at run time
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _kind(annotation: Any) -> Any:
    """What the command line has to read: a flag, a number, a text, or several texts."""
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(one for one in get_args(annotation) if one is not type(None))
    if get_origin(annotation) is tuple:
        return list[str]
    return annotation if annotation in (bool, int, float) else str


def _help(field: FieldInfo) -> str:
    text, default = field.description or "", field.default
    said = default is None or default is False or default in ((), "") or "default:" in text.lower()
    return text if said else f"{text.removesuffix('.')}; default: {_shown(default)}."


def _shown(default: object) -> str:
    if default is True:
        return "on"
    if isinstance(default, float):
        return f"{default:g}"
    return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
