"""From a request's fields to what the engine is given: a prompt, encoded without holding up others, and sampling
parameters, the form of output among them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jinja2 import TemplateSyntaxError

from dynaspec.api import AsyncLLM
from dynaspec.contract.errors import ConfigError, RequestError
from dynaspec.contract.sampling_params import (
    RequestOutputKind,
    SamplingParams,
    SpeculationMetrics,
    StructuredOutputsParams,
)
from dynaspec.engine import chat_prompt
from dynaspec.engine.sampling_defaults import NEUTRAL, SamplingDefaults
from dynaspec.engine.tokenizer import Tokenizer

from .errors import ApiError, bad_request
from .protocol.chat import AssistantMessage, ChatRequest, Content, Message, TemplateFields, Tool, ToolCall
from .protocol.completions import CompletionRequest
from .protocol.generation import (
    FormFields,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    SamplingFields,
    StructuredOutputs,
)
from .state import ServerState

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """What a request is run with."""

    tokens: Sequence[int]
    text: str | None = None
    """As it was given; None if token ids were."""


async def encode_text(llm: AsyncLLM, text: str, *, special_tokens: bool, truncated: bool, param: str) -> EncodedPrompt:
    """
    Args:
        special_tokens: whether the tokenizer adds what it adds to prompts.
        truncated: whether only the end of it will be used, so that it may be long.
        param: the request's field that it comes from.

    Raises:
        ApiError: no valid Unicode; or so long that it must have too many tokens, which is seen without encoding it.
    """
    longest = llm.tokenizer.longest_token
    if longest is not None and not truncated and len(text) > longest * llm.max_model_len:
        least = -(-len(text) // longest)
        raise context_length_exceeded(f"at least {least}", llm.max_model_len, param=param)
    tokens = await in_thread(lambda: llm.tokenizer.encode(text, special_tokens=special_tokens), param=param)
    return EncodedPrompt(tokens, text)


async def in_thread(work: Callable[[], T], *, param: str) -> T:
    """Runs what takes time and may be refused.

    Raises:
        ApiError: 400, for a ``RequestError``.
    """
    try:
        return await asyncio.to_thread(work)
    except RequestError as error:
        raise bad_request(str(error), param=param) from None


def check_length(prompt: EncodedPrompt, params: SamplingParams, limit: int, *, asked: int | None, param: str) -> None:
    """
    Args:
        limit: most tokens of prompt and output.
        asked: output tokens that the caller has asked for; None = what fits.

    Raises:
        ApiError: they do not fit.
    """
    length = min(len(prompt.tokens), params.truncate_prompt_tokens or len(prompt.tokens))
    if length >= limit:
        raise context_length_exceeded(str(length), limit, param=param)
    if asked is not None and length + asked > limit:
        raise bad_request(
            f"the prompt's tokens are {length} and max_tokens is {asked}, but the model takes {limit} in all; "
            f"expected max_tokens of at most {limit - length}",
            param="max_tokens",
            code="context_length_exceeded",
        )


def context_length_exceeded(length: str, limit: int, *, param: str) -> ApiError:
    """400: not even one token could be generated."""
    return bad_request(
        f"the prompt has {length} tokens, but the model takes {limit} in all; expected at most {limit - 1}",
        param=param,
        code="context_length_exceeded",
    )


def render(state: ServerState, messages: Sequence[Message], fields: TemplateFields, tools: Sequence[Tool]) -> str:
    """The prompt that the chat template makes. May take long: not for the event loop.

    Args:
        tools: those that the model may call.

    Raises:
        RequestError: the template refuses.
        ApiError: messages that do not hold together.
    """
    begin = fields.add_generation_prompt
    return chat_prompt.render(
        state.llm.tokenizer,
        [_told(message, i) for i, message in enumerate(messages)],
        tools=[tool.model_dump(exclude_unset=True) for tool in tools],
        tool_format=state.tool_format,
        template=state.config.chat_template,
        add_generation_prompt=not fields.continue_final_message if begin is None else begin,
        continue_final_message=fields.continue_final_message,
        variables=fields.chat_template_kwargs,
    )


def check_template(tokenizer: Tokenizer, template: str) -> None:
    """
    Raises:
        ConfigError: it is no Jinja. What else it may refuse depends on the conversation.
    """
    try:
        tokenizer.render_chat([{"role": "user", "content": ""}], template=template)
    except RequestError as error:
        fault = error.__cause__
        if isinstance(fault, TemplateSyntaxError):
            where = f"line {fault.lineno}: {fault.message}"
            raise ConfigError(f"chat_template is wrong at {where}; expected a Jinja template") from None


def _told(message: Message, index: int) -> Mapping[str, Any]:
    """A message as templates know it: text in one piece, arguments as an object, nothing that is null."""
    told: dict[str, Any] = {
        # "developer" is a newer word for it that few templates know.
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message.content),
    }
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name, None)
        if value is not None:
            told[name] = value
    if isinstance(message, AssistantMessage):
        if message.tool_calls:
            told["tool_calls"] = [
                _call(call, f"messages.{index}.tool_calls.{k}") for k, call in enumerate(message.tool_calls)
            ]
        elif message.content is None:
            raise bad_request(
                f"message {index} has neither content nor tool calls; expected one of them",
                param=f"messages.{index}.content",
            )
    return told


def _text(content: Content | None) -> str:
    if content is None:
        return ""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _call(call: ToolCall, path: str) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments, path)},
    }


def _arguments(text: str, path: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise bad_request(
            'a tool call\'s arguments are no JSON object; expected text such as \'{"city": "Oslo"}\'',
            param=f"{path}.function.arguments",
        )
    return arguments


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
