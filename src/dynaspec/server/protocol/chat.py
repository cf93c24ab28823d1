"""``/v1/chat/completions``: messages, the tools that may be called, and the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from .base import LIST, OBJECT, TEXT, Natural, Positive, ReplyModel, RequestModel, Unsupported, extra, json_kind
from .generation import (
    FinishReason,
    GenerationRequest,
    PerRequestMetrics,
    PromptLogprobs,
    SpeculationReport,
    StopReason,
    Timings,
    TopLogprobs,
    Usage,
    WrittenToken,
)

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


Messages = Annotated[list[Message], Field(min_length=1, max_length=4096)]


class TemplateFields(RequestModel):
    """What the chat template makes a prompt of, beside the messages."""

    tools: list[Tool] | None = Field(None, max_length=128, description="Functions that the model may call.")
    add_generation_prompt: bool | None = Field(
        None, description="End the prompt with what begins an answer; default: unless continue_final_message."
    )
    continue_final_message: bool = Field(False, description="Go on with the last message instead of answering it.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="More variables for the template.")

    chat_template: Annotated[None, Unsupported("templates are the server's, set by --chat-template; expected null")] = (
        None
    )
    documents: Annotated[None, Unsupported("pass them in chat_template_kwargs or in a message; expected null")] = None


class ChatRequest(GenerationRequest, TemplateFields):
    """A conversation, to be answered ``n`` times."""

    messages: Messages = Field(description="The conversation so far.")
    add_special_tokens: bool = Field(False, description="Let the tokenizer add what the template has left out.")
    max_completion_tokens: Positive | None = Field(None, description="Most output tokens; null = as many as fit.")
    max_tokens: Positive | None = Field(None, description="Older name of max_completion_tokens.")
    logprobs: bool | None = Field(False, description="Report the log-probability of each token.")
    top_logprobs: TopLogprobs | None = Field(None, description="With logprobs: also of this many most probable tokens.")
    tool_choice: ToolChoice | None = Field(
        None, description="Whether tools are called, or which; default: auto if there are any."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="False: one call at most, where calls are required; elsewhere the model decides."
    )

    echo: Annotated[Literal[False] | None, Unsupported("answers do not repeat the prompt; expected false")] = None
    modalities: Annotated[list[Literal["text"]] | None, Unsupported("the model writes text; expected ['text']")] = None
    audio: Annotated[None, Unsupported("the model has no voice; expected null")] = None
    functions: Annotated[None, Unsupported("functions are tools now; expected tools")] = None
    function_call: Annotated[None, Unsupported("functions are tools now; expected tool_choice")] = None
    prediction: Annotated[
        None, Unsupported("predicted text cannot be given; repeated text is found by the ngram drafter; expected null")
    ] = None
    reasoning_effort: Annotated[
        None, Unsupported("thinking is set through chat_template_kwargs, where a template has it; expected null")
    ] = None
    include_reasoning: Annotated[
        Literal[True] | None, Unsupported("thoughts are part of the text; expected true or null")
    ] = None
    verbosity: Annotated[None, Unsupported("the model writes as it does; expected null")] = None
    web_search_options: Annotated[None, Unsupported("there is no web search here; expected null")] = None
    moderation: Annotated[None, Unsupported("there is no moderation here; expected null")] = None


class CalledFunction(ReplyModel):
    """A function's name and the arguments that the model chose."""

    name: str
    arguments: str = Field(description="JSON, as text.")


class CalledTool(ReplyModel):
    """A call by the model."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = extra("Number among the message's calls; in streams.")


class AnswerMessage(ReplyModel):
    """What the model says."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[CalledTool] | None = extra("Calls of tools.")


class TopLogprob(ReplyModel):
    """A candidate for a position."""

    token: str
    logprob: float
    bytes: list[int] | None = Field(description="The token's bytes, which may be part of a character.")


class TokenLogprob(TopLogprob):
    """The token at a position, and its rivals."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(ReplyModel):
    """One entry a token."""

    content: list[TokenLogprob]
    refusal: None = None


class ChatChoice(ReplyModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: StopReason = extra("The stop text or stop token that ended it.")
    token_ids: Sequence[int] | None = extra("With return_token_ids.")
    speculation: SpeculationReport | None = extra("With speculation.metrics.")


class ChatReply(ReplyModel):
    """A whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(description="Unix seconds.")
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: PerRequestMetrics | None = extra("vLLM's, where the server or speculation.metrics asks for it.")
    timings: Timings | None = extra("llama.cpp's, with timings_per_token.")
    prompt_token_ids: Sequence[int] | None = extra("With return_token_ids.")
    prompt_logprobs: PromptLogprobs | None = extra("With prompt_logprobs.")


class Delta(ReplyModel):
    """What is new of an answer."""

    role: Literal["assistant"] | None = extra("In the first chunk.")
    content: str | None = extra("More text.")
    tool_calls: list[CalledTool] | None = extra("Calls of tools, each as a whole.")


class ChunkChoice(ReplyModel):
    """What is new of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: StopReason = extra("The stop text or stop token that ended it.")
    token_ids: Sequence[int] | None = extra("With return_token_ids.")
    speculation: SpeculationReport | None = extra("With speculation.metrics, in the last chunk.")
    token_sources: list[WrittenToken] | None = extra("With speculation.metrics 'detailed'.")


class ChatChunk(ReplyModel):
    """An event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = extra("With stream_options.")
    metrics: PerRequestMetrics | None = extra("With the usage; see the whole answer's.")
    timings: Timings | None = extra("llama.cpp's, with timings_per_token: so far.")
    prompt_token_ids: Sequence[int] | None = extra("With return_token_ids, in the first chunk.")
    prompt_logprobs: PromptLogprobs | None = extra("With prompt_logprobs, in the first chunk.")
