"""Models in the layout of Llama: new ones, the loss of the next token, and their folders in the Hugging Face layout."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from dynaspec.contract.errors import CheckpointError, ConfigError
from dynaspec.model.weights import read_json

from .data import END_OF_TEXT_ID, copy_tokenizer, load_tokenizer
from .run import precision

EXPECTED = "expected a folder with a Llama model in the Hugging Face layout"
FILES = ("config.json", "*.safetensors", "tokenizer.json")
GENERATION = {
    "bos_token_id": END_OF_TEXT_ID,
    "eos_token_id": END_OF_TEXT_ID,
    "pad_token_id": END_OF_TEXT_ID,
    "do_sample": False,
}
Backbone = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder with tied embeddings and grouped-query attention."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    head_dim: int = 64
    vocab: int = 4096
    positions: int = 2048
    rope_theta: float = 10_000.0
    rms_eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in (
            "hidden",
            "layers",
            "heads",
            "kv_heads",
            "intermediate",
            "head_dim",
            "vocab",
            "positions",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: got {getattr(self, name)}, expected at least 1")
        if not 257 <= self.vocab <= 65_536:  # token files hold 16 bits
            raise ConfigError(f"vocab: got {self.vocab}, expected 257 to 65536")
        if self.heads % self.kv_heads:
            raise ConfigError(f"kv_heads: got {self.kv_heads}, expected a divisor of the {self.heads} heads")

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.positions,
            rms_norm_eps=self.rms_eps,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            tie_word_embeddings=True,
            bos_token_id=END_OF_TEXT_ID,
            eos_token_id=END_OF_TEXT_ID,
            pad_token_id=None,
        )


def build(shape: Shape, seed: int) -> LlamaForCausalLM:
    """A fresh model: inner matrices at 1/sqrt(fan in), the two that write the residual stream at 0."""
    torch.manual_seed(seed)
    config = shape.config()
    config._attn_implementation = "sdpa"
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
            elif parameter.ndim == 2 and "embed_tokens" not in name:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model


def parameters(model: nn.Module) -> int:
    """Number of weights, the tied embedding counted once."""
    return sum(p.numel() for p in model.parameters())


def read_shape(folder: Path) -> Shape:
    """Sizes of the model in ``folder``.

    Raises:
        CheckpointError: there is none, or none that a drafter can be trained for.
        ConfigError: its sizes cannot be right, or are too large.
    """
    if not folder.is_dir():
        raise CheckpointError(f"target: got {str(folder)!r}, which is no folder, {EXPECTED}")
    for pattern in FILES:
        if not any(folder.glob(pattern)):
            raise CheckpointError(f"target: got {str(folder)!r}, which holds no {pattern}, {EXPECTED}")
    architectures = read_json(folder / "config.json").get("architectures")
    if architectures != ["LlamaForCausalLM"]:
        raise CheckpointError(f"target: got {str(folder)!r}, whose architectures are {architectures}, {EXPECTED}")
    config = LlamaConfig.from_pretrained(folder)
    if config.eos_token_id not in (END_OF_TEXT_ID, [END_OF_TEXT_ID]):
        raise CheckpointError(
            f"target: got {str(folder)!r}, which ends texts with token {config.eos_token_id}, "
            f"expected {END_OF_TEXT_ID}, as in targets that are trained here"
        )
    return Shape(
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        intermediate=config.intermediate_size,
        head_dim=config.head_dim,
        vocab=config.vocab_size,
        positions=config.max_position_embeddings,
        rope_theta=config.rope_parameters["rope_theta"],
        rms_eps=config.rms_norm_eps,
    )


def fingerprint(folder: Path) -> str:
    """Twelve hexadecimal digits that change with the model's weights, configuration or tokenizer."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in FILES for path in folder.glob(pattern)):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:12]


def logits(model: LlamaForCausalLM, inputs: Tensor, backbone: Backbone | None = None) -> Tensor:
    """Float32 logits [rows · columns, vocab] for ``inputs`` [rows, columns].

    ``backbone`` stands in for the decoder below the output head: a compiled version of it.
    """
    run: Backbone = model.model if backbone is None else backbone
    with precision(inputs.device):
        hidden: Tensor = run(input_ids=inputs, use_cache=False).last_hidden_state
        scores: Tensor = model.lm_head(hidden.flatten(0, 1))
    return scores.float()


class NextToken:
    """Mean cross-entropy of the next token, nats."""

    def __init__(self, model: LlamaForCausalLM, backbone: Backbone | None = None) -> None:
        self._model = model
        self._backbone = backbone

    def __call__(self, batch: Tensor) -> Tensor:
        """Scalar loss of a batch [rows, seq_len + 1]."""
        scores = logits(self._model, batch[:, :-1], self._backbone)
        loss: Tensor = F.cross_entropy(scores, batch[:, 1:].flatten())
        return loss


def export(model: LlamaForCausalLM, tokenizer_folder: Path, folder: Path) -> None:
    """Write ``model`` in bfloat16 with its tokenizer to ``folder``, replacing what is there.

    Raises:
        CheckpointError: what was written does not load, or gives other logits.
    """
    staged = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(staged, ignore_errors=True)
    try:
        round_weights(model).to(torch.bfloat16).save_pretrained(staged)
        (staged / "model.safetensors").chmod(0o644)  # it is written for its owner alone
        _add_old_names(staged / "config.json", model.config.rope_parameters["rope_theta"])
        (staged / "generation_config.json").write_text(json.dumps(GENERATION, indent=2) + "\n", "utf-8")
        copy_tokenizer(tokenizer_folder, staged)
        if (folder / "README.md").is_file():
            shutil.copy2(folder / "README.md", staged / "README.md")
        check(staged, round_weights(model), load_tokenizer(tokenizer_folder))
        _put_in_place(staged, folder)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def round_weights(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """A float32 copy with the bfloat16 values that an export holds: the model people will run."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    with torch.no_grad():
        # Weights alone: casting the module would round its rotary frequencies too.
        for parameter in copy.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return copy.eval()


def check(folder: Path, model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    """Load ``folder`` as a user would and compare it with ``model`` and ``tokenizer``.

    Raises:
        CheckpointError: they differ.
    """
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = "def größe(x):\n    return 12 * x  # \u2603\n"
    ids = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False, return_tensors="pt").input_ids
    if ids[0].tolist() != tokenizer.encode(text, add_special_tokens=False).ids:
        raise CheckpointError(f"export: the tokenizer in {str(folder)!r} differs from training's")
    with torch.no_grad():
        difference = float((loaded(ids).logits - model(ids).logits).abs().max())
    if difference > 1e-4:
        raise CheckpointError(
            f"export: logits of {str(folder)!r} differ by {difference:.3g} from the model's, expected none"
        )


def load_exported(folder: Path, device: torch.device) -> LlamaForCausalLM:
    """An exported model, or a given target, in float32 on ``device``.

    Raises:
        CheckpointError: there is none.
    """
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"export: {str(folder)!r} holds no model, expected what the stage 'export' writes")
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()


def _add_old_names(path: Path, rope_theta: float) -> None:
    # Readers older than Transformers 5 look for these at the top level.
    settings = json.loads(path.read_text("utf-8"))
    settings |= {"rope_theta": rope_theta, "torch_dtype": "bfloat16"}
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", "utf-8")


def _put_in_place(staged: Path, folder: Path) -> None:
    retired = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    if folder.exists():
        os.replace(folder, retired)
    os.replace(staged, folder)
    shutil.rmtree(retired, ignore_errors=True)
