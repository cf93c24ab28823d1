"""A prediction layer as ``speculators`` writes it, against its own model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.mtp import MTPDraftModel
from speculators.models.mtp.config import MTPSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import Qwen3Config

from dynaspec.control.checkpoint import own_target
from dynaspec.model.decoder_heads.mtp import load_mtp
from dynaspec.model.loader import load_model
from support.head_passes import logits_of, states_of
from unit.model import tiny

TEXT = np.random.default_rng(0).integers(3, 50, 37).tolist()


def their_model(target: Path) -> MTPDraftModel:
    """Random weights, with the target's embedding and output layer."""
    decoder = Qwen3Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=40,
        vocab_size=50,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    config = MTPSpeculatorConfig(
        transformer_layer_config=decoder,
        speculators_config=SpeculatorsConfig(
            algorithm="mtp",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=str(target), architectures=["LlamaForCausalLM"]),
        ),
    )
    torch.manual_seed(0)
    theirs = MTPDraftModel(config).float().eval()
    for name, parameter in theirs.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data = 1 + 0.1 * torch.randn_like(parameter)
    theirs.load_verifier_weights()
    return theirs.float()


def test_logits_are_theirs(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    target = tiny.write(tmp_path / "target")
    theirs, model = their_model(target), load_model(str(target))
    theirs.save_pretrained(tmp_path / "head")
    own = own_target(tmp_path / "head")
    assert own is not None
    assert (own.target, own.speculation["method"]) == (str(target), "mtp")
    head = load_mtp(str(tmp_path / "head"), model)
    states = states_of(model, TEXT, head.settings.states)
    with torch.no_grad():
        (expected,), *_ = theirs(input_ids=torch.tensor([TEXT]), hidden_states=states[None])
    ours = logits_of(head, states, TEXT, [], 7)
    torch.testing.assert_close(ours[:-1], expected[0], rtol=1e-4, atol=1e-4)
