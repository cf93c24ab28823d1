"""From the options of a load test to its settings."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any
from uuid import uuid4

from dynaspec.bench.serving.server import LoadSettings, LoadWorkload, Reported, Target, Traffic, base_address
from dynaspec.cli.options import json_object
from dynaspec.contract.errors import ConfigError

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)
"""Options that are fields of a request under the same names."""


def settings_of(options: Mapping[str, Any], target: Target) -> LoadSettings:
    """Settings from options by their names; those that a command does not have keep their defaults.

    Raises:
        ConfigError: a value that cannot be.
    """
    workload = _chosen(options, LoadWorkload)
    if options.get("disable_shuffle"):
        workload["shuffle"] = False
    if options.get("no_oversample"):
        workload["oversample"] = False
    return LoadSettings(
        target=target,
        workload=LoadWorkload(**workload),
        traffic=Traffic(**_chosen(options, Traffic)),
        reported=reported_of(options),
        fields=fields_of(options),
        tokenizer=options.get("tokenizer"),
        acceptance=options.get("acceptance"),
    )


def target_of(options: Mapping[str, Any]) -> Target:
    """A running server; its key is the environment's where none is given."""
    return Target(
        root=base_address(options["base_url"], options["host"], options["port"]),
        backend=options["backend"],
        endpoint=options["endpoint"],
        model=options["served_model_name"] or options["model"],
        api_key=options["api_key"] or os.environ.get("OPENAI_API_KEY") or None,
        headers=pairs("--header", options["header"]),
        request_id_prefix=options["request_id_prefix"] or new_prefix(),
        ready_check_timeout_s=options["ready_check_timeout_sec"],
    )


def new_prefix() -> str:
    """What the ids of this run's requests begin with."""
    return f"bench-{uuid4().hex[:8]}-"


def reported_of(options: Mapping[str, Any]) -> Reported:
    """
    Raises:
        ConfigError: an unknown time, or something that is no number.
    """
    goals = pairs("--goodput", options["goodput"], ":")
    reported = Reported(
        percentiles=numbers("--metric-percentiles", options["metric_percentiles"]),
        goals_ms={name: _number("--goodput", value) for name, value in goals.items()},
    )
    if "percentile_metrics" not in options:
        return reported
    names = (part.strip() for part in options["percentile_metrics"].split(","))
    return replace(reported, metrics=tuple(dict.fromkeys(name for name in names if name)))


def fields_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """Further fields of every request: sampling that was given, then the extra body, which has the last word.

    Raises:
        ConfigError: the extra body is no JSON object.
    """
    given: dict[str, Any] = {name: options[name] for name in _SAMPLING if options.get(name) is not None}
    if options["ignore_eos"]:
        given["ignore_eos"] = True
    return given | json_object("--extra-body", options["extra_body"])


def pairs(option: str, given: Sequence[str] | None, sign: str = "=") -> dict[str, str]:
    """
    Raises:
        ConfigError: one of them is not a key and a value with the sign between.
    """
    found: dict[str, str] = {}
    for text in given or ():
        key, found_sign, value = text.partition(sign)
        if not found_sign or not key.strip():
            raise ConfigError(f"{option} has {text!r}; expected KEY{sign}VALUE")
        found[key.strip()] = value.strip()
    return found


def numbers(option: str, text: str) -> tuple[float, ...]:
    """
    Raises:
        ConfigError: not numbers with commas between.
    """
    found = tuple(_number(option, part) for part in text.split(",") if part.strip())
    if not found:
        raise ConfigError(f"{option} is {text!r}; expected numbers, separated by commas")
    return found


def _chosen(options: Mapping[str, Any], kind: type[LoadWorkload] | type[Traffic]) -> dict[str, Any]:
    """The options that are fields of this kind of settings."""
    return {field.name: options[field.name] for field in fields(kind) if field.name in options}


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{option} has {text!r}; expected a number") from None
