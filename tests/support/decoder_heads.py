"""Random heads in every published layout, and a plain reference of what they compute."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from dynaspec.model.decoder import Model
from dynaspec.model.decoder_heads import load_head
from dynaspec.model.decoder_heads.head import Head
from dynaspec.model.loader import load_model
from dynaspec.propose.autoregressive import AutoregressiveProposer

from .head_passes import logits_of, states_of

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """A head's, and its target's."""

    hidden: int = 32
    target_hidden: int = 32
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    inner: int = 40
    vocab: int = 50
    draft_vocab: int = 20
    states: tuple[int, ...] = (0, 1, 2)
    layers: int = 1
    positions: int = 64


@dataclass(frozen=True)
class Layout:
    """How one project writes a head."""

    name: str
    method: str
    config: dict[str, Any] = field(default_factory=dict)
    """On top of what all have."""
    shape: Shape = field(default_factory=Shape)
    prefix: str = ""
    layer: str = "layers.0."
    nested: bool = False
    """The decoder's part of the config is one of its own, as in ``speculators``."""
    pickled: bool = False
    own_embedding: bool = False
    own_head: bool = True
    qk_norm: bool = False
    bias: bool = False
    state_norms: bool = False
    input_norm: bool = False
    projection_bias: bool = False
    entrance_norms: bool = False
    """Before the projection, under HASS's names."""
    hidden_first: bool = False
    zero_first: bool = False
    says_so: bool = True
    """Its config.json tells the method."""


_IDS = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
EAGLE3 = (
    Layout("original", "eagle3", {"architectures": ["LlamaForCausalLM"], **_IDS}, layer="midlayer.", pickled=True),
    Layout(
        "sglang", "eagle3", {"architectures": ["LlamaForCausalLMEagle3"], **_IDS}, layer="midlayer.", prefix="model."
    ),
    Layout(
        "modelopt",
        "eagle3",
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [-1, 0, 1],
                "use_aux_hidden_state": True,
                "use_input_layernorm_in_first_layer": True,
                "use_last_layernorm": True,
                "use_mtp_layernorm": False,
                "next_layer_regular": True,
                "parallel_draft_step": 1,
            },
        },
        layer="midlayer.",
    ),
    Layout(
        "angelslim",
        "eagle3",
        {"architectures": ["Eagle3LlamaForCausalLM"], **_IDS},
        layer="midlayer.",
        own_embedding=True,
    ),
    Layout(
        "speculators",
        "eagle3",
        {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "norm_before_residual": True,
            **_IDS,
        },
        nested=True,
    ),
    Layout(
        "speculators, other width",
        "eagle3",
        {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "target_hidden_size": 32, **_IDS},
        Shape(hidden=48, heads=3),
        nested=True,
        own_embedding=True,
    ),
    Layout(
        "eagle 3.1",
        "eagle3",
        {"architectures": ["Eagle3Speculator"], "norm_output": True, "fc_norm": True, **_IDS},
        nested=True,
        state_norms=True,
    ),
    Layout(
        "norm before fusion",
        "eagle3",
        {"architectures": ["Eagle3Speculator"], "norm_before_fc": True, "norm_before_residual": True, **_IDS},
        nested=True,
        input_norm=True,
    ),
    Layout(
        "deepspec",
        "eagle3",
        {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [-1, 1]},
        Shape(draft_vocab=50, states=(0, 2)),
        own_head=False,
        qk_norm=True,
    ),
    Layout(
        "biases", "eagle3", {"architectures": ["LlamaForCausalLMEagle3"], "attention_bias": True, **_IDS}, bias=True
    ),
    Layout(
        "final state only",
        "eagle3",
        {"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {"use_aux_hidden_state": False}},
        Shape(states=(3,)),
    ),
    Layout("two layers", "eagle3", {"architectures": ["LlamaForCausalLMEagle3"], **_IDS}, Shape(layers=2)),
)
_WHOLE = Shape(draft_vocab=50, states=(3,))
_LLAMA = {"architectures": ["LlamaForCausalLM"]}
EAGLE = (
    Layout("eagle", "eagle", _LLAMA | {"bias": False}, _WHOLE, pickled=True, own_head=False),
    Layout(
        "eagle, biases by default",
        "eagle",
        _LLAMA | {"qkv_bias": True},
        _WHOLE,
        own_head=False,
        own_embedding=True,
        bias=True,
        projection_bias=True,
        says_so=False,
    ),
    Layout(
        "eagle, bias",
        "eagle",
        _LLAMA | {"bias": True, "rope_scaling": None},
        _WHOLE,
        own_head=False,
        projection_bias=True,
    ),
    Layout("eagle, vllm", "eagle", {"architectures": ["EagleLlamaForCausalLM"]}, _WHOLE, own_head=False),
    Layout(
        "eagle, hass",
        "eagle",
        _LLAMA | {"bias": False, "add_para_norm": True},
        _WHOLE,
        own_head=False,
        entrance_norms=True,
    ),
    Layout(
        "eagle, two layers", "eagle", _LLAMA | {"bias": False}, replace(_WHOLE, layers=2), own_head=False, says_so=False
    ),
)
MTP = (
    Layout(
        "mimo",
        "mtp",
        {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1},
        _WHOLE,
        prefix="model.",
        own_head=False,
        bias=True,
        hidden_first=True,
        zero_first=True,
        says_so=False,
    ),
    Layout(
        "speculators, mtp",
        "mtp",
        {
            "architectures": ["MTPDraftModel"],
            "speculators_model_type": "mtp",
            "num_nextn_predict_layers": 1,
        },
        _WHOLE,
        nested=True,
        own_head=False,
        qk_norm=True,
    ),
)
LAYOUTS = (*EAGLE3, *EAGLE, *MTP)


