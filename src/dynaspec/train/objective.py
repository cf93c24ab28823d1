"""The two losses: next-token prediction, and distillation from a target."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from dynaspec.contract.errors import ConfigError

Backbone = Callable[..., Any]


def precision(device: torch.device) -> AbstractContextManager[object]:
    """bfloat16 products on CUDA, float32 elsewhere."""
    if device.type == "cuda":
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return nullcontext()


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


class Distillation:
    """``weight`` · KL(target ‖ drafter) + (1 − ``weight``) · cross-entropy of the next token, nats.

    Forward KL keeps the drafter's mass where the target has its own, which is what exact acceptance
    rewards; the cross-entropy anchors it to the text (Hinton et al., 2015).
    """

    def __init__(self, target: LlamaForCausalLM, drafter: LlamaForCausalLM, weight: float = 0.8) -> None:
        if not 0.0 <= weight <= 1.0:
            raise ConfigError(f"kl_weight: got {weight}, expected 0 to 1")
        self._target = target.eval().requires_grad_(False)
        self._drafter = drafter
        self._weight = weight

    def __call__(self, batch: Tensor) -> Tensor:
        """Scalar loss of a batch [rows, seq_len + 1]."""
        inputs, labels = batch[:, :-1], batch[:, 1:].flatten()
        with torch.no_grad():
            wanted = F.softmax(logits(self._target, inputs), dim=-1)
        given = F.log_softmax(logits(self._drafter, inputs), dim=-1)
        # KL up to the target's entropy, which has no gradient, is a cross-entropy with soft labels;
        # the entropy is put back so that the figure reads as a divergence.
        entropy = torch.special.entr(wanted).sum(-1).mean()
        divergence = -(wanted * given).sum(-1).mean() - entropy
        loss: Tensor = self._weight * divergence + (1.0 - self._weight) * F.nll_loss(given, labels)
        return loss
