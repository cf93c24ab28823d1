"""Random Medusa heads and MLP speculators in every published layout, and plain references of what they compute."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file

from dynaspec.model.decoder import Model
from dynaspec.model.loader import load_model
from dynaspec.propose.state_heads import StateHeadsProposer

from .head_passes import states_of

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """How one project writes heads."""

    name: str
    method: str
    config: dict[str, Any]
    file: str = "model.safetensors"
    prefix: str = ""
    converted: bool = False
    """Medusa's names as vLLM has them."""
    heads: int = 3
    layers: int = 1
    biased: bool = True
    shared: str | None = None
    """Name of the output layer of all heads."""
    known: int | None = None
    """Tokens that are drafted; None = all."""
    whole_output: bool = False
    """Output layers have a row for every token all the same."""
    once: bool = False
    """What is tied is in the file once."""
    hidden: int = 32
    vocab: int = 50
    inner: int = 24
    beside: bool = False
    """A whole model is in the same file."""

    @property
    def tied(self) -> bool:
        return bool(self.config.get("tie_weights"))


_LIES = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
_VLLM = {"architectures": ["MedusaModel"], "model_type": "medusa", "max_paths": 64, "topk": 10}
_MLP = {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "n_candidates": 5}
MEDUSA_LAYOUTS = (
    Layout("medusa 0.1", "medusa", _LIES, "medusa_lm_head.pt"),
    Layout("medusa 0.1, two layers, held once", "medusa", _LIES, "medusa_lm_head.safetensors", layers=2, once=True),
    Layout("medusa 0.1, two layers", "medusa", _LIES, "medusa_lm_head.pt", layers=2, heads=5),
    Layout("medusa 1.0", "medusa", {"medusa_num_heads": 3}, prefix="medusa_head.", beside=True),
    Layout("vllm", "medusa", _VLLM, converted=True, biased=False),
    Layout("vllm, two layers, biased", "medusa", _VLLM, converted=True, layers=2),
    Layout("vllm, prefixed", "medusa", _VLLM, prefix="medusa_heads.", converted=True, biased=False),
    Layout("vllm, one head for all", "medusa", _VLLM, converted=True, shared="lm_head"),
    Layout(
        "vllm, the first for all", "medusa", _VLLM | {"original_lm_head": True}, converted=True, shared="lm_heads.0"
    ),
    Layout("vllm, some tokens", "medusa", _VLLM | {"truncated_vocab_size": 30}, converted=True, known=30),
    Layout("vllm, some tokens of all", "medusa", _VLLM, converted=True, known=30, whole_output=True),
)
MLP_LAYOUTS = (
    Layout("accelerator", "mlp_speculator", _MLP),
    Layout("accelerator, prefixed, scaled", "mlp_speculator", _MLP | {"scale_input": True}, prefix="speculator."),
    Layout("accelerator, pickled", "mlp_speculator", _MLP, "pytorch_model.bin", heads=4),
    Layout("tied", "mlp_speculator", _MLP | {"tie_weights": True, "scale_input": True}, heads=4),
    Layout("tied, held once", "mlp_speculator", _MLP | {"tie_weights": True}, prefix="speculator.", once=True, heads=4),
    Layout("as wide as the model", "mlp_speculator", _MLP | {"inner_dim": 0}, inner=32),
    Layout("one step", "mlp_speculator", _MLP, heads=1),
)
LAYOUTS = (*MEDUSA_LAYOUTS, *MLP_LAYOUTS)


def random_tensors(layout: Layout, seed: int = 0) -> Tensors:
    """Under names of the tests' own: ``block.{head}.{layer}.weight`` and ``.bias``, ``output.{head}``, ``ids`` for
    Medusa; the published ones without a prefix for MLP speculators. Float32 values that bfloat16 can hold."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, spread: float = 0.3, centre: float = 0.0) -> torch.Tensor:
        return (centre + torch.randn(shape, generator=generator) * spread).bfloat16().float()

    found: Tensors = {}
    if layout.method == "mlp_speculator":
        for i in range(layout.heads):
            again = layout.tied and i > 0
            found[f"emb.{i}.weight"] = found["emb.0.weight"] if again else random(layout.vocab, layout.inner)
            width = layout.inner if i else layout.hidden
            found[f"proj.{i}.weight"] = found["proj.1.weight"] if again and i > 1 else random(layout.inner, width)
            for name, centre in (("weight", 1.0), ("bias", 0.0)):
                first = f"ln.0.{name}"
                found[f"ln.{i}.{name}"] = found[first] if again else random(layout.inner, spread=0.1, centre=centre)
            found[f"head.{i}.weight"] = found["head.0.weight"] if again else random(layout.vocab, layout.inner)
        return found
    for i in range(layout.heads):
        for j in range(layout.layers):
            same = not layout.converted and j > 0  # the original repeats one module
            for name, shape in (("weight", (layout.hidden, layout.hidden)), ("bias", (layout.hidden,))):
                if name == "weight" or layout.biased:
                    found[f"block.{i}.{j}.{name}"] = found[f"block.{i}.0.{name}"] if same else random(*shape)
        found[f"output.{i}"] = found["output.0"] if layout.shared and i else random(layout.vocab, layout.hidden)
    if layout.known is not None:
        found["ids"] = torch.randperm(layout.vocab, generator=generator)[: layout.known].sort().values
    return found


def published(layout: Layout, tensors: Tensors) -> Tensors:
    """The same under the names of the layout."""
    if layout.method == "mlp_speculator":
        later = ("emb", "ln", "head", "proj")
        own = {"proj.1.weight"} | {name for name in tensors if name.split(".")[1] == "0"}
        return {
            layout.prefix + name: t.clone()
            for name, t in tensors.items()
            if not layout.once or name in own or name.split(".")[0] not in later
        }
    named: Tensors = {}
    for name, tensor in tensors.items():
        kind, *rest = name.split(".")
        if kind == "block":
            i, j, what = rest
            if not (layout.once and j != "0"):
                own = f"blocks.{i}.layers.{j}.{what}" if layout.converted else f"{i}.{j}.linear.{what}"
                named[layout.prefix + own] = tensor.clone()
        elif kind == "output":
            own = f"lm_heads.{rest[0]}" if layout.converted else f"{rest[0]}.{layout.layers}"
            if layout.shared is None or rest[0] == "0":
                cut = layout.known is not None and not layout.whole_output
                named[f"{layout.prefix}{layout.shared or own}.weight"] = (
                    tensor[tensors["ids"]].clone() if cut else tensor.clone()
                )
        else:
            named[layout.prefix + "token_map"] = tensor
    return named


def config_of(layout: Layout) -> dict[str, Any]:
    """The heads' config.json."""
    if layout.method == "medusa":
        sizes = {"hidden_size": layout.hidden, "vocab_size": layout.vocab, "num_hidden_layers": layout.layers}
        return layout.config | (sizes | {"num_heads": layout.heads} if layout.converted else {})
    sizes = {"vocab_size": layout.vocab, "emb_dim": layout.hidden, "inner_dim": layout.inner, "n_predict": layout.heads}
    return sizes | layout.config


def write(layout: Layout, directory: Path, tensors: Tensors | None = None) -> Path:
    """Writes heads as their project would."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config_of(layout)))
    named = published(layout, random_tensors(layout) if tensors is None else tensors)
    if layout.beside:
        named |= {"model.embed_tokens.weight": torch.zeros(50, 32), "lm_head.weight": torch.zeros(50, 32)}
    if layout.file.endswith(".safetensors"):
        save_file(named, directory / layout.file)
    else:
        torch.save(named, directory / layout.file)
    return directory


def reference(layout: Layout, w: Tensors, hidden: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """Logits [tokens, drafted vocabulary] of the heads, one after the other.

    Args:
        w: see ``random_tensors``.
        hidden: [width] the target's state before the newest token.
        tokens: the newest one, then those drafted behind it; as many heads run as there are tokens.
    """
    if layout.method == "mlp_speculator":
        return _mlp(layout, w, hidden, tokens)
    found = []
    for i in range(len(tokens)):
        x = hidden
        for j in range(layout.layers):
            inner = x @ w[f"block.{i}.{j}.weight"].T + w.get(f"block.{i}.{j}.bias", 0.0)
            x = x + inner * torch.sigmoid(inner)
        found.append(x @ w[f"output.{i}"].T)
    logits = torch.stack(found)
    return logits if layout.known is None else logits[:, w["ids"]]


def _mlp(layout: Layout, w: Tensors, hidden: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    def normed(x: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt(torch.mean(x**2) + 1e-6)

    state_weight = 2 ** (-1 / (2 * layout.heads))
    token_weight = ((1 - state_weight**2) * layout.inner / 2) ** 0.5
    s = normed(hidden) / 2**0.5 if layout.config.get("scale_input") else hidden
    found = []
    for i, token in enumerate(tokens):
        mixed = w[f"proj.{i}.weight"] @ s + token_weight / state_weight * w[f"emb.{i}.weight"][token]
        z = w[f"ln.{i}.weight"] * normed(mixed) + w[f"ln.{i}.bias"]
        s = 0.5 * z * (1 + torch.erf(z / 2**0.5))
        found.append(w[f"head.{i}.weight"] @ s)
    return torch.stack(found)


@dataclass(frozen=True)
class FittedHeads:
    """Heads of a small checkpoint that often agree with it, and all that a plain reference needs."""

    path: str
    layout: Layout
    tensors: Tensors
    target: Model

    proposer = StateHeadsProposer
    tolerance = 2e-3

    def chances(self, text: Sequence[int], drafted: Sequence[int]) -> np.ndarray:
        """See ``seen_drafts.Fitted``: of the plain reference on the state that the target has after the text."""
        last = self.target.config.num_layers + 1
        states = states_of(self.target, list(text[:-1]), (last,))
        found = reference(self.layout, self.tensors, states[-1], [text[-1], *drafted])
        return np.asarray(found.softmax(-1).numpy())

    @cached_property
    def ids(self) -> torch.Tensor:
        """[drafted vocabulary] the target's."""
        return self.tensors.get("ids", torch.arange(self.layout.vocab))


def save_fitted(
    folder: Path, target: str, prompts: Sequence[Sequence[int]], layout: Layout, steps: int = 60
) -> FittedHeads:
    """Heads fitted to what a target says all along its continuations of ``prompts``.

    Args:
        layout: its sizes become the target's.
    """
    theirs, own = transformers.AutoModelForCausalLM.from_pretrained(target).float().eval(), load_model(target)
    c, inner = theirs.config, layout.inner if layout.config.get("inner_dim") != 0 else theirs.config.hidden_size
    known = None if layout.known is None else c.vocab_size * 4 // 5
    layout = replace(layout, hidden=c.hidden_size, vocab=c.vocab_size, inner=inner, known=known)
    tensors = random_tensors(layout)
    learnt = {id(t): t.requires_grad_() for name, t in tensors.items() if name != "ids"}  # tied ones once
    samples: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.no_grad():
        for prompt in prompts:
            text = theirs.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, pad_token_id=0)[0]
            states = states_of(own, text.tolist(), (c.num_hidden_layers + 1,))
            samples.append((states, text))
    optimizer = torch.optim.Adam(learnt.values(), lr=0.01)
    for _ in range(steps):
        loss = torch.zeros(())
        for states, text in samples:
            rows = torch.arange(len(text) - layout.heads - 2)
            loss = loss + _loss(layout, tensors, states[rows], text, rows)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    tensors = {name: tensor.detach() for name, tensor in tensors.items()}
    return FittedHeads(str(write(layout, folder, tensors)), layout, tensors, own)


def _loss(layout: Layout, w: Tensors, states: torch.Tensor, text: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Of tokens that the target has chosen: head i of the state at row r is asked for token r + 2 + i."""
    run: Callable[..., torch.Tensor] = torch.func.vmap(
        lambda hidden, tokens: _logits(layout, w, hidden, tokens), in_dims=(0, 0)
    )
    before = torch.stack([text[rows + 1 + i] for i in range(layout.heads)], 1)
    wanted = torch.stack([text[rows + 2 + i] for i in range(layout.heads)], 1)
    return F.cross_entropy(run(states, before).flatten(0, 1), wanted.flatten())


def _logits(layout: Layout, w: Tensors, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """``reference`` over the whole vocabulary, for tokens in a tensor."""
    whole = replace(layout, known=None)
    return reference(whole, w, hidden, [tokens[i] for i in range(layout.heads)])  # type: ignore[misc]
