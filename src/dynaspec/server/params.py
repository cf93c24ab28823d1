"""From a request's fields to sampling parameters, the form of output among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynaspec.contract.errors import RequestError
from dynaspec.contract.sampling_params import (
    RequestOutputKind,
    SamplingParams,
    SpeculationMetrics,
    StructuredOutputsParams,
)
from dynaspec.engine.sampling_defaults import NEUTRAL, SamplingDefaults

from .errors import bad_request
from .protocol.chat import ChatRequest
from .protocol.completions import CompletionRequest
from .protocol.generation import (
    FormFields,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    SamplingFields,
    StructuredOutputs,
)

_GUIDED = ("json", "regex", "choice", "grammar")


def form_of(body: FormFields) -> StructuredOutputsParams | None:
    """
    Returns:
        None for free text.

    Raises:
        ApiError: two forms, or one that cannot be.
    """
    asked = _asked(body)
    if len(asked) > 1:
        first, second = sorted(asked)[:2]
        raise bad_request(f"both {first} and {second} are given; expected one form of output", param=second)
    if body.guided_whitespace_pattern is not None and "guided_json" not in asked:
        raise bad_request(
            "guided_whitespace_pattern is given without guided_json; expected both or neither",
            param="guided_whitespace_pattern",
        )
    return next((form(options, param=name) for name, options in asked.items()), None)


def form(options: Mapping[str, Any], *, param: str) -> StructuredOutputsParams:
    """
    Args:
        options: fields of ``StructuredOutputsParams``.
        param: the request's field that they come from.

    Raises:
        ApiError: no such form.
    """
    try:
        return StructuredOutputsParams(**options)
    except RequestError as error:
        raise bad_request(str(error), param=param) from None


def _asked(body: FormFields) -> dict[str, Mapping[str, Any]]:
    """Field of the request → options of the form that it asks for."""
    asked: dict[str, Mapping[str, Any]] = {}
    if isinstance(body.response_format, JsonObjectFormat):
        asked["response_format"] = {"json_object": True}
    elif isinstance(body.response_format, JsonSchemaFormat):
        asked["response_format"] = {"json": body.response_format.json_schema.schema_}
    if body.structured_outputs is not None:
        asked["structured_outputs"] = _options(body.structured_outputs)
    for kind in _GUIDED:
        value = getattr(body, f"guided_{kind}")
        if value is not None:
            asked[f"guided_{kind}"] = {kind: value}
    if body.guided_whitespace_pattern is not None and "guided_json" in asked:
        asked["guided_json"] = {**asked["guided_json"], "whitespace_pattern": body.guided_whitespace_pattern}
    return asked


def _options(given: StructuredOutputs) -> dict[str, Any]:
    return {
        "json": given.json_,
        "regex": given.regex,
        "choice": given.choice,
        "grammar": given.grammar,
        "json_object": given.json_object,
        "whitespace_pattern": given.whitespace_pattern,
        "disable_any_whitespace": given.disable_any_whitespace,
    }


def completion_params(body: CompletionRequest, defaults: SamplingDefaults = NEUTRAL) -> SamplingParams:
    """
    Args:
        defaults: of what the request leaves out, but for ``max_tokens``, which is then 16 as everywhere.

    Raises:
        ApiError: values that contradict each other.
    """
    n, max_tokens = body.n or 1, 16 if body.max_tokens is None else body.max_tokens
    if body.best_of is not None and body.best_of != n:
        raise bad_request(
            f"best_of is {body.best_of} but n is {n}; expected the same, as all continuations are returned",
            param="best_of",
        )
    if max_tokens == 0 and not body.echo:
        raise bad_request("max_tokens is 0 without echo; expected at least 1, or echo", param="max_tokens")
    of_prompt = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        of_prompt = max(body.logprobs, of_prompt or 0)
    # A prompt cannot be read without a token being generated; what was not asked for is left out of the answer.
    return _params(
        body,
        defaults,
        form_of(body),
        max_tokens=_limited(max(max_tokens, 1), defaults),
        logprobs=body.logprobs,
        prompt_logprobs=of_prompt,
    )


def asked_tokens(body: ChatRequest) -> int | None:
    """Most output tokens, if the request says it."""
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def chat_params(
    body: ChatRequest, calls: StructuredOutputsParams | None, defaults: SamplingDefaults = NEUTRAL
) -> SamplingParams:
    """
    Args:
        calls: the form of the tool calls that must be made, if any must.
        defaults: of what the request leaves out.

    Raises:
        ApiError: values that contradict each other.
    """
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request(
            f"top_logprobs is {body.top_logprobs} without logprobs; expected logprobs to be true", param="top_logprobs"
        )
    form = form_of(body)
    if form is not None and calls is not None:
        raise bad_request("a form of output is given beside tools that must be called; expected one of the two")
    max_tokens = asked_tokens(body)
    if body.max_tokens not in (None, max_tokens):
        raise bad_request(
            f"max_completion_tokens is {max_tokens} but max_tokens is {body.max_tokens}; expected one of them",
            param="max_tokens",
        )
    if max_tokens is None:
        max_tokens = defaults.values.get("max_tokens")
    return _params(
        body,
        defaults,
        calls or form,
        max_tokens=_limited(max_tokens, defaults),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )


def reported_speculation(body: GenerationRequest) -> SpeculationMetrics:
    """What the answer says of the drafts."""
    return (body.speculation and body.speculation.metrics) or "off"


def _limited(max_tokens: int | None, defaults: SamplingDefaults) -> int | None:
    return min((limit for limit in (max_tokens, defaults.most_tokens) if limit is not None), default=None)


def _params(
    body: GenerationRequest, defaults: SamplingDefaults, form: StructuredOutputsParams | None, **others: Any
) -> SamplingParams:
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is given without stream; expected stream to be true", param="stream_options")
    given = {name: getattr(body, name) for name in SamplingFields.model_fields}
    values = {
        **defaults.values,
        **{name: value for name, value in given.items() if value is not None},
        "output_kind": RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY,
        "structured_outputs": form,
        "truncate_prompt_tokens": body.truncate_prompt_tokens,
        **_draft_options(body),
        **others,
    }
    try:
        return SamplingParams(**values)
    except RequestError as error:
        raise bad_request(str(error), param=_named(error, values)) from None


def _draft_options(body: GenerationRequest) -> dict[str, Any]:
    asked = body.speculation
    if asked is None:
        return {"max_draft_tokens": body.max_draft_tokens}
    limits = {asked.max_draft_tokens, body.max_draft_tokens} - {None}
    if len(limits) > 1:
        raise bad_request(
            f"max_draft_tokens is {body.max_draft_tokens}, but {asked.max_draft_tokens} in speculation; "
            "expected one of them",
            param="max_draft_tokens",
        )
    return {
        "max_draft_tokens": next(iter(limits), None),
        "expected_acceptance": asked.expected_acceptance,
        # Unless the caller objects, totals are counted: the live page shows them, and they cost next to nothing.
        "speculation_metrics": asked.metrics or "summary",
    }


def _named(error: RequestError, values: dict[str, Any]) -> str | None:
    """The parameter that the sentence begins with."""
    first = str(error).split(maxsplit=1)[0]
    return first if first in values else None
