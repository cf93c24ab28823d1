"""From a method's name to its proposer: what ``contract.methods`` lists, built.

A new method is an entry there, one here, and a file beside this one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.proposer import Proposer
from dynaspec.control.config import SpeculativeConfig
from dynaspec.kv.arena import Arena
from dynaspec.kv.tables import BlockTables
from dynaspec.model.attention.base import Shape
from dynaspec.model.base import Model
from dynaspec.model.config import DecoderConfig
from dynaspec.model.eagle3.head import Eagle3Head
from dynaspec.model.eagle3.loader import load_eagle3
from dynaspec.model.quantization import Quantization
from dynaspec.model.taps import Taps
from dynaspec.sampling.state import SamplerState

from .autoregressive import AutoregressiveProposer
from .draft_model import DraftModel
from .drafter import Drafter
from .eagle3 import Eagle3Drafter
from .ngram import NgramProposer


class Weights(Protocol):
    """What has been loaded to draft with, and the KV that it needs."""

    config: DecoderConfig
    dtype: torch.dtype
    device: torch.device
    kv_bytes_per_block: int

    def kv_shapes(self, num_blocks: int) -> tuple[Shape, Shape]: ...


class Loaded(Protocol):
    """A method's weights. KV is sized by what all models need, so they are loaded before there is any."""

    @property
    def weights(self) -> Weights: ...

    taps: tuple[int, ...]
    """Hidden states of the target that it reads, see ``model.taps``."""

    def drafter(self, arena: Arena, taps: Taps | None) -> Drafter:
        """
        Args:
            taps: where the target keeps ``taps``; None if it reads none.
        """
        ...


@dataclass(frozen=True, slots=True)
class Source:
    """Where a method finds what it drafts with."""

    config: SpeculativeConfig
    target: Model | None
    """None where somebody else runs it."""
    target_name: str
    """In a sentence."""
    vocab_size: int
    dtype: str
    """What ``auto`` stands for."""
    device: str
    load: Callable[..., Model]
    """As ``model.loader.load_model``."""
    trust_remote_code: bool = False
    quantization: Quantization | None = None
    """Where the configuration names none."""

    @property
    def checkpoint(self) -> str:
        """
        Raises:
            ConfigError: there is none.
        """
        if self.config.model is None:
            raise ConfigError(f"method is {self.config.method!r} but no model is given; expected its checkpoint")
        return self.config.model


class LoadedModel:
    """See ``Loaded``."""

    taps: tuple[int, ...] = ()

    def __init__(self, source: Source) -> None:
        """
        Raises:
            CheckpointError: see ``load_model``.
            ConfigError: its vocabulary is not the target's.
        """
        config = source.config
        self.weights: Model = source.load(
            source.checkpoint,
            revision=config.revision,
            dtype=source.dtype if config.dtype == "auto" else config.dtype,
            device=source.device,
            trust_remote_code=source.trust_remote_code,
            quantization=config.quantization or source.quantization,
        )
        found = self.weights.config.vocab_size
        if found != source.vocab_size:
            raise ConfigError(
                f"the drafter {source.checkpoint!r} has a vocabulary of {found} tokens but "
                f"{source.target_name} has {source.vocab_size}; expected a drafter with the target's vocabulary"
            )

    def drafter(self, arena: Arena, taps: Taps | None) -> Drafter:
        return DraftModel(self.weights, arena)


class LoadedEagle3:
    """See ``Loaded``."""

    def __init__(self, source: Source) -> None:
        """
        Raises:
            CheckpointError: see ``load_eagle3``.
            ConfigError: the target's hidden states are not to be had here, or another dtype is asked for.
        """
        if source.target is None:
            raise ConfigError(
                "method is 'eagle3', which reads the target's hidden states, but another engine runs the target; "
                "expected a method that reads tokens only"
            )
        if source.config.dtype != "auto":
            raise ConfigError(
                f"dtype is {source.config.dtype!r} but method is 'eagle3', whose head has its target's; expected 'auto'"
            )
        self.weights: Eagle3Head = load_eagle3(
            source.checkpoint,
            source.target,
            revision=source.config.revision,
            quantization=source.config.quantization or source.quantization,
        )
        self.taps = self.weights.settings.states

    def drafter(self, arena: Arena, taps: Taps | None) -> Drafter:
        if taps is None:
            raise ConfigError("an EAGLE-3 head was given no hidden states; expected those of its target")
        return Eagle3Drafter(self.weights, arena, taps)


_LOADERS: Mapping[str, Callable[[Source], Loaded]] = {"draft_model": LoadedModel, "eagle3": LoadedEagle3}
"""Of the methods with a checkpoint."""


def load_drafter(source: Source) -> Loaded | None:
    """What the configured method drafts with; None if it needs nothing.

    Raises:
        CheckpointError, ConfigError: it cannot be had.
    """
    loader = _LOADERS.get(source.config.method)
    return None if loader is None else loader(source)


def build_proposers(
    config: SpeculativeConfig,
    drafter: Drafter | None,
    tables: BlockTables,
    sampler: SamplerState,
    *,
    probabilistic: bool,
) -> list[Proposer]:
    """In the order of ``Limits.proposers``: a model or head before the lookup beside it.

    Args:
        drafter: of the method, None if it needs none.
        probabilistic: draw drafts from the drafter's processed distribution; else take its most probable token.
    """
    proposers: list[Proposer] = []
    if drafter is not None:
        longest = min(drafter.max_position, config.max_model_len or drafter.max_position)
        proposers.append(
            AutoregressiveProposer(drafter, tables, sampler, max_length=longest, probabilistic=probabilistic)
        )
    if config.lookup is not None:
        proposers.append(NgramProposer(*config.lookup))
    return proposers
