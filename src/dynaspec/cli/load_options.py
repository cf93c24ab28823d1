"""Options of the commands that put load on a server, with vLLM's names and meaning, and the settings they come to."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import uuid4

from typer.core import TyperCommand

from dynaspec.cli.options import in_panel, json_object
from dynaspec.contract.errors import ConfigError

if TYPE_CHECKING:
    from dynaspec.bench.serving.server import LoadSettings, LoadWorkload, Reported, Target, Traffic

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


_SERVER, _LOAD, _ASKED, _SAMPLING, _SAID = "Server", "Load", "Requests", "Sampling", "Result"

Backend = Annotated[
    str,
    in_panel(
        _SERVER,
        "openai (completions), openai-chat; vllm and dynaspec are other words for openai.",
        *("--backend", "--endpoint-type"),
    ),
]
BaseUrl = Annotated[str | None, in_panel(_SERVER, "The server's address, instead of host and port.")]
Host = Annotated[str, in_panel(_SERVER, "The server's host.")]
Port = Annotated[int, in_panel(_SERVER, "The server's port.")]
Endpoint = Annotated[str | None, in_panel(_SERVER, "Path of the requests; default: the backend's.")]
Model = Annotated[str | None, in_panel(_SERVER, "Model to ask for; default: the first that the server lists.")]
ServedModelName = Annotated[str | None, in_panel(_SERVER, "Its name in requests, if that is another.")]
Tokenizer = Annotated[
    str | None, in_panel(_SERVER, "Checkpoint whose tokenizer counts and cuts prompts; default: ask the server.")
]
ApiKey = Annotated[
    str | None, in_panel(_SERVER, "Key for the server; better in OPENAI_API_KEY, as others see command lines.")
]
Header = Annotated[list[str] | None, in_panel(_SERVER, "Further headers, KEY=VALUE.", metavar="KEY=VALUE…")]
RequestIdPrefix = Annotated[str | None, in_panel(_SERVER, "What X-Request-Id begins with; default: one of this run.")]
ReadyCheck = Annotated[
    float,
    in_panel(
        _SERVER,
        "Seconds to wait for the server, and then for a first request; 0 = neither is tried.",
        "--ready-check-timeout-sec",
        min=0,
    ),
]

NumPrompts = Annotated[int, in_panel(_LOAD, "Requests to send.", min=1)]
RequestRate = Annotated[float, in_panel(_LOAD, "Requests a second; inf = all at once.")]
Burstiness = Annotated[
    float, in_panel(_LOAD, "1 = Poisson arrivals; less = bursts, more = even distances (gamma distribution).")
]
MaxConcurrency = Annotated[int | None, in_panel(_LOAD, "Most requests under way at once; default: no limit.", min=1)]
NumWarmups = Annotated[int, in_panel(_LOAD, "Times that the first request is sent beforehand.", min=0)]
Seed = Annotated[int, in_panel(_LOAD, "Of the choice of prompts and of arrivals.")]

DatasetName = Annotated[
    str | None, in_panel(_ASKED, "random, sharegpt, custom, spec_bench, gsm8k, prompts or demo; default: random.")
]
DatasetPath = Annotated[Path | None, in_panel(_ASKED, "The data set's file; without a name, its lines say their form.")]
Category = Annotated[
    str | None, in_panel(_ASKED, "Only prompts of this category.", "--category", "--spec-bench-category")
]
OutputLen = Annotated[
    int | None,
    in_panel(
        _ASKED,
        "Most tokens of an answer; default: what the data set says, 128 for random and demo, else 256.",
        *("--output-len", "--max-tokens", "--random-output-len", "--sharegpt-output-len", "--custom-output-len"),
        "--spec-bench-output-len",
        min=1,
    ),
]
InputLen = Annotated[int, in_panel(_ASKED, "Tokens of random prompts.", "--random-input-len", "--input-len", min=1)]
RangeRatio = Annotated[
    float, in_panel(_ASKED, "Random lengths lie within this share of their mean.", "--random-range-ratio")
]
PrefixLen = Annotated[
    int, in_panel(_ASKED, "Tokens that random prompts begin with, all the same.", "--random-prefix-len")
]
DisableShuffle = Annotated[bool, in_panel(_ASKED, "Prompts in the order of the file.", "--disable-shuffle")]
NoOversample = Annotated[bool, in_panel(_ASKED, "No prompt twice, even if there are too few.", "--no-oversample")]
IgnoreEos = Annotated[
    bool, in_panel(_ASKED, "Go on after the end-of-sequence token; random always does.", "--ignore-eos")
]
ExtraBody = Annotated[str | None, in_panel(_ASKED, "Further fields of every request, as JSON.")]
Acceptance = Annotated[
    bool | None,
    in_panel(_ASKED, "Ask for what became of each request's drafts; default: if the server is dynaspec's."),
]

Temperature = Annotated[float | None, in_panel(_SAMPLING, "0 = greedy; default: the server's.")]
TopP = Annotated[float | None, in_panel(_SAMPLING, "Keep a token while the mass before it is below this.")]
TopK = Annotated[int | None, in_panel(_SAMPLING, "Keep so many of the most probable tokens.")]
MinP = Annotated[float | None, in_panel(_SAMPLING, "Keep tokens with so much of the largest probability.")]
FrequencyPenalty = Annotated[float | None, in_panel(_SAMPLING, "Above 0: the more often seen, the less likely.")]
PresencePenalty = Annotated[float | None, in_panel(_SAMPLING, "Above 0: tokens seen are less likely.")]
RepetitionPenalty = Annotated[float | None, in_panel(_SAMPLING, "Above 1: tokens seen are less likely.")]

PercentileMetrics = Annotated[
    str, in_panel(_SAID, "Times to report: ttft, tpot, itl, e2el, client_queue_time, e2el_including_client_queue.")
]
MetricPercentiles = Annotated[str, in_panel(_SAID, "Percentiles of them.")]
Goodput = Annotated[
    list[str] | None,
    in_panel(
        _SAID,
        "Limits in ms, such as ttft:200 tpot:20 e2el:5000: requests within all count as good.",
        metavar="NAME:MS…",
    ),
]
DisableTqdm = Annotated[bool, in_panel(_SAID, "No progress.", "--disable-tqdm")]

_SAMPLING_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
)
"""Options that are fields of a request under the same names."""


def settings_of(options: Mapping[str, Any], target: Target) -> LoadSettings:
    """Settings from options by their names; those that a command does not have keep their defaults.

    Raises:
        ConfigError: a value that cannot be.
    """
    from dynaspec.bench.serving.server import LoadSettings, LoadWorkload, Traffic

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
    from dynaspec.bench.serving.server import Target, base_address

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
    from dynaspec.bench.serving.server import Reported

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
    given: dict[str, Any] = {name: options[name] for name in _SAMPLING_FIELDS if options.get(name) is not None}
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
