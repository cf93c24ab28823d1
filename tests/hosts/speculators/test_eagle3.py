"""Heads against the model of the package ``speculators``, which defines the format that we train and read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from transformers import LlamaConfig, LlamaForCausalLM

from dynaspec.model.decoder_heads.eagle3 import load_eagle3
from dynaspec.model.loader import load_model
from support.decoder_heads import EAGLE3, Layout, config_of, write
from support.head_passes import logits_of, states_of
from unit.model import tiny

TEXT = np.random.default_rng(0).integers(3, 50, 37).tolist()
OWN = [layout for layout in EAGLE3 if layout.nested and "other width" not in layout.name]
COMMITTED = Path(__file__).parents[3] / "models" / "smollm2-eagle3"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("tiny"))


def load_theirs(path: Path, target: Path) -> Any:
    """Their model of a checkpoint, in float32."""
    config = Eagle3SpeculatorConfig.from_pretrained(path)
    config.transformer_layer_config._attn_implementation = "eager"  # flexible attention wants multiples of 128 rows
    theirs = Eagle3DraftModel.from_pretrained(path, config=config, torch_dtype=torch.float32).float().eval()
    # Their loader takes the verifier's embedding only if it finds NaN in its own, which memory may or may not hold.
    embedding = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    theirs.embed_tokens.weight.data = embedding.float()
    return theirs


@contextmanager
def seen(module: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """What a module puts out while the block runs."""
    outputs: list[torch.Tensor] = []
    hook = module.register_forward_hook(lambda _module, _inputs, output: outputs.append(output[0].detach()))
    yield outputs
    hook.remove()


def their_logits(theirs: Any, text: list[int], states: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """Of each step of their unrolled pass [rows, draft vocabulary]; step j of row i has read tokens up to i + 1 + j."""
    with torch.no_grad(), seen(theirs.lm_head) as logits:
        theirs(
            hidden_states=states[None, :-1].float(),
            input_ids=torch.tensor([text[1:]]),
            document_ids=torch.zeros(1, len(text) - 1, dtype=torch.long),
            ttt_steps=steps,
        )
    return logits


def complete(path: Path, config: dict[str, Any], target: Path) -> Path:
    """Write the config of a head with what their loader asks for and ours does not."""
    config = config | {
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": str(target), "architectures": ["LlamaForCausalLM"]},
        },
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def check(path: Path, target: Path, text: list[int]) -> None:
    """Logits along ``text``, and of chains that continue it by its own tokens, as in their training."""
    model = load_model(str(target))
    head = load_eagle3(str(path), model)
    states = states_of(model, text, head.settings.states)
    unrolled = their_logits(load_theirs(path, target), text, states, 3)
    ours = logits_of(head, states, text, [], len(text))
    torch.testing.assert_close(ours, unrolled[0], rtol=1e-4, atol=1e-4)
    for length in (5, 20, len(text) - 3):
        chain = text[length : length + 2]
        ours = logits_of(head, states[:length], text[:length], chain, length)[-2:]
        for step in (1, 2):
            torch.testing.assert_close(ours[step - 1], unrolled[step][length - 2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", OWN, ids=lambda layout: layout.name)
def test_logits_are_theirs(layout: Layout, target: Path, tmp_path: Path) -> None:
    check(complete(write(layout, tmp_path), config_of(layout), target), target, TEXT)


def test_the_committed_head_drafts_there_what_it_drafts_here(tmp_path: Path) -> None:
    """On a random target of the right sizes, for the one that it was trained for is no part of the checkout."""
    config = json.loads((COMMITTED / "config.json").read_text())
    decoder = config["transformer_layer_config"]
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps")
    torch.manual_seed(0)
    verifier = LlamaConfig(
        **{name: decoder[name] for name in names},
        num_hidden_layers=30,
        intermediate_size=32,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    LlamaForCausalLM(verifier).bfloat16().save_pretrained(tmp_path / "target")
    for file in COMMITTED.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    check(complete(tmp_path, config, tmp_path / "target"), tmp_path / "target", TEXT)
