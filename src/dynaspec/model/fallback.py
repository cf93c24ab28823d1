"""Architectures that have no family file: Transformers' own modelling code, with our paged KV behind it.

The rows of all sequences go through the model as one text; only attention, which is ours, tells them apart. At load
time the model is checked against its own attention on a short text, which finds architectures that mix tokens
elsewhere too (recurrences, convolutions) or keep attention to themselves.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dynaspec.contract.errors import CheckpointError, ConfigError

from .attention import attention_backend
from .attention.base import KV, AttentionBackend, AttentionMeta, AttentionSpec, Shape, bytes_per_block
from .batch import BLOCK_SIZE, ForwardBatch
from .compiled import CompiledDecoder
from .config import DecoderConfig
from .families.common import length
from .linear import Linear, LinearFactory
from .taps import Taps

_PROBE_TOKENS = 24
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest difference of probe logits, as a share of the largest logit."""
_serial = itertools.count()

Attend = Callable[..., tuple[torch.Tensor, None]]


@dataclass(slots=True)
class _Pass:
    """What the attention function needs of the pass that is running."""

    meta: AttentionMeta
    kv: Sequence[KV]
    taps: Taps | None


class FallbackModel:
    """See ``Model``. Not safe to run from several threads at a time."""

    def __init__(
        self, inner: Any, config: DecoderConfig, attention: AttentionBackend, product_dtype: torch.dtype
    ) -> None:
        self.config = config
        self.device: torch.device = inner.device
        self.dtype: torch.dtype = inner.dtype
        self.product_dtype = product_dtype
        self._attention = attention
        self._running: _Pass | None = None
        self.kv_bytes_per_block = bytes_per_block(attention, config.num_layers, self.dtype)
        self.compiled: CompiledDecoder | None = None
        self._inner = inner
        self._head = _head_of(inner)
        inner.set_attn_implementation(_register(self))
        for index, layer in enumerate(_layers_of(inner, config.num_layers)):
            layer.register_forward_pre_hook(_tap(weakref.ref(self), index), with_kwargs=True)
            last = layer
        last.register_forward_hook(_tap_after(weakref.ref(self), config.num_layers))

    def kv_shapes(self, num_blocks: int) -> tuple[Shape, Shape]:
        """See ``Model``."""
        return self._attention.kv_shape(num_blocks)

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, kv: Sequence[KV], taps: Taps | None = None) -> torch.Tensor:
        """See ``Model``."""
        running = _Pass(self._attention.prepare(batch), kv, taps)
        self._running = running
        try:
            out = self._inner.base_model(
                input_ids=batch.tokens[None], position_ids=running.meta.positions[None], use_cache=False
            )
        finally:
            self._running = None
        hidden: torch.Tensor = out.last_hidden_state[0]
        if taps is not None:
            taps.keep(self.config.num_layers + 1, hidden, running.meta.slots)
        return batch.without_kv_only(hidden)

    def move_kv(self, kv: Sequence[KV], source: torch.Tensor, target: torch.Tensor) -> None:
        """See ``Model``."""
        for layer in kv:
            self._attention.move(layer, source, target)

    @torch.no_grad()
    def repeat(self, batch: ForwardBatch, kv: Sequence[KV], passes: int) -> None:
        """See ``Model``."""
        for _ in range(passes):
            self.logits(self.forward(batch, kv))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``Model``."""
        logits: torch.Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0].float()

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """Attention as Transformers calls it: query [1, heads, R, head_dim] → [1, R, heads, head_dim]."""
        running = self._running
        if running is None:
            raise RuntimeError("attention was called outside of a pass")
        q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
        kv = running.kv[_layer_index(module)]
        out = self._attention.attend(q, k, v, kv, running.meta, kwargs.get("sliding_window"))
        return out.view(1, *q.shape), None

    @property
    def embedding(self) -> torch.Tensor:
        """See ``Model``."""
        table: torch.Tensor = self._inner.get_input_embeddings().weight.detach()
        return table

    @property
    def head(self) -> Linear:
        """See ``Model``."""
        return self.logits

    def keep_tap(self, state: int, hidden: torch.Tensor) -> None:
        """Keeps a hidden state [1, R, hidden], if the pass wants it."""
        running = self._running
        if running is not None and running.taps is not None:
            running.taps.keep(state, hidden[0], running.meta.slots)


class _PackedModule(nn.Module):
    """A linear layer of ours in the place of one of PyTorch's."""

    def __init__(self, linear: Linear, out: int) -> None:
        super().__init__()
        self._linear, self._out = linear, out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self._out)