def random_tensors(layout: Layout, seed: int = 0) -> Tensors:
    """Under bare names, those of ``speculators`` where it has the kind: float32 values that bfloat16 can hold."""
    s, generator = layout.shape, torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.3).bfloat16().float()

    def norm(width: int) -> torch.Tensor:
        return (1 + torch.randn(width, generator=generator) * 0.1).bfloat16().float()

    found: Tensors = {}
    if layout.method == "eagle3":
        found |= {"norm.weight": norm(s.hidden), "layers.0.hidden_norm.weight": norm(s.hidden)}
        if s.states != (3,):
            found["fc.weight"] = matrix(s.hidden, len(s.states) * s.target_hidden)
            if layout.bias:
                found["fc.bias"] = matrix(s.hidden)
    elif layout.method == "eagle":
        found["fc.weight"] = matrix(s.hidden, 2 * s.hidden) / 4  # no norm ends a pass: states would grow along a chain
        if layout.projection_bias:
            found["fc.bias"] = matrix(s.hidden)
        if layout.entrance_norms:
            found |= {f"{name}_layernorm.weight": norm(s.hidden) for name in ("embedding", "hidden_states")}
    else:
        found["mtp_layers.0.input_proj.weight"] = matrix(s.hidden, 2 * s.hidden)
        found |= {f"mtp_layers.0.{name}_layernorm.weight": norm(s.hidden) for name in ("token", "hidden", "final")}
    for index in range(s.layers):
        prefix = f"{_layers(layout)}.{index}."
        width = s.hidden * (2 if index == 0 and layout.method == "eagle3" else 1)
        for name, heads in (("q", s.heads), ("k", s.kv_heads), ("v", s.kv_heads)):
            found[f"{prefix}self_attn.{name}_proj.weight"] = matrix(heads * s.head_dim, width)
            if layout.bias:
                found[f"{prefix}self_attn.{name}_proj.bias"] = matrix(heads * s.head_dim)
        found[f"{prefix}self_attn.o_proj.weight"] = matrix(s.hidden, s.heads * s.head_dim)
        found[f"{prefix}mlp.gate_proj.weight"] = matrix(s.inner, s.hidden)
        found[f"{prefix}mlp.up_proj.weight"] = matrix(s.inner, s.hidden)
        found[f"{prefix}mlp.down_proj.weight"] = matrix(s.hidden, s.inner)
        if index or layout.method != "eagle":
            found[f"{prefix}input_layernorm.weight"] = norm(s.hidden)
        found[f"{prefix}post_attention_layernorm.weight"] = norm(s.hidden)
        if layout.qk_norm:
            found[f"{prefix}self_attn.q_norm.weight"] = norm(s.head_dim)
            found[f"{prefix}self_attn.k_norm.weight"] = norm(s.head_dim)
    if layout.own_head:
        found["lm_head.weight"] = matrix(s.draft_vocab, s.hidden)
    if layout.own_embedding:
        found["embed_tokens.weight"] = matrix(s.vocab, s.hidden)
    if layout.state_norms:
        found |= {f"fc_norm.{i}.weight": norm(s.target_hidden) for i in range(len(s.states))}
    if layout.input_norm:
        found["input_norm.weight"] = norm(len(s.states) * s.target_hidden)
    if s.draft_vocab < s.vocab:
        ids = torch.randperm(s.vocab, generator=generator)[: s.draft_vocab].sort().values
        found["d2t"] = ids - torch.arange(s.draft_vocab)
        found["t2d"] = torch.zeros(s.vocab, dtype=torch.bool).index_fill(0, ids, True)
    return found


