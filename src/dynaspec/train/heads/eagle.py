"""EAGLE heads (Li et al., 2401.15077; 2503.01840): a decoder layer on the target's hidden states.

EAGLE guesses the target's next final state, of which the target's own output layer makes logits. It is trained like the
published ones, on both the states and the tokens, and like EAGLE-3 on several drafts in a row, as HASS (2408.15766)
first did. EAGLE-3 reads three hidden states and has an output layer of its own.

Rows of a training batch see each other by the training-time test's mask. At depth 0 all rows see each other causally.
At depth j a chain that started at row i sees the depth-0 keys up to row i and, of its own chain, the keys of depths
1 … j.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .basis import Basis
from .export import decoder_config, decoder_sizes, drafted_tokens, listed
from .head import Batch, Depth, Kind, TrainedHead, going_on, sample_chains
from .shape import DraftVocabulary, HeadShape, Start, aux_layers, read_start, shape_for

_FORMAT_VERSION = "0.9.0"
_HEAD_SCALE = 0.25
"""Of the target's output rows at the start: at 1 the loss begins far above that of a uniform guess, as untrained states
mean nothing to them."""


def _rotary_tables(shape: HeadShape) -> tuple[Tensor, Tensor]:
    """cos and sin [positions, head_dim], float32, for heads whose halves _rotate against each other."""
    frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim)
    angles = torch.arange(shape.positions, dtype=torch.float64)[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().float(), angles.sin().float()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn ``x`` [rows, heads, head_dim] by the angles of its rows (cos, sin: [rows, head_dim]); dtype of ``x``."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return torch.addcmul(x * cos[:, None], turned, sin[:, None]).to(x.dtype)


@dataclass(frozen=True, slots=True)
class _AttentionInputs:
    """What the chains ``alive`` [n] of ``batch`` attend with.

    ``queries`` [n, heads, head_dim]; ``keys`` and ``values`` [rows, kv_heads, head_dim] are of the texts, ``own_keys``
    and ``own_values``, [n, kv_heads, head_dim] for each depth, of the chains' own earlier drafts.
    """

    batch: Batch
    alive: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor
    own_keys: Sequence[Tensor]
    own_values: Sequence[Tensor]


def attend(given: _AttentionInputs) -> Tensor:
    """[n, heads · head_dim]."""
    # Padding costs a CPU arithmetic; a GPU does all conversations in as few kernels as one.
    return attend_padded(given) if given.queries.is_cuda else attend_each(given)


def attend_padded(given: _AttentionInputs) -> Tensor:
    """:func:`attend` for all conversations at once, padded to the longest."""
    batch, alive, queries, keys, values = given.batch, given.alive, given.queries, given.keys, given.values
    n, heads, width = queries.shape
    kv_heads, device, count = keys.shape[1], queries.device, len(batch.row_spans)
    begins = torch.tensor([begin for begin, _ in batch.row_spans], device=device)
    most_rows = max(end - begin for begin, end in batch.row_spans)
    most_chains = max(end - begin for begin, end in batch.chain_spans)
    # A row's position is its number in the conversation.
    of_row = torch.searchsorted(begins, torch.arange(len(keys), device=device), right=True) - 1
    row_slots = of_row * most_rows + batch.positions
    firsts = torch.tensor([begin for begin, _ in batch.chain_spans], device=device)
    of_chain = torch.searchsorted(firsts, alive, right=True) - 1
    slots = of_chain * most_chains + alive - firsts[of_chain]

    def padded(x: Tensor, places: Tensor, size: int) -> Tensor:
        out = x.new_zeros(count * size, *x.shape[1:]).index_copy(0, places, x)
        return out.view(count, size, *x.shape[1:])

    grouped = (queries * width**-0.5).view(n, kv_heads, heads // kv_heads, width)
    by_head = padded(grouped, slots, most_chains).permute(0, 2, 3, 1, 4).reshape(count * kv_heads, -1, width)
    keys_here = padded(keys, row_slots, most_rows).permute(0, 2, 3, 1).reshape(count * kv_heads, width, -1)
    values_here = padded(values, row_slots, most_rows).transpose(1, 2).reshape(count * kv_heads, -1, width)
    scores = torch.bmm(by_head, keys_here).view(count, kv_heads, -1, most_chains, most_rows)
    starts = padded(batch.chain_rows[alive] - begins[of_chain], slots, most_chains)
    unseen = torch.arange(most_rows, device=device) > starts[..., None]
    scores = scores.masked_fill(unseen[:, None, None], float("-inf"))
    depth = len(given.own_keys)
    if depth:
        own_keys = torch.stack(list(given.own_keys), dim=1)  # [n, depth, kv, d]
        own = (grouped[:, None] * own_keys[:, :, :, None]).sum(-1)  # [n, depth, kv, group]
        own_padded = padded(own.to(scores.dtype), slots, most_chains)
        scores = torch.cat([scores, own_padded.permute(0, 3, 4, 1, 2)], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    on_rows, on_own = weights.split_with_sizes([most_rows, depth], dim=-1)
    mixed = torch.bmm(on_rows.reshape(count * kv_heads, -1, most_rows).to(values.dtype), values_here)
    mixed = mixed.view(count, kv_heads, -1, most_chains, width).permute(0, 3, 1, 2, 4)
    mixed = mixed.reshape(count * most_chains, kv_heads, -1, width).index_select(0, slots)
    if depth:
        of_own = on_own.permute(0, 3, 4, 1, 2).reshape(count * most_chains, depth, kv_heads, -1).index_select(0, slots)
        mixed = mixed + (of_own[..., None] * torch.stack(list(given.own_values), dim=1)[:, :, :, None]).sum(1)
    return mixed.reshape(n, heads * width)


def attend_each(given: _AttentionInputs) -> Tensor:
    """:func:`attend` for one conversation after the other, as they differ in length."""
    batch, alive = given.batch, given.alive
    edges = torch.tensor([end for _, end in batch.chain_spans], device=alive.device)
    counts = torch.searchsorted(alive, edges).diff(prepend=edges.new_zeros(1)).tolist()
    lengths = [end - begin for begin, end in batch.row_spans]
    # Splits are undone by one concatenation in the backward pass; slices each by a tensor of zeros.
    keys_of, values_of = given.keys.split_with_sizes(lengths), given.values.split_with_sizes(lengths)
    starts, by_query = batch.chain_rows[alive].split_with_sizes(counts), given.queries.split_with_sizes(counts)
    by_key = [k.split_with_sizes(counts) for k in given.own_keys]
    by_value = [v.split_with_sizes(counts) for v in given.own_values]
    mixed = []
    for c, count in enumerate(counts):
        if count:
            first = batch.row_spans[c][0]
            mine, theirs = [k[c] for k in by_key], [v[c] for v in by_value]
            mixed.append(_attend_one(by_query[c], keys_of[c], values_of[c], mine, theirs, starts[c] - first))
    return torch.cat(mixed)


def _attend_one(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    own_keys: Sequence[Tensor],
    own_values: Sequence[Tensor],
    starts: Tensor,
) -> Tensor:
    """One conversation: queries [n, heads, d], keys and values [rows, kv_heads, d], own ones [n, kv_heads, d] each."""
    n, heads, width = queries.shape
    rows, kv_heads, _ = keys.shape
    grouped = (queries * width**-0.5).view(n, kv_heads, heads // kv_heads, width).permute(1, 2, 0, 3)
    by_head = grouped.reshape(kv_heads, -1, width)  # [kv, group · n, d]
    scores = torch.bmm(by_head, keys.permute(1, 2, 0)).view(kv_heads, -1, n, rows)
    unseen = torch.arange(rows, device=starts.device) > starts[:, None]
    scores = scores + torch.zeros_like(unseen, dtype=scores.dtype).masked_fill_(unseen, float("-inf"))
    depth = len(own_keys)
    if depth:
        keys_here = torch.stack(list(own_keys)).permute(2, 0, 1, 3)[:, None]  # [kv, 1, depth, n, d]
        own = (grouped[:, :, None] * keys_here).sum(-1)  # [kv, group, depth, n]
        scores = torch.cat([scores, own.transpose(2, 3)], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    on_rows, on_own = weights.split_with_sizes([rows, depth], dim=-1)
    mixed = torch.bmm(on_rows.reshape(kv_heads, -1, rows), values.transpose(0, 1)).view(kv_heads, -1, n, width)
    if depth:
        values_here = torch.stack(list(own_values)).permute(2, 0, 1, 3)[:, None]
        mixed = mixed + (on_own.transpose(2, 3)[..., None] * values_here).sum(2)
    return mixed.permute(2, 0, 1, 3).reshape(n, heads * width)


class _RMSNorm(nn.Module):
    """x / rms(x) · weight, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[…, width] to float32 of the same shape."""
        normed: Tensor = _Normalise.apply(x.float(), self._eps)  # type: ignore[no-untyped-call]
        return normed * self.weight


class _Normalise(torch.autograd.Function):
    """x / rms(x) in few passes over the memory: PyTorch's own takes a dozen on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        """[…, width] float32."""
        width = x.shape[-1]
        inverse = (torch.linalg.vecdot(x, x)[..., None] / width + eps).rsqrt_()
        normed: Tensor = x * inverse
        ctx.save_for_backward(normed, inverse)
        return normed

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        """The gradient loses its part along the output."""
        normed, inverse = ctx.saved_tensors
        along = torch.linalg.vecdot(upstream, normed)[..., None] / -normed.shape[-1]
        return torch.addcmul(upstream, normed, along).mul_(inverse), None


