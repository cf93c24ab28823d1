"""Distillation from a target that is asked about each row once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from dynaspec.contract.errors import ConfigError
from dynaspec.train.objective import logits


@dataclass(frozen=True, slots=True)
class SoftLabels:
    """The target's most likely next tokens at each position, most likely first.

    ``ids`` [rows, seq_len, k] (int64) and ``log_probs`` [rows, seq_len, k] (float32).
    """

    ids: Tensor
    log_probs: Tensor


class Teacher:
    """Scores rows with the target and keeps its ``k`` best tokens of each position.

    The target is many times dearer than the drafter, so a row that comes again must not be scored
    again. A row is known by its tokens: 4 bytes · k a token are kept, in main memory.
    """

    def __init__(self, target: LlamaForCausalLM, k: int = 32, temperature: float = 1.0) -> None:
        """
        Args:
            temperature: below 1 the labels are sharper than the target: a drafter of greedy requests is asked for the
                target's first choice, and is as sure of a token as it is often right.

        Raises:
            ConfigError: it is not above 0.
        """
        if not temperature > 0.0:
            raise ConfigError(f"teacher_temperature: got {temperature}, expected a number above 0")
        self._temperature = temperature
        self._target = target.eval().requires_grad_(False)
        self._k = min(k, target.config.vocab_size)
        self._known: dict[bytes, tuple[Tensor, Tensor]] = {}

    @property
    def rows(self) -> int:
        """How many rows were scored so far."""
        return len(self._known)

    @torch.no_grad()
    def __call__(self, inputs: Tensor) -> SoftLabels:
        """Soft labels of ``inputs`` [rows, seq_len], on the device of ``inputs``."""
        keys = [row.tobytes() for row in inputs.cpu().numpy()]
        fresh = list({key: i for i, key in enumerate(keys) if key not in self._known}.values())
        if fresh:
            scores = logits(self._target, inputs[fresh]).view(*inputs[fresh].shape, -1)
            best = (scores / self._temperature).log_softmax(-1).topk(self._k, dim=-1)
            for row, ids, log_probs in zip(fresh, best.indices.cpu(), best.values.cpu(), strict=True):
                self._known[keys[row]] = (ids.to(torch.uint16), log_probs.half())
        known = [self._known[key] for key in keys]
        return SoftLabels(
            torch.stack([ids for ids, _ in known]).to(inputs.device, torch.int64),
            torch.stack([log_probs for _, log_probs in known]).to(inputs.device, torch.float32),
        )


class Distillation:
    """``weight`` · KL(target ‖ drafter) + (1 − ``weight``) · cross-entropy of the next token, nats.

    Forward KL keeps the drafter's mass where the target has its own, which is what exact acceptance
    rewards; the cross-entropy anchors it to the text (Hinton et al., 2015). The divergence is that
    of the target's best tokens and of "any other token" as one more.
    """

    def __init__(self, teacher: Teacher, drafter: LlamaForCausalLM, weight: float = 0.8) -> None:
        if not 0.0 <= weight <= 1.0:
            raise ConfigError(f"kl_weight: got {weight}, expected 0 to 1")
        self._teacher = teacher
        self._drafter = drafter
        self._weight = weight

    def __call__(self, batch: Tensor) -> Tensor:
        """Scalar loss of a batch [rows, seq_len + 1]."""
        inputs, labels = batch[:, :-1], batch[:, 1:].flatten()
        wanted = self._teacher(inputs)
        given = F.log_softmax(logits(self._drafter, inputs), dim=-1)
        divergence = coarse_divergence(wanted.log_probs.flatten(0, 1), given.gather(-1, wanted.ids.flatten(0, 1)))
        loss: Tensor = self._weight * divergence + (1.0 - self._weight) * F.nll_loss(given, labels)
        return loss


def coarse_divergence(p: Tensor, q: Tensor) -> Tensor:
    """Mean KL(p ‖ q) over positions, from the log probabilities [positions, k] of the same k tokens.

    What the k tokens leave to one counts as one further outcome.
    """
    p_rest, q_rest = _log_rest(p), _log_rest(q)
    per_position = (p.exp() * (p - q)).sum(-1) + p_rest.exp() * (p_rest - q_rest)
    return per_position.mean()


def _log_rest(log_probs: Tensor) -> Tensor:
    # Rounding may leave less than nothing; 1e-6 is below what half-precision labels resolve.
    return (1.0 - log_probs.exp().sum(-1)).clamp_min(1e-6).log()
