"""Options that several commands share, and options made of a configuration's fields. What an engine option means is
said once, by ``EngineConfig``'s fields."""

from __future__ import annotations

import inspect
import os
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Annotated, Any, Union, get_args, get_origin

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


def with_fields(config: type[BaseModel], panel: str, leave_out: Collection[str] = ()) -> Callable[[Command], Command]:
    """Gives a command an option for every field; it gets them by name, None if not given.

    The command takes them as ``**options``.

    Args:
        panel: heading of the help for fields that have no ``group`` of their own.
        leave_out: fields that are no options.
    """
    options = [_parameter(name, field, panel) for name, field in config.model_fields.items() if name not in leave_out]

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        kept = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        command.__signature__ = signature.replace(parameters=[*kept, *options])  # type: ignore[attr-defined]  # typer's
        return command

    return decorate


def _parameter(name: str, field: FieldInfo, panel: str) -> inspect.Parameter:
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


_SAMPLING_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}


def _engine(name: str) -> Any:
    field = EngineConfig.model_fields[name]
    return _option(field.description or "", field.default, "Engine")


def _sampling(name: str, text: str) -> Any:
    return _option(text, _SAMPLING_DEFAULTS[name], "Sampling")


def _option(text: str, default: object, panel: str) -> Any:
    """An option that is None unless given, with the default that then holds in its help."""
    said = default is None or isinstance(default, bool)
    help_text = text if said else f"{text.removesuffix('.')}; default: {default}."
    return typer.Option(help=help_text, rich_help_panel=panel)


def _speculation(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="Speculation")


Model = Annotated[str, typer.Option(help=EngineConfig.model_fields["model"].description)]
Tokenizer = Annotated[str | None, _engine("tokenizer")]
Revision = Annotated[str | None, _engine("revision")]
TrustRemoteCode = Annotated[bool | None, _engine("trust_remote_code")]
Dtype = Annotated[str | None, _engine("dtype")]
Quantization = Annotated[str | None, _engine("quantization")]
Device = Annotated[str | None, _engine("device")]
MaxModelLen = Annotated[int | None, _engine("max_model_len")]
MaxNumSeqs = Annotated[int | None, _engine("max_num_seqs")]
MaxNumBatchedTokens = Annotated[int | None, _engine("max_num_batched_tokens")]
KvCacheMemory = Annotated[str | None, _engine("kv_cache_memory")]
KvCacheDtype = Annotated[str | None, _engine("kv_cache_dtype")]
EnablePrefixCaching = Annotated[bool | None, _engine("enable_prefix_caching")]
AsyncScheduling = Annotated[bool | None, _engine("async_scheduling")]
GenerationConfig = Annotated[str | None, _engine("generation_config")]
DecisionLog = Annotated[str | None, _engine("decision_log")]
TensorParallelSize = Annotated[int | None, _engine("tensor_parallel_size")]

Temperature = Annotated[float | None, _sampling("temperature", "0 = greedy.")]
TopP = Annotated[float | None, _sampling("top_p", "Keep a token while the mass before it is below this.")]
TopK = Annotated[int | None, _sampling("top_k", "Keep so many of the most probable tokens; 0 = all.")]
MinP = Annotated[float | None, _sampling("min_p", "Keep tokens with so much of the largest probability.")]
RepetitionPenalty = Annotated[float | None, _sampling("repetition_penalty", "Above 1: tokens seen are less likely.")]
MaxTokens = Annotated[int | None, _sampling("max_tokens", "Most tokens of a continuation.")]
Seed = Annotated[int | None, _sampling("seed", "Makes sampling repeatable, with and without speculation.")]
Stop = Annotated[list[str] | None, _sampling("stop", "End before this string; may be given several times.")]
IgnoreEos = Annotated[bool | None, _sampling("ignore_eos", "Go on after the end-of-sequence token.")]
Continuations = Annotated[int | None, _sampling("n", "Continuations of each prompt.")]

SpeculativeJson = Annotated[
    str | None, _speculation("All of it as JSON, with vLLM's keys; excludes the options that follow.")
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        *("--draft-model", "--speculative-model"),
        help="Checkpoint of the model or head that drafts.",
        rich_help_panel="Speculation",
    ),
]
Method = Annotated[str | None, _speculation(f"{', '.join(METHODS)}; default: what the other options imply.")]
Policy = Annotated[
    str | None, _speculation("auto, constant, heuristic, heuristic_transient, confidence or elastic; default: auto.")
]
NumSpeculativeTokens = Annotated[int | None, _speculation("Draft length; with a confidence threshold the longest one.")]
DraftConfidenceThreshold = Annotated[
    str | None, _speculation("Stop drafting after a token with less confidence (0 to 1), or auto.")
]


def given(**options: Any) -> dict[str, Any]:
    """The options that have been given; the others keep the default of whatever they are an option of."""
    return {name: value for name, value in options.items() if value is not None}


def speculation(
    speculative_config: str | Mapping[str, Any] | None, *, draft_model: str | None = None, **options: Any
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