class _Attention(nn.Module):
    """Projections only; how rows see each other: ``attend``."""

    def __init__(self, shape: HeadShape, width: int) -> None:
        """``width`` is that of what it reads."""
        super().__init__()
        inner, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.k_proj = nn.Linear(width, kv, bias=False)
        self.v_proj = nn.Linear(width, kv, bias=False)
        self.o_proj = nn.Linear(inner, shape.hidden, bias=False)


class _Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    """A Llama decoder layer without the norms before its attention, which reads rows of ``width``."""

    def __init__(self, shape: HeadShape, width: int) -> None:
        super().__init__()
        self.self_attn = _Attention(shape, width)
        self.post_attention_layernorm = _RMSNorm(shape.hidden, shape.eps)
        self.mlp = _Mlp(shape)


class _DecoderHead(TrainedHead):
    """The layer, and what a kind of head has before and behind it; the embedding is the target's.

    The *state* is what a chain takes from one draft to the next, [rows, hidden].
    """

    fc: nn.Linear
    layers: nn.ModuleList

    def __init__(self, shape: HeadShape, ids: Tensor, embedding: Tensor, scale: Tensor) -> None:
        """``embedding`` is [vocab, hidden]; the rest is as in :class:`TrainedHead`."""
        super().__init__(ids, shape.vocab, scale)
        self.shape = shape
        self.register_buffer("embedding", embedding, persistent=False)
        cos, sin = _rotary_tables(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @property
    def layer(self) -> _Layer:
        layer = self.layers[0]
        assert isinstance(layer, _Layer)
        return layer

    @abstractmethod
    def fuse(self, states: Tensor) -> Tensor:
        """The target's hidden states [rows, states' width] to a chain's first state."""

    @abstractmethod
    def enter(self, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """For ``tokens`` [rows]: what the attention reads, [rows, width], and where the residual stream starts."""

    @abstractmethod
    def leave(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """From the residual stream behind the layer: what the output layer reads, and the next draft's state."""

    def unroll(self, batch: Batch, depths: int, share: float = 1.0, seed: int = 0) -> Iterator[Depth]:
        """See :class:`TrainedHead`: the training-time test.

        At depth 0 all rows have the target's own states. At depth j a chain that started at row i stands at position
        i + j and feeds on its own last output.
        """
        layer = self.layer
        attention = layer.self_attn
        alive = torch.arange(batch.chains, device=batch.aux.device)
        states = self.fuse(batch.aux.to(self.get_buffer("embedding").dtype))
        read, residual = self.enter(batch.next_tokens, states)
        cos, sin = self.get_buffer("cos"), self.get_buffer("sin")
        keys = _rotate(self._split(attention.k_proj(read)), cos[batch.positions], sin[batch.positions])
        values = self._split(attention.v_proj(read))

        rows, sampled = batch.chain_rows, sample_chains(batch, share, seed)
        read, residual = read[rows], residual[rows]
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        for depth in range(depths):
            at = batch.positions[rows[alive]] + depth
            queries = _rotate(self._split(attention.q_proj(read)), cos[at], sin[at])
            if depth:
                own_keys.append(_rotate(self._split(attention.k_proj(read)), cos[at], sin[at]))
                own_values.append(self._split(attention.v_proj(read)))
            given = _AttentionInputs(batch, alive, queries, keys, values, own_keys, own_values)
            x = residual + attention.o_proj(attend(given))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            output, state = self.leave(x)
            yield Depth(alive, output)

            stay = going_on(batch, alive, depth, sampled)
            if depth + 1 == depths or not bool(stay.any()):
                return
            alive = alive[stay]
            own_keys, own_values = [k[stay] for k in own_keys], [v[stay] for v in own_values]
            read, residual = self.enter(batch.next_tokens[rows[alive] + depth + 1], state[stay])

    def _split(self, x: Tensor) -> Tensor:
        """[rows, heads · head_dim] to [rows, heads, head_dim]."""
        return x.view(len(x), -1, self.shape.head_dim)

    @torch.no_grad()
    def initialise_layer(self, generator: torch.Generator) -> None:
        """Random matrices; the layer hardly changes the residual stream at first."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2 and name.startswith(("fc.", "layers.")):
                std = parameter.shape[1] ** -0.5
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    std *= 0.1
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)


class EagleHead(_DecoderHead):
    """Parameters have the names of the checkpoint.

    All that is trained is of size one: the embedding is divided by its root mean square, the residual stream by that
    of the target's final states, ``unit``, and what ``fc`` reads of these by that of each channel. The checkpoint's
    matrices have these factors folded in; behind a norm none is needed.
    """

    def __init__(self, shape: HeadShape, embedding: Tensor, output: Tensor, scale: Tensor, regression: float) -> None:
        """``output`` [vocab, hidden] is the target's; ``regression`` is the weight of the loss on states."""
        super().__init__(shape, torch.arange(shape.vocab), embedding, scale)
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.layers = nn.ModuleList([_Layer(shape, shape.hidden)])
        self.register_buffer("target_output", output, persistent=False)
        self.register_buffer("unit", scale.float().square().mean().sqrt(), persistent=False)
        self.register_buffer("embedding_size", embedding.float().square().mean().sqrt(), persistent=False)
        self._regression = regression

    @property
    def output(self) -> Tensor:
        """See :class:`TrainedHead`: frozen."""
        return self.get_buffer("target_output")

    def fuse(self, states: Tensor) -> Tensor:
        """See :class:`_DecoderHead`: there is only one."""
        return states

    def enter(self, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        embedded = nn.functional.embedding(tokens, self.get_buffer("embedding"))
        embedded = embedded / self.get_buffer("embedding_size").to(embedded.dtype)
        x: Tensor = self.fc(torch.cat([embedded, state.to(embedded.dtype)], dim=-1))
        return x, x

    def leave(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`_DecoderHead`: the guessed state is read as it is, and goes on as the target's own come."""
        guess = x * self.get_buffer("unit")
        return guess, guess / self.get_buffer("scale")

    def extra_loss(self, read: Tensor, states: Tensor) -> Tensor | None:
        """The smooth L1 distance of guessed states, in units of their size."""
        unit = self.get_buffer("unit")
        apart = nn.functional.smooth_l1_loss(read.float() / unit, states.float() / unit, reduction="none")
        return self._regression * apart.mean(-1)

    def folds(self) -> dict[str, Tensor]:
        unit, scale = self.get_buffer("unit"), self.get_buffer("scale")
        embedded = self.get_buffer("embedding_size").expand_as(scale)
        inward = {f"layers.0.self_attn.{name}_proj.weight": 1 / unit for name in "qkv"}
        outward = {f"layers.0.{name}.weight": unit for name in ("self_attn.o_proj", "mlp.down_proj")}
        return {"fc.weight": unit / torch.cat([embedded, scale]), **inward, **outward}


@torch.no_grad()
def _initialise_eagle(head: EagleHead, seed: int) -> None:
    """Start weights: the guess is the state that the head was given, and noise."""
    head.initialise_layer(torch.Generator().manual_seed(seed))
    head.fc.weight.mul_(0.3)
    head.fc.weight[:, -head.shape.hidden :] += torch.diag(head.get_buffer("scale") / head.get_buffer("unit"))


@dataclass(frozen=True, slots=True)
class Eagle(Kind):
    """See ``Kind``. ``regression`` is the weight of the loss on states beside that on tokens."""

    regression: float = 10.0
    method = "eagle"
    title = "EAGLE head"

    @property
    def options(self) -> dict[str, Any]:
        return {"regression": self.regression}

    def head(self, basis: Basis, seed: int) -> EagleHead:
        head = EagleHead(basis.shape, basis.embedding, basis.output, basis.scale, self.regression)
        _initialise_eagle(head, seed)
        return head

    def config(self, basis: Basis, verifier: str, architectures: list[str], drafts: int) -> dict[str, Any]:
        """See ``Kind``; the format is the authors'."""
        return {**decoder_config(basis.shape), "torch_dtype": "bfloat16", "bias": False}

    def described(self, facts: Mapping[str, Any]) -> str:
        return f"""last hidden state: {decoder_sizes(facts)} It guesses the next such state, and the target's output
        layer turns that into tokens. Format: the authors' (EAGLE-1, EAGLE-2), without a bias."""


class _Eagle3Layer(_Layer):
    """Its attention reads embedding and hidden state side by side."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__(shape, 2 * shape.hidden)
        self.input_layernorm = _RMSNorm(shape.hidden, shape.eps)
        # Nothing but projections reads it, so they can do its weight's work; and the embedding needs no gradient.
        self.input_layernorm.weight.requires_grad_(False)
        self.hidden_norm = _RMSNorm(shape.hidden, shape.eps)


class Eagle3Head(_DecoderHead):
    """Parameters have the names of the checkpoint."""

    def __init__(self, shape: HeadShape, vocabulary: DraftVocabulary, embedding: Tensor, scale: Tensor) -> None:
        super().__init__(shape, vocabulary.ids, embedding, scale)
        self.fc = nn.Linear(shape.aux_width, shape.hidden, bias=False)
        self.layers = nn.ModuleList([_Eagle3Layer(shape)])
        self.norm = _RMSNorm(shape.hidden, shape.eps)
        self.lm_head = nn.Linear(shape.hidden, shape.draft_vocab, bias=False)
        self._vocabulary = vocabulary

    @property
    def output(self) -> Tensor:
        return self.lm_head.weight

    def fuse(self, states: Tensor) -> Tensor:
        fused: Tensor = self.fc(states)
        return fused

    def enter(self, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.layers[0]
        assert isinstance(layer, _Eagle3Layer)
        hidden = layer.hidden_norm(state)
        embedded = nn.functional.embedding(tokens, self.get_buffer("embedding"))
        dtype = embedded.dtype
        both = torch.cat([layer.input_layernorm(embedded).to(dtype), hidden.to(dtype)], dim=-1)
        return both, hidden if self.shape.norm_before_residual else state

    def leave(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.norm(x), x

    def folds(self) -> dict[str, Tensor]:
        return {"fc.weight": 1 / self.get_buffer("scale")}

    def maps(self) -> dict[str, Tensor]:
        """``d2t`` and ``t2d``, unless everything can be drafted."""
        return {"d2t": self._vocabulary.d2t, "t2d": self._vocabulary.t2d} if self.partial else {}


@torch.no_grad()
def initialise_eagle3(head: Eagle3Head, target_head: Tensor, target_norm: Tensor | None, seed: int) -> None:
    """Start weights: the fused state is the latest of the target's plus noise, lm_head the target's.

    Args:
        target_head: [draft_vocab, hidden], the target's rows of the draft vocabulary.
        target_norm: [hidden], weight of the target's final norm, if it has one.
    """
    head.initialise_layer(torch.Generator().manual_seed(seed))
    late = head.get_buffer("scale")[-head.shape.hidden :]
    head.fc.weight.mul_(0.3)
    head.fc.weight[:, -head.shape.hidden :] += torch.diag(late / late.mean()).to(head.fc.weight)
    head.lm_head.weight.copy_(target_head.float() * _HEAD_SCALE)
    if target_norm is not None:
        head.norm.weight.copy_(target_norm.float())


@dataclass(frozen=True, slots=True)
class Eagle3(Kind):
    """See ``Kind``; the shape says what makes two runs differ. ``start_from`` is a head's folder or hub id."""

    norm_before_residual: bool = True
    start_from: str | None = None
    method = "eagle3"
    title = "EAGLE-3 head"

    def shape(self, config: Mapping[str, Any], draft_vocab: int, start: Start | None) -> HeadShape:
        residual = self.norm_before_residual if start is None else start.norm_before_residual
        return shape_for(config, draft_vocab, aux_layers(int(config["num_hidden_layers"])), residual)

    def start(self, config: Mapping[str, Any]) -> Start | None:
        if self.start_from is None:
            return None
        return read_start(self.start_from, int(config["num_hidden_layers"]), int(config["vocab_size"]))

    def head(self, basis: Basis, seed: int) -> Eagle3Head:
        head = Eagle3Head(basis.shape, basis.vocabulary, basis.embedding, basis.scale)
        initialise_eagle3(head, basis.output[basis.vocabulary.ids], basis.target_norm, seed)
        return head

    def config(self, basis: Basis, verifier: str, architectures: list[str], drafts: int) -> dict[str, Any]:
        """See ``Kind``; the format is that of ``speculators``."""
        shape = basis.shape
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": _FORMAT_VERSION,
            "torch_dtype": "bfloat16",
            "draft_vocab_size": shape.draft_vocab,
            "norm_before_residual": shape.norm_before_residual,
            "norm_before_fc": False,
            "fc_norm": False,
            "norm_output": False,
            "target_hidden_size": None,
            "eagle_aux_hidden_state_layer_ids": list(shape.aux_layers),
            "embed_requires_grad": False,
            "transformer_layer_config": decoder_config(shape),
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [
                    {
                        "proposal_type": "greedy",
                        "speculative_tokens": drafts,
                        "verifier_accept_k": 1,
                        "accept_tolerance": 0.0,
                    }
                ],
                "verifier": {"name_or_path": verifier, "architectures": architectures},
            },
        }

    def described(self, facts: Mapping[str, Any]) -> str:
        shape = facts["shape"]
        residual = "normalised" if shape["norm_before_residual"] else "fused"
        return f"""hidden states (inputs of layers {listed(shape["aux_layers"])}): {decoder_sizes(facts)} The residual
        stream starts from the {residual} state. {drafted_tokens(facts)} Format: `speculators` (`eagle3`)."""
