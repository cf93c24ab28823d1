"""From a method's name to its proposer: what ``contract.methods`` lists, built.

A new method is an entry there, one here, and a file beside this one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.methods import METHODS
from dynaspec.contract.proposer import Proposer
from dynaspec.control.config import SpeculativeConfig
from dynaspec.control.resolve import DEFAULT_LOOKBEHIND, UPPER_BOUND_POLICIES
from dynaspec.kv.blocks import Arena, BlockTables
from dynaspec.model.attention.base import Shape
from dynaspec.model.config import DecoderConfig
from dynaspec.model.decoder import Decoder, Model
from dynaspec.model.decoder_heads import load_head
from dynaspec.model.linear import Quantization
from dynaspec.model.state_heads.base import StateHeads
from dynaspec.model.state_heads.medusa import load_medusa
from dynaspec.model.state_heads.mlp_speculator import load_mlp_speculator
from dynaspec.model.taps import Taps
from dynaspec.sampling.state import SamplerState

from .autoregressive import AutoregressiveProposer
from .drafter import DecoderHeadDrafter, Drafter, DraftModel
from .ngram import NgramProposer
from .own_vocabulary import OwnTexts, TextTokenizer, Translation
from .state_heads import StateHeadsDrafter, StateHeadsProposer
from .suffix import SuffixProposer

_LONGEST_OWN = 4
"""Own tokens for each of the target's, at most, that a drafter's longest text has room for."""


class Weights(Protocol):
    """What has been loaded to draft with, and the KV that it needs."""

    config: DecoderConfig
    dtype: torch.dtype
    device: torch.device
    kv_bytes_per_block: int

    def kv_shapes(self, num_blocks: int) -> tuple[Shape, Shape]: ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """A method's weights. KV is sized by what all models need, so they are loaded before there is any."""

    weights: Weights | None
    """What keeps KV of its own; None = nothing does."""
    taps: tuple[int, ...]
    """Hidden states of the target that it reads, see ``model.taps``."""
    drafter: Callable[[Arena, Taps | None], Drafter | StateHeadsDrafter]
    """Makes the drafter. It takes the arena of the KV of ``weights``, the target's where there are none; and where the
    target keeps ``taps``, None if it reads none."""


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
    target_checkpoint: tuple[str, str | None] | None = None
    """Where the target was loaded from, and which revision."""
    quantization: Quantization | None = None
    """The target's."""
    tokenizer: TextTokenizer | None = None
    """The target's; None where somebody else has it."""
    load_tokenizer: Callable[..., TextTokenizer] | None = None
    """Of a checkpoint, by ``revision``."""

    @property
    def drafters_quantization(self) -> Quantization | None:
        """The target's, where the configuration names none."""
        return self.config.quantization or self.quantization

    @property
    def checkpoint(self) -> str:
        """
        Raises:
            ConfigError: there is none.
        """
        return self._place[0]

    @property
    def revision(self) -> str | None:
        """Of ``checkpoint``."""
        return self._place[1]

    @property
    def _place(self) -> tuple[str, str | None]:
        if self.config.model is not None:
            return self.config.model, self.config.revision
        if self.target_checkpoint is None or not METHODS[self.config.method].in_target:
            raise ConfigError(f"method is {self.config.method!r} but no model is given; expected its checkpoint")
        return self.target_checkpoint


def _load_model(source: Source) -> Loaded:
    """A draft model.

    Raises:
        CheckpointError: see ``load_model``.
        ConfigError: its vocabulary is not the target's.
    """
    config = source.config
    model = source.load(
        source.checkpoint,
        revision=config.revision,
        dtype=source.dtype if config.dtype == "auto" else config.dtype,
        device=source.device,
        trust_remote_code=source.trust_remote_code,
        quantization=source.drafters_quantization,
    )
    found = model.config.vocab_size
    translation = _translation(source, found) if config.use_heterogeneous_vocab else None
    if found != source.vocab_size and translation is None:
        raise ConfigError(
            f"the drafter {source.checkpoint!r} has a vocabulary of {found} tokens but "
            f"{source.target_name} has {source.vocab_size}; expected a drafter with the target's vocabulary, or "
            "use_heterogeneous_vocab, which has it draft in its own"
        )
    return Loaded(model, (), lambda arena, taps: DraftModel(model, arena, translation=translation))


def _translation(source: Source, own_size: int) -> Translation | None:
    """Of a draft model with so many tokens of its own; None if its tokenizer is the target's.

    Raises:
        CheckpointError: it has no tokenizer.
        ConfigError: the target's is not to be had here; see ``Translation.between``.
    """
    config, target = source.config, source.tokenizer
    if target is None or source.load_tokenizer is None:
        raise ConfigError(
            f"use_heterogeneous_vocab is {config.use_heterogeneous_vocab!r}, but another engine has the target's "
            "tokenizer; expected false, or a drafter of that engine's"
        )
    own = source.load_tokenizer(source.checkpoint, revision=source.revision)
    if own_size == source.vocab_size and own.spellings() == target.spellings():
        return None
    return Translation.between(
        own,
        target,
        own_size,
        source.vocab_size,
        names=(f"the drafter {source.checkpoint!r}", source.target_name),
        any_tokens=config.use_heterogeneous_vocab == "slem",
        own_lookbehind=config.assistant_lookbehind or DEFAULT_LOOKBEHIND,
        target_lookbehind=config.target_lookbehind or DEFAULT_LOOKBEHIND,
    )


