"""Logits, and the loss of predicting the next token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from dynaspec.train.precision import precision

Backbone = Callable[..., Any]


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
