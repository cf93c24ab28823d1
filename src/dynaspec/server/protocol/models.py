"""``/v1/models``: what is served."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .base import ReplyModel


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