def _load_early_exit(source: Source) -> Loaded:
    """The target's first layers, on the target's KV.

    Raises:
        ConfigError: the target has not so many layers, or cannot be run in part.
    """
    target, layers = source.target, source.config.assistant_early_exit or 0
    traits = METHODS[source.config.method].traits
    if not isinstance(target, Decoder):
        raise ConfigError(
            f"method is {source.config.method!r} but {source.target_name} does not run on this engine's own layers"
            "; expected a model of a supported family"
        )
    if layers >= target.config.num_layers:
        raise ConfigError(
            f"assistant_early_exit is {layers} but {source.target_name} has {target.config.num_layers} layers; "
            "expected fewer than that"
        )
    model = target.first_layers(layers)

    def drafter(arena: Arena, taps: Taps | None) -> Drafter:
        own = Arena(arena.layers[: model.config.num_layers])
        return DraftModel(model, own, traits=traits, targets_kv=True)

    return Loaded(None, (), drafter)


def _load_decoder_head(source: Source) -> Loaded:
    """A head of decoder layers.

    Raises:
        CheckpointError: see ``load_head``.
        ConfigError: see ``_target_of``.
    """
    target, method = _target_of(source), source.config.method
    head = load_head(
        method, source.checkpoint, target, revision=source.revision, quantization=source.drafters_quantization
    )
    states = head.settings.states
    return Loaded(head, states, lambda arena, taps: DecoderHeadDrafter(head, arena, _given(taps), method))


def _load_state_heads(source: Source, load: Callable[..., StateHeads]) -> Loaded:
    """Heads that keep no KV and read the target's state after the final norm.

    Args:
        load: as ``load_medusa``.

    Raises:
        CheckpointError: see there.
        ConfigError: see ``_target_of``; or longer drafts are asked for than there are heads.
    """
    target, config = _target_of(source), source.config
    heads = load(source.checkpoint, target, revision=source.revision, quantization=source.drafters_quantization)
    asked, longest = config.num_speculative_tokens, heads.longest
    if asked > longest and config.policy not in UPPER_BOUND_POLICIES:
        raise ConfigError(
            f"num_speculative_tokens is {asked} and policy is {config.policy!r}, but {source.checkpoint!r} has "
            f"{longest} heads, each for a token; expected at most {longest}"
        )
    traits, after_norm = METHODS[config.method].traits, (target.config.num_layers + 1,)
    return Loaded(None, after_norm, lambda arena, taps: StateHeadsDrafter(heads, traits, _given(taps)))


def _target_of(source: Source) -> Model:
    """The target, whose hidden states the method reads.

    Raises:
        ConfigError: they are not to be had here, or another dtype is asked for.
    """
    if source.target is None:
        raise ConfigError(
            f"method is {source.config.method!r}, which reads the target's hidden states, but another engine runs the "
            "target; expected a method that reads tokens only"
        )
    if source.config.dtype != "auto":
        raise ConfigError(
            f"dtype is {source.config.dtype!r} but method is {source.config.method!r}, whose head has its target's; "
            "expected 'auto'"
        )
    return source.target


def _given(taps: Taps | None) -> Taps:
    if taps is None:
        raise ConfigError("a head was given no hidden states; expected those of its target")
    return taps


_LOADERS: Mapping[str, Callable[[Source], Loaded]] = {
    "draft_model": _load_model,
    "early_exit": _load_early_exit,
    "eagle": _load_decoder_head,
    "eagle3": _load_decoder_head,
    "medusa": partial(_load_state_heads, load=load_medusa),
    "mlp_speculator": partial(_load_state_heads, load=load_mlp_speculator),
    "mtp": _load_decoder_head,
}
"""Of the methods that draft by passes."""


def load_drafter(source: Source) -> Loaded | None:
    """What the configured method drafts with; None if it needs nothing.

    Raises:
        CheckpointError, ConfigError: it cannot be had.
    """
    loader = _LOADERS.get(source.config.method)
    return None if loader is None else loader(source)


def build_proposers(
    config: SpeculativeConfig,
    drafter: Drafter | StateHeadsDrafter | None,
    tables: BlockTables,
    sampler: SamplerState,
    *,
    probabilistic: bool,
) -> list[Proposer]:
    """In the order of ``Limits.proposers``: a model or head before the lookups beside it.

    Args:
        drafter: of the method, None if it needs none.
        probabilistic: draw drafts from the drafter's processed distribution; else take its most probable token.
    """
    proposers: list[Proposer] = []
    if isinstance(drafter, StateHeadsDrafter):
        most = config.max_model_len
        proposers.append(StateHeadsProposer(drafter, tables, sampler, max_length=most, probabilistic=probabilistic))
    elif drafter is not None:
        longest = min(drafter.max_position, config.max_model_len or drafter.max_position)
        texts = _own_texts(drafter, tables, longest)
        proposers.append(
            AutoregressiveProposer(
                drafter, tables, sampler, max_length=longest, probabilistic=probabilistic, texts=texts
            )
        )
    if config.lookup is not None:
        proposers.append(NgramProposer(*config.lookup))
    if config.suffix is not None:
        proposers.append(SuffixProposer(config.suffix, config.longest_draft))
    return proposers


def _own_texts(drafter: Drafter, tables: BlockTables, longest: int) -> OwnTexts | None:
    """Of a drafter that reads tokens of its own; ``longest`` = most of them in a text."""
    if drafter.translation is None:
        return None
    lanes, blocks = tables.array.shape
    room = min(longest, _LONGEST_OWN * blocks * tables.block_size)
    return OwnTexts(drafter.translation, lanes, tables.pool.num_blocks, tables.block_size, room, caching=tables.caching)
