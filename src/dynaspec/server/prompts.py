"""From a conversation to a prompt, and from texts to token ids without holding up other requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jinja2 import TemplateSyntaxError

from dynaspec.api import AsyncLLM
from dynaspec.contract.errors import ConfigError, RequestError
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.engine import chat_prompt
from dynaspec.engine.tokenizer import Tokenizer

from .errors import ApiError, bad_request
from .protocol.chat import AssistantMessage, Content, Message, TemplateFields, Tool, ToolCall
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
