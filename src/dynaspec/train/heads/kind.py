"""What a kind of head says of itself; everything else about training is the same for all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from .basis import Basis
from .head import TrainedHead
from .shape import HeadShape, Start, shape_for


class Kind(ABC):
    """A kind of head with its options. Unless a kind says otherwise, it reads the target's state after the final norm,
    and its training begins afresh."""

    __slots__ = ()
    method: ClassVar[str]
    """Its name in a speculative configuration."""
    title: ClassVar[str]
    """What one is called in its card."""

    @property
    def start_from(self) -> str | None:
        """Folder or hub id of a head to train on from."""
        return None

    @property
    def options(self) -> dict[str, Any]:
        """What makes two runs of this kind different ones, beside the shape; for JSON."""
        return {}

    def shape(self, config: Mapping[str, Any], draft_vocab: int, start: Start | None) -> HeadShape:
        """Sizes for a target with Hugging Face's ``config``; ``start`` is what :meth:`start` gave.

        Raises:
            ConfigError: the target is too shallow, or its configuration lacks a size.
        """
        return shape_for(config, draft_vocab)

    def start(self, config: Mapping[str, Any]) -> Start | None:
        """The head to train on from, if one was given, for a target with Hugging Face's ``config``.

        Raises:
            CheckpointError, ConfigError: it cannot be read, or is of another kind.
        """
        return None

    @abstractmethod
    def head(self, basis: Basis, seed: int) -> TrainedHead:
        """A head with its start weights in float32."""

    @abstractmethod
    def config(self, basis: Basis, verifier: str, architectures: list[str], drafts: int) -> dict[str, Any]:
        """``config.json`` of one for the target ``verifier``, which drafts so many tokens in a row."""

    @abstractmethod
    def described(self, facts: Mapping[str, Any]) -> str:
        """What it looks like, for the card, from its ``training.json``."""