def _layers(layout: Layout) -> str:
    return "mtp_layers" if layout.method == "mtp" else "layers"


def config_of(layout: Layout) -> dict[str, Any]:
    """The head's config.json; a prediction layer's has the keys of its target, with as many layers as that has."""
    s = layout.shape
    decoder = {
        "model_type": "qwen3" if layout.method == "mtp" else "llama",
        "hidden_size": s.hidden,
        "num_hidden_layers": 2 if layout.method == "mtp" else s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "intermediate_size": s.inner,
        "vocab_size": s.vocab,
        "max_position_embeddings": s.positions,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    }
    own = {"draft_vocab_size": s.draft_vocab} if layout.method == "eagle3" else {}
    return own | ({"transformer_layer_config": decoder} if layout.nested else decoder) | layout.config


def write(layout: Layout, directory: Path, tensors: Tensors | None = None) -> Path:
    """Writes a head as its project would."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_of(layout)))
    named = {_published(layout, name): tensor for name, tensor in (tensors or random_tensors(layout)).items()}
    if layout.pickled:
        torch.save(named, directory / "pytorch_model.bin")
    else:
        save_file(named, directory / "model.safetensors")
    return directory


@dataclass(frozen=True)
class FittedHead:
    """A head of a small Llama checkpoint that often agrees with it, and all that a plain reference needs."""

    path: str
    layout: Layout
    tensors: Tensors
    target: Model
    embedding: torch.Tensor
    """[vocabulary, hidden] the target's, as the next."""
    output: torch.Tensor

    proposer = AutoregressiveProposer
    tolerance = 1e-5

    def chances(self, text: Sequence[int], drafted: Sequence[int]) -> np.ndarray:
        """See ``seen_drafts.Fitted``: of its own passes, which the plain reference agrees with up to rounding."""
        states = states_of(self.target, list(text[:-1]), self.layout.shape.states)
        said = logits_of(self._own, states, list(text), list(drafted), len(text))
        wanted = reference(self.layout, self.tensors, self.embedding, self.output, text, states, drafted)
        chances, plain = (found[len(text) - 2 :].softmax(-1).numpy() for found in (said, wanted))
        np.testing.assert_allclose(chances, plain, rtol=0.05, atol=0.01, err_msg=f"{text} {drafted}")
        return np.asarray(chances)

    @cached_property
    def _own(self) -> Head:
        return load_head(self.layout.method, self.path, self.target)

    @cached_property
    def ids(self) -> torch.Tensor:
        """[draft vocabulary] the target's."""
        size = torch.arange(self.layout.shape.draft_vocab)
        return size + self.tensors["d2t"] if "d2t" in self.tensors else size


PLAIN_LAYOUT = Layout(
    "fitted",
    "eagle3",
    {
        "architectures": ["Eagle3Speculator"],
        "eagle_aux_hidden_state_layer_ids": [0, 1],
        "norm_before_residual": True,
    },
    Shape(states=(0, 1)),
    nested=True,
)


