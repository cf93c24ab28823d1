"""What is asked of the model itself: its names (``/v1/models``), and its tokens (``/tokenize``, ``/detokenize``)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .base import AddressedRequest, Integers, ReplyModel, extra
from .chat import Messages, TemplateFields
from .completions import MAX_PROMPT_TOKENS
from .generation import TokenId


class ModelCard(ReplyModel):
    """A name under which the model may be asked for."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="Unix seconds: when the server started.")
    owned_by: Literal["dynaspec"] = "dynaspec"
    root: str = Field(description="The first of the model's names.")
    parent: None = None
    max_model_len: int = Field(description="Most tokens of a request, prompt included.")


class ModelList(ReplyModel):
    """All names."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeRequest(TemplateFields, AddressedRequest):
    """A text or a conversation: either ``prompt`` or ``messages``."""

    prompt: str | None = Field(None, description="Text.")
    messages: Messages | None = Field(None, description="A conversation, as for /v1/chat/completions.")
    add_special_tokens: bool | None = Field(
        None, description="Let the tokenizer add what it adds to prompts; default: true for prompt alone."
    )
    return_token_strs: bool | None = Field(False, description="Also say how the vocabulary spells each token.")


class TokenizeReply(ReplyModel):
    """A prompt's tokens."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = extra("With return_token_strs.")


class DetokenizeRequest(AddressedRequest):
    """Token ids."""

    tokens: Annotated[list[TokenId], Field(max_length=MAX_PROMPT_TOKENS), Integers]


class DetokenizeReply(ReplyModel):
    """The text that they stand for."""

    prompt: str
