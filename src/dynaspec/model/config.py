"""One decoder, described by data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NormKind = Literal["rms", "rms_plus_one", "layer"]
"""``rms_plus_one``: the stored weight is an offset from 1 (Gemma)."""
MlpKind = Literal["gated_silu", "gated_gelu_tanh", "relu", "gelu", "gelu_tanh"]
"""``gated_*``: act(gate) · up, otherwise act(up)."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (RoFormer, 2104.09864)."""

    dim: int
    """Leading dimensions of a head that are rotated."""
    inv_freq: tuple[float, ...]
    """[dim / 2] radians a position, scaling applied."""
    interleaved: bool = False
    """Pairs are (2i, 2i + 1) as in GPT-J; otherwise (i, i + dim / 2)."""
    amplitude: float = 1.0
    """Multiplies sine and cosine (LongRoPE, YaRN)."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder-only Transformer. Shapes, and which of the field's variants each part is."""

    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int
    """Positions the model was made for: the longest context."""
    norm: NormKind = "rms"
    norm_eps: float = 1e-6
    mlp: MlpKind = "gated_silu"
    rope: RopeConfig | None = None
    local_rope: RopeConfig | None = None
    """Of layers with a sliding window, where they have another one (Gemma 3); rotates as many dimensions."""
    learned_positions: int = 0
    """Rows of the learned position embedding; 0 = none."""
    qk_norm: bool = False
    """RMS norm of each query and key head before rotation (Qwen3)."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    parallel_residual: bool = False
    """Attention and MLP both read the layer's input (GPT-J, GPT-NeoX)."""
    windows: tuple[int | None, ...] = ()
    """Sliding window of each layer, None = full attention; empty: full attention in all."""
    attention_scale: float | None = None
    """Multiplies q·k; None = 1 / √head_dim."""
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    embedding_scale: float = 1.0
    tied_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Widths of queries, keys and values."""
        return self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim, self.num_kv_heads * self.head_dim

    @property
    def gated(self) -> bool:
        return self.mlp.startswith("gated")

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer."""
        return self.windows[layer] if self.windows else None