def save_fitted(
    folder: Path, target: str, prompts: Sequence[Sequence[int]], layout: Layout = PLAIN_LAYOUT, steps: int = 120
) -> FittedHead:
    """A head fitted to a target's continuations of ``prompts``, and to what it says all along them. It does not know
    every fifth token, unless its layout wants the whole vocabulary.

    Args:
        layout: its sizes become the target's.
    """
    theirs, own = transformers.AutoModelForCausalLM.from_pretrained(target).float().eval(), load_model(target)
    c, s = theirs.config, layout.shape
    known = torch.tensor([token for token in range(c.vocab_size) if token % 5 or s.draft_vocab == s.vocab])
    size = Shape(
        hidden=c.hidden_size + s.hidden - s.target_hidden,
        target_hidden=c.hidden_size,
        heads=4,
        kv_heads=2,
        head_dim=getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads,
        inner=96,
        vocab=c.vocab_size,
        draft_vocab=len(known),
        states=s.states,
        layers=s.layers,
        positions=c.max_position_embeddings,
    )
    config = layout.config | ({"target_hidden_size": c.hidden_size} if "target_hidden_size" in layout.config else {})
    layout = replace(layout, shape=size, config=config)
    tensors = random_tensors(layout)
    if "d2t" in tensors:
        tensors |= {"d2t": known - torch.arange(len(known)), "t2d": torch.isin(torch.arange(c.vocab_size), known)}
    learnt = {name: t.requires_grad_() for name, t in tensors.items() if name not in ("d2t", "t2d")}
    embedding, output = (m.weight.detach() for m in (theirs.get_input_embeddings(), theirs.get_output_embeddings()))
    texts = []
    with torch.no_grad():
        for prompt in prompts:
            text = theirs.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, pad_token_id=0)
            tokens: list[int] = text[0].tolist()
            best = theirs(text).logits[0, 1:, known].argmax(-1)
            texts.append((tokens, states_of(own, tokens, s.states)[:-1], best))
    optimizer = torch.optim.Adam(learnt.values(), lr=0.01)
    for _ in range(steps):
        loss = torch.zeros(())
        for tokens, states, best in texts:
            out = _outputs(layout, tensors, embedding, tokens, states)
            loss = loss + F.cross_entropy(out @ tensors.get("lm_head.weight", output).T, best)
            if (
                layout.method == "eagle"
            ):  # as in its training: else states, which no norm bounds, would grow along a chain
                loss = loss + 10 * F.smooth_l1_loss(out[:-1], states[1:])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    tensors = {name: tensor.detach() for name, tensor in tensors.items()}
    return FittedHead(str(write(layout, folder, tensors)), layout, tensors, own, embedding, output)


