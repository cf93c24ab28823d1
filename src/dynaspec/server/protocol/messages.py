"""The messages of a chat, and the tools that it may call."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from .base import LIST, OBJECT, TEXT, Natural, RequestModel, Unsupported, json_kind

_TEXT_ALONE = Unsupported("the model reads text alone; expected parts of type 'text'")

FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class TextPart(RequestModel):
    """A piece of a message's text."""

    type: Annotated[Literal["text"], _TEXT_ALONE]
    text: str
    prompt_cache_breakpoint: dict[str, Any] | None = Field(None, description="Of no effect.")


Content = Annotated[
    Annotated[str, Tag(TEXT)] | Annotated[list[TextPart], Tag(LIST), Field(min_length=1, max_length=1024)],
    Discriminator(json_kind),
]
"""Text, or pieces of text, which are joined by newlines."""


class FunctionCall(RequestModel):
    """What an assistant called."""

    name: FunctionName
    arguments: str = Field(description="A JSON object, as text.")
    parsed_arguments: Any = Field(None, description="Of no effect; helpers of OpenAI's clients bring it.")


class ToolCall(RequestModel):
    """A call in an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Natural | None = Field(None, description="Of no effect; streams bring it.")


class TextMessage(RequestModel):
    """What the user says; or instructions, whose newer role ``developer`` templates get as the system's."""

    role: Literal["system", "developer", "user"]
    content: Content
    name: str | None = None


class AssistantMessage(RequestModel):
    """What the model said before; an answer's message can be sent back as it is."""

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, max_length=128)
    reasoning_content: str | None = Field(None, description="Given to the template.")
    refusal: str | None = Field(None, description="Of no effect.")
    annotations: list[Any] | None = Field(None, description="Of no effect.")
    parsed: Any = Field(None, description="Of no effect; helpers of OpenAI's clients bring it.")
    audio: Annotated[None, Unsupported("the model has no voice; expected null")] = None
    function_call: Annotated[None, Unsupported("function calls are tool calls now; expected tool_calls")] = None


class ToolMessage(RequestModel):
    """What a tool answered."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


def _role(value: object) -> str:
    role = value.get("role") if isinstance(value, dict) else getattr(value, "role", None)
    return TEXT if role in ("system", "developer", "user") else f"<{role}>"


Message = Annotated[
    Annotated[TextMessage, Tag(TEXT)]
    | Annotated[AssistantMessage, Tag("<assistant>")]
    | Annotated[ToolMessage, Tag("<tool>")],
    Discriminator(
        _role,
        custom_error_type="role",
        custom_error_message="Expected a message whose role is system, developer, user, assistant or tool",
    ),
]


class Function(RequestModel):
    """What a tool is called, and what it takes."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of an object; null = no parameters.")
    strict: bool | None = Field(None, description="Of no effect: calls that must be made follow the schema anyway.")


class Tool(RequestModel):
    """A function that the model may call."""

    type: Annotated[Literal["function"], Unsupported("only functions can be called; expected type 'function'")]
    function: Function


class NamedFunction(RequestModel):
    """The name of a function."""

    name: FunctionName


class NamedToolChoice(RequestModel):
    """The function that must be called."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(TEXT)] | Annotated[NamedToolChoice, Tag(OBJECT)],
    Discriminator(json_kind),
]
