"""What a head looks like, read off its target where nothing is said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dynaspec.contract.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Sizes of a head, whose decoder layer is the target's own.

    ``aux_layers`` are the hidden states that it reads: k names the residual stream that enters the target's layer k;
    one more than there are layers, the state after the final norm. ``norm_before_residual`` is EAGLE-3's.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    draft_vocab: int
    aux_layers: tuple[int, ...]
    rope_theta: float = 10000.0
    eps: float = 1e-5
    positions: int = 2048
    norm_before_residual: bool = True

    def __post_init__(self) -> None:
        if self.draft_vocab > self.vocab:
            raise ConfigError(f"draft_vocab: got {self.draft_vocab}, expected at most the target's {self.vocab}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"heads: got {self.heads} over {self.kv_heads} KV heads, expected a multiple")

    @property
    def aux_width(self) -> int:
        """Width of the hidden states that the head is fed with."""
        return len(self.aux_layers) * self.hidden

    def as_facts(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "aux_layers": list(self.aux_layers)}


def aux_layers(layers: int) -> tuple[int, int, int]:
    """The layers whose input EAGLE-3 taps: an early one, the middle, a late one.

    Raises:
        ConfigError: the target is too shallow.
    """
    if layers < 4:
        raise ConfigError(f"target: got {layers} layers, expected at least 4 to take hidden states from")
    return (2, layers // 2, layers - 3) if layers > 6 else (1, layers // 2, layers - 1)


def shape_for(
    config: Mapping[str, Any],
    draft_vocab: int,
    layers: tuple[int, ...] | None = None,
    norm_before_residual: bool = True,
) -> HeadShape:
    """The head for a target with Hugging Face's ``config`` (its ``to_dict()``); layer sizes are the target's own.

    Without ``layers``, it reads the state after the final norm.

    Raises:
        ConfigError: the configuration lacks a size.
    """
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        theta = config.get("rope_theta") or rope.get("rope_theta") or 10000.0
        return HeadShape(
            hidden=hidden,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            intermediate=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
            draft_vocab=draft_vocab,
            aux_layers=(int(config["num_hidden_layers"]) + 1,) if layers is None else layers,
            rope_theta=float(theta),
            eps=float(config.get("rms_norm_eps") or 1e-5),
            positions=int(config.get("max_position_embeddings") or 2048),
            norm_before_residual=norm_before_residual,
        )
    except KeyError as error:
        raise ConfigError(f"target: got a config.json without {error}, expected a decoder's sizes") from error