def put_into_target(head: FittedHead, target: str, folder: Path) -> FittedHead:
    """MiMo's prediction layer and its target, as one checkpoint: what the target's family calls Qwen2, with more."""
    shutil.copytree(target, folder)
    own = json.loads((Path(target) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(own | head.layout.config))
    whole = load_file(folder / "model.safetensors") | load_file(Path(head.path) / "model.safetensors")
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    return replace(head, path=str(folder))


def _published(layout: Layout, name: str) -> str:
    if name in ("lm_head.weight", "d2t", "t2d"):
        return name
    if name.startswith("layers.0."):
        name = layout.layer + name.removeprefix("layers.0.")
    return layout.prefix + name


def reference(
    layout: Layout,
    tensors: Tensors,
    embedding: torch.Tensor,
    head: torch.Tensor,
    tokens: Sequence[int],
    states: torch.Tensor,
    drafted: Sequence[int] = (),
) -> torch.Tensor:
    """Logits [rows, draft vocabulary] of a head over a text, from its second token on, then of a chain.

    One plain pass over all rows: the rows of a chain see each other and the text. The hidden states of drafted tokens
    are found one after the other.

    Args:
        embedding: [vocabulary, hidden] and head [vocabulary, hidden] of the target.
        tokens: the text.
        states: [tokens − 1, states · width] the target's.
        drafted: tokens that follow it.
    """
    return _outputs(layout, tensors, embedding, tokens, states, drafted) @ tensors.get("lm_head.weight", head).T


def _outputs(
    layout: Layout,
    tensors: Tensors,
    embedding: torch.Tensor,
    tokens: Sequence[int],
    states: torch.Tensor,
    drafted: Sequence[int] = (),
) -> torch.Tensor:
    """[rows, hidden] what the logits of ``reference`` are made of."""
    w, s = tensors, layout.shape
    if "fc_norm.0.weight" in w:
        parts = states.split(s.target_hidden, 1)
        states = torch.cat([_rms(part, w[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], 1)
    if "input_norm.weight" in w:
        states = _rms(states, w["input_norm.weight"])
    fused = layout.method == "eagle3" and "fc.weight" in w
    hidden = states @ w["fc.weight"].T + w.get("fc.bias", 0.0) if fused else states
    table = w.get("embed_tokens.weight", embedding) if layout.method == "eagle3" else embedding
    rows = list(tokens[1:])
    for done in range(len(drafted) + 1):
        out, fed_back = _pass(layout, w, table[torch.tensor(rows)], hidden)
        if done < len(drafted):
            rows.append(drafted[done])
            hidden = torch.cat([hidden, fed_back[-1:]])
    return out


def _pass(layout: Layout, w: Tensors, e: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What logits are made of, and what the next step reads, both [rows, hidden]."""
    if layout.method == "eagle":
        return _eagle_pass(layout, w, e, g)
    return _mtp_pass(layout, w, e, g) if layout.method == "mtp" else _eagle3_pass(layout, w, e, g)


def _eagle3_pass(layout: Layout, w: Tensors, e: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    normed = _rms(g, w["layers.0.hidden_norm.weight"])
    x = normed if layout.config.get("norm_before_residual") else g
    h = torch.cat([_rms(e, w["layers.0.input_layernorm.weight"]), normed], 1)
    for index in range(layout.shape.layers):
        if index:
            h = _rms(x, w[f"layers.{index}.input_layernorm.weight"])
        x = _layer(layout, w, f"layers.{index}.", x, h)
    out = _rms(x, w["norm.weight"])
    return out, out if layout.config.get("norm_output") else x


def _eagle_pass(layout: Layout, w: Tensors, e: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if layout.entrance_norms:
        e, g = _rms(e, w["embedding_layernorm.weight"]), _rms(g, w["hidden_states_layernorm.weight"])
    x = torch.cat([e, g], 1) @ w["fc.weight"].T + w.get("fc.bias", 0.0)
    for index in range(layout.shape.layers):
        h = _rms(x, w[f"layers.{index}.input_layernorm.weight"]) if index else x
        x = _layer(layout, w, f"layers.{index}.", x, h)
    return x, x


def _mtp_pass(layout: Layout, w: Tensors, e: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    layer = "mtp_layers.0."
    if layout.zero_first:
        e = torch.cat([torch.zeros_like(e[:1]), e[1:]])
    halves = [_rms(e, w[layer + "token_layernorm.weight"]), _rms(g, w[layer + "hidden_layernorm.weight"])]
    x = torch.cat(halves[::-1] if layout.hidden_first else halves, 1) @ w[layer + "input_proj.weight"].T
    x = _layer(layout, w, layer, x, _rms(x, w[layer + "input_layernorm.weight"]))
    out = _rms(x, w[layer + "final_layernorm.weight"])
    return out, out


def _layer(layout: Layout, w: Tensors, prefix: str, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    x = x + _attention(layout, w, prefix, h)
    inner = _rms(x, w[prefix + "post_attention_layernorm.weight"])
    gate, up = inner @ w[prefix + "mlp.gate_proj.weight"].T, inner @ w[prefix + "mlp.up_proj.weight"].T
    return x + (F.silu(gate) * up) @ w[prefix + "mlp.down_proj.weight"].T


def _attention(layout: Layout, w: Tensors, prefix: str, h: torch.Tensor) -> torch.Tensor:
    s, rows = layout.shape, h.shape[0]
    found = []
    for name, heads in (("q", s.heads), ("k", s.kv_heads), ("v", s.kv_heads)):
        part = h @ w[f"{prefix}self_attn.{name}_proj.weight"].T
        if layout.bias:
            part = part + w[f"{prefix}self_attn.{name}_proj.bias"]
        part = part.view(rows, heads, s.head_dim)
        if layout.qk_norm and name != "v":
            part = _rms(part, w[f"{prefix}self_attn.{name}_norm.weight"])
        found.append(part if name == "v" else _rotate(part))
    q, k, v = found
    k, v = (part.repeat_interleave(s.heads // s.kv_heads, 1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * s.head_dim**-0.5
    scores = scores.masked_fill(torch.ones(rows, rows).triu(1).bool(), -torch.inf)
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(rows, -1)
    return attended @ w[f"{prefix}self_attn.o_proj.weight"].T


def _rotate(x: torch.Tensor) -> torch.Tensor:
    cos, sin = _angles(x.shape[0], x.shape[2])
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@cache
def _angles(rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, 1, width / 2] cosines and sines of the positions 0, 1, …"""
    angles = torch.arange(rows)[:, None] * 10000.0 ** (-2 * torch.arange(width // 2) / width)
    return angles.cos()[:, None], angles.sin()[:, None]


def _rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight
