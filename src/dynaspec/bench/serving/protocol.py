"""The two ways to ask a server for text, and how its answers are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dynaspec.contract.errors import ConfigError

Prompt = str | tuple[int, ...]
"""Text, or token ids."""
Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens as the server counted them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Of the prompt's, those that came from the prefix cache."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event of a stream, or a whole answer."""

    has_choice: bool
    """It belongs to the continuation. The event that only carries usage does not."""
    has_output: bool
    """It brought tokens. A chat's opening event, which names the role, does not."""
    text: str
    finish_reason: str | None
    usage: Usage | None
    speculation: Json | None
    """What a dynaspec server says of the request's drafts."""


class Api(Protocol):
    """An endpoint's form of request and answer."""

    path: str
    suffix: str
    """What the path of such an endpoint ends with."""
    is_chat: bool

    def body(self, model: str, prompt: Prompt, output_len: int) -> dict[str, Any]:
        """The request's JSON, for a streamed answer with usage."""
        ...

    def text(self, choice: Json) -> tuple[str, bool]:
        """(text, has output) of a choice."""
        ...


class Completions:
    """``/v1/completions``: the prompt is continued as it is."""

    path = "/v1/completions"
    suffix = "completions"
    is_chat = False

    def body(self, model: str, prompt: Prompt, output_len: int) -> dict[str, Any]:
        given = prompt if isinstance(prompt, str) else list(prompt)
        return {"model": model, "prompt": given, "max_tokens": output_len, **_streamed()}

    def text(self, choice: Json) -> tuple[str, bool]:
        # Text may be empty where a token is special or a character incomplete: it is a token all the same.
        return choice.get("text") or "", True


class Chat:
    """``/v1/chat/completions``: the prompt is a user's message."""

    path = "/v1/chat/completions"
    suffix = "chat/completions"
    is_chat = True

    def body(self, model: str, prompt: Prompt, output_len: int) -> dict[str, Any]:
        if not isinstance(prompt, str):
            raise ConfigError("a chat's message is a list of token ids; expected text")
        messages = [{"role": "user", "content": prompt}]
        return {"model": model, "messages": messages, "max_completion_tokens": output_len, **_streamed()}

    def text(self, choice: Json) -> tuple[str, bool]:
        said = choice.get("delta") or choice.get("message") or {}
        content = said.get("content") or ""
        more = any(said.get(key) for key in ("reasoning_content", "reasoning", "tool_calls", "refusal"))
        opens = "role" in said and not content and not more and choice.get("finish_reason") is None
        return content, not opens


BACKENDS: Mapping[str, Api] = {
    "openai": Completions(),
    "openai-chat": Chat(),
    "vllm": Completions(),
    "dynaspec": Completions(),
}
"""Names of ``--backend``; ``vllm`` and ``dynaspec`` are other words for ``openai``."""


def find_api(backend: str) -> Api:
    """
    Raises:
        ConfigError: an unknown backend.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"the backend is {backend!r}; expected {', '.join(BACKENDS)}")
    return BACKENDS[backend]


def read_chunk(api: Api, event: Json) -> Chunk:
    """What an event, or an answer that was not streamed, brought."""
    choices = event.get("choices")
    choice: Json = choices[0] if choices else {}
    text, has_output = api.text(choice) if choices else ("", False)
    return Chunk(
        has_choice=bool(choices),
        has_output=has_output,
        text=text,
        finish_reason=choice.get("finish_reason"),
        usage=_usage(event.get("usage")),
        speculation=event.get("speculation") or choice.get("speculation"),
    )


def error_of(event: Any) -> tuple[str, str] | None:
    """(type, message) if an event or a body is an error object of OpenAI's or of older servers; None otherwise."""
    if not isinstance(event, Mapping):
        return None
    error = event.get("error")
    if isinstance(error, Mapping):
        return str(error.get("type") or "error"), str(error.get("message") or error)
    if isinstance(error, str):
        return "error", error
    if event.get("object") == "error" or "detail" in event:
        return str(event.get("type") or "error"), str(event.get("message") or event.get("detail"))
    return None


def _usage(value: Any) -> Usage | None:
    if not isinstance(value, Mapping) or value.get("completion_tokens") is None:
        return None
    details = value.get("prompt_tokens_details") or {}
    return Usage(value.get("prompt_tokens") or 0, value["completion_tokens"], details.get("cached_tokens") or 0)


def _streamed() -> dict[str, Any]:
    return {"stream": True, "stream_options": {"include_usage": True}}
