"""What a decision log's lines hold: the values of the seam as JSON and back, without loss."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError, to_json

from dynaspec.contract.costs import PassCosts
from dynaspec.contract.step import DraftView, Limits, SpecPlan, StepOutcome, StepView

T = TypeVar("T")

FORMAT = "dynaspec-decision-log"
VERSION = 2
"""Grows when a reader of the version before would misread the file; fields may be added without."""
OPEN_STEPS = 64
"""Planned steps that writer and reader remember until they are observed; a host gives some up without a word."""

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""JSON has no such numbers; as strings they pass through every reader, and become floats again here."""


def _columns(kind: type[Any], *, but: tuple[str, ...] = ()) -> Callable[[Any], dict[str, Any]]:
    names = tuple(field.name for field in dataclasses.fields(kind) if field.name not in but)
    values = attrgetter(*names)
    return lambda value: dict(zip(names, values(value), strict=True))


encode_view = _columns(StepView, but=("limits",))
encode_plan = _columns(SpecPlan)
encode_drafts = _columns(DraftView)
encode_outcome = _columns(StepOutcome)


def encode_change(plan: SpecPlan, base: SpecPlan) -> dict[str, Any]:
    """The fields of ``plan`` that are not those of ``base``."""
    before = encode_plan(base)
    return {name: value for name, value in encode_plan(plan).items() if value != before[name]}


def decode_limits(value: Mapping[str, Any]) -> Limits:
    return _decoded(_LIMITS, value)


def decode_view(value: Mapping[str, Any], limits: Limits) -> StepView:
    view = _decoded(_VIEW, {**value, "limits": limits})
    _check_columns(view, "ids", ("context_len", "room_depth", "room_nodes", "max_draft", "temperature"))
    return view


def decode_plan(value: Mapping[str, Any], base: SpecPlan | None = None) -> SpecPlan:
    """A plan; with a ``base``, that plan with the fields of ``value`` changed."""
    plan = _decoded(_PLAN, value if base is None else {**encode_plan(base), **value})
    _check_columns(plan, "depth", ("proposer", "nodes"))
    return plan


def decode_drafts(value: Mapping[str, Any]) -> DraftView:
    drafts = _decoded(_DRAFTS, value)
    _check_columns(
        drafts, "length", ("confidence", *(name for name in ("signal", "repeat_bonus") if getattr(drafts, name)))
    )
    return drafts


def decode_outcome(value: Mapping[str, Any]) -> StepOutcome:
    outcome = _decoded(_OUTCOME, value)
    _check_columns(outcome, "ids", (*_OUTCOME_COLUMNS, *(("signal",) if outcome.signal else ())))
    return outcome


def decode_costs(value: Mapping[str, Any]) -> PassCosts:
    return _decoded(_COSTS, value)


_OUTCOME_COLUMNS = (
    *("proposer", "requested", "drafted", "verified", "accepted"),
    *("emitted", "ended", "early_exit", "confidence"),
)
_LIMITS = TypeAdapter(Limits)
_VIEW = TypeAdapter(StepView)
_PLAN = TypeAdapter(SpecPlan)
_DRAFTS = TypeAdapter(DraftView)
_OUTCOME = TypeAdapter(StepOutcome)
_COSTS = TypeAdapter(PassCosts)


def _decoded(adapter: TypeAdapter[T], value: object) -> T:
    """
    Raises:
        ValueError: a field is missing or of the wrong type; the message names it.
    """
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: {first['msg'].lower()}" if where else str(first["msg"])) from None


def _check_columns(value: object, first: str, others: tuple[str, ...]) -> None:
    """
    Raises:
        ValueError: the columns differ in length.
    """
    size = len(getattr(value, first))
    for name in others:
        if len(getattr(value, name)) != size:
            raise ValueError(f"{name} has {len(getattr(value, name))} entries but {first} has {size}; expected as many")


def dumps(value: object) -> bytes:
    """UTF-8 JSON on one line; floats keep every bit, NaN and infinities become strings.

    Raises:
        TypeError: a value that JSON has no counterpart of.
    """
    try:  # three times as fast as ``json``, whose floats are slow
        return to_json(value, inf_nan_mode="strings", fallback=_plain)
    except PydanticSerializationError:  # half a surrogate pair, which UTF-8 cannot hold
        return _ESCAPING.encode(_written_out(value)).encode("ascii")


def restored(value: Any) -> Any:
    """A free JSON value with its NaN and infinities as floats again."""
    if isinstance(value, dict):
        return {name: restored(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [restored(entry) for entry in value]
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def _plain(value: object) -> object:
    """What the encoder does not know by itself."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a value is a {type(value).__name__}; expected one that JSON can hold")


_ESCAPING = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def _written_out(value: object) -> object:
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, list | tuple):
        return [_written_out(entry) for entry in value]
    if isinstance(value, Mapping):
        return {name: _written_out(entry) for name, entry in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _written_out({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    return _written_out(_plain(value))