class _GivenHidden(nn.Module):
    """Stands in for the body of a model whose head alone is wanted."""

    @property
    def decoder(self) -> nn.Module:
        """Some architectures call the body's decoder, past the body."""
        return self

    def forward(self, inputs_embeds: torch.Tensor, **_: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPast

        return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)


def load_fallback(
    directory: Path,
    hf: Any,
    device: torch.device,
    dtype: torch.dtype,
    product_dtype: torch.dtype,
    max_model_len: int | None,
    end_tokens: tuple[int, ...],
    trust_remote_code: bool,
) -> FallbackModel:
    """Loads any decoder whose attention goes through Transformers' attention interface.

    Args:
        dtype, product_dtype: see ``Model``.
        end_tokens: see ``DecoderConfig.eos_token_ids``.

    Raises:
        CheckpointError: Transformers cannot load it, or it cannot be driven with paged KV.
    """
    kind = getattr(hf, "model_type", "unknown")
    inner = _load(directory, device, dtype, trust_remote_code)
    try:
        spec = _probe_spec(inner)
        config = _describe(inner.config, spec, length(inner.config.max_position_embeddings, max_model_len), end_tokens)
        tokens = torch.randint(config.vocab_size, (_PROBE_TOKENS,), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            expected = inner(tokens[None].to(device), use_cache=False).logits[0].float()
        _pack_linear_layers(inner, product_dtype)
        model = FallbackModel(inner, config, attention_backend(spec, device, dtype), product_dtype)
        difference = (_probe_logits(model, tokens) - expected).abs().max() / expected.abs().max()
    except ConfigError:
        raise
    except (_NotDrivableError, AttributeError, TypeError, ValueError, RuntimeError, IndexError) as error:
        raise CheckpointError(f"model_type {kind} cannot be run with a paged KV cache: {error}") from error
    if not difference <= _TOLERANCE[product_dtype]:
        raise CheckpointError(
            f"model_type {kind} cannot be run with a paged KV cache: its logits differ by {float(difference):.2g} of "
            "the largest from its own implementation's, so it mixes tokens in other ways than attention"
        )
    return model


class _NotDrivableError(Exception):
    """The architecture does not fit; the message says why."""


def _load(directory: Path, device: torch.device, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            attn_implementation="eager",
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # Transformers raises nearly anything
        raise CheckpointError(f"Transformers cannot load {directory} as a causal language model: {error}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise CheckpointError(f"{directory} lacks {len(missing)} tensors that its config needs, such as {missing[0]}")
    named = model.config.architectures[0]
    if type(model).__name__ != named:
        raise CheckpointError(f"{directory} is a {named}; expected a causal language model")
    return model.to(device).eval()


def _probe_spec(inner: Any) -> AttentionSpec:
    """Runs one token and reads off what the model asks of attention."""
    seen: list[tuple[AttentionSpec, int]] = []

    def record(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kw: Any
    ) -> Any:
        if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
            raise _NotDrivableError("its queries, keys and values differ in head size")
        if kw.get("s_aux") is not None or kw.get("position_bias") is not None:
            raise _NotDrivableError("it adds sinks or biases to its attention scores")
        scale = kw.get("scaling") or query.shape[-1] ** -0.5
        spec = AttentionSpec(query.shape[1], key.shape[1], query.shape[-1], float(scale), kw.get("softcap"))
        seen.append((spec, _layer_index(module)))
        return torch.zeros_like(query).transpose(1, 2), None

    rope = getattr(inner.config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        raise _NotDrivableError(f"its rotary scaling {rope['rope_type']!r} changes with the length of the text")
    name = _register_function(record)
    before = inner.config._attn_implementation
    inner.set_attn_implementation(name)
    with torch.no_grad():
        inner(torch.zeros(1, 1, dtype=torch.int64, device=inner.device), use_cache=False)
    inner.set_attn_implementation(before)
    if sorted(index for _, index in seen) != list(range(inner.config.num_hidden_layers)):
        raise _NotDrivableError("not every layer uses Transformers' attention interface exactly once")
    if len({spec for spec, _ in seen}) != 1:
        raise _NotDrivableError("its layers differ in their heads or attention scale")
    return seen[0][0]


def _probe_logits(model: FallbackModel, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of a text that is run in two passes, beside a second text."""
    half, blocks = len(tokens) // 2, -(-len(tokens) // BLOCK_SIZE)
    shapes = model.kv_shapes(2 * blocks)
    kv = [
        (torch.zeros(shapes[0], dtype=model.dtype, device=model.device),
         torch.zeros(shapes[1], dtype=model.dtype, device=model.device))
        for _ in range(model.config.num_layers)
    ]  # fmt: skip
    found = []
    for first, end in ((0, half), (half, len(tokens))):
        at = np.arange(first, end)
        batch = ForwardBatch(
            tokens=torch.cat([tokens[first:end], tokens[first:end].flip(0)]).to(model.device),
            positions=np.concatenate([at, at]),
            slots=np.concatenate([at, at + blocks * BLOCK_SIZE]),
            query_start=np.array([0, end - first, 2 * (end - first)], np.int32),
            context_lens=np.array([first, first], np.int32),
            block_tables=np.arange(2 * blocks, dtype=np.int32).reshape(2, blocks),
        )
        hidden = model.forward(batch, kv)
        found.append(model.logits(hidden[: end - first]))
    return torch.cat(found)


def _describe(hf: Any, spec: AttentionSpec, max_position: int, end_tokens: tuple[int, ...]) -> DecoderConfig:
    return DecoderConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        vocab_size=hf.vocab_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=getattr(hf, "intermediate_size", None) or 4 * hf.hidden_size,
        max_position=max_position,
        attention_scale=spec.scale,
        attention_softcap=spec.softcap,
        tied_embeddings=bool(getattr(hf, "tie_word_embeddings", False)),
        eos_token_ids=end_tokens,
    )


def _pack_linear_layers(inner: Any, product_dtype: torch.dtype) -> None:
    """Replaces nn.Linear on CPU, where ours are faster and do not depend on the number of rows."""
    if inner.device.type != "cpu" or inner.dtype != torch.float32:
        return
    factory = LinearFactory(inner.device, inner.dtype, product_dtype)
    for parent in list(inner.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                bias = None if child.bias is None else child.bias.detach()
                setattr(parent, name, _PackedModule(factory(child.weight.detach(), bias), child.out_features))


def _head_of(inner: Any) -> Any:
    """The model with its body cut out: maps final hidden states to logits with all that the head does."""
    head = copy.copy(inner)
    head._modules = dict(inner._modules)
    head._modules[inner.base_model_prefix] = _GivenHidden()
    return head


def _layers_of(inner: Any, count: int) -> nn.ModuleList:
    lists = (child for child in inner.base_model.modules() if isinstance(child, nn.ModuleList))
    found = next((layers for layers in lists if len(layers) == count), None)
    if found is None:
        raise _NotDrivableError("its body has no list of layers")
    return found


def _layer_index(module: nn.Module) -> int:
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise _NotDrivableError(f"{type(module).__name__} does not know which layer it is")
    return index


def _tap(model: weakref.ref[FallbackModel], state: int) -> Callable[[nn.Module, Any, Any], None]:
    """Before a layer: what enters it."""

    def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        owner = model()
        if owner is not None:
            owner.keep_tap(state, args[0] if args else kwargs["hidden_states"])

    return hook


def _tap_after(model: weakref.ref[FallbackModel], state: int) -> Callable[[nn.Module, Any, Any], None]:
    """After the last layer: what leaves it."""

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        owner = model()
        if owner is not None:
            owner.keep_tap(state, output[0] if isinstance(output, tuple) else output)

    return hook


def _register(model: FallbackModel) -> str:
    """Makes the model's attention known to Transformers, without keeping the model alive."""
    method = weakref.WeakMethod(model.attend)

    def attend(*args: Any, **kwargs: Any) -> Any:
        bound = method()
        if bound is None:
            raise RuntimeError("the model that owns this attention is gone")
        return bound(*args, **kwargs)

    return _register_function(attend)


def _register_function(function: Attend) -> str:
    from transformers import AttentionInterface

    name = f"dynaspec_{next(_serial)}"
    AttentionInterface.register(name, function)
    return name
