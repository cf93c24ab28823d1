"""What the assistant says of its tokens while it drafts, and when a rule ends the draft."""

from __future__ import annotations

import numpy as np
import torch

from dynaspec.contract.step import LOGIT_RANGE, StopRule
from dynaspec.propose.drawing import REPEAT_MATCH, REPEAT_WEIGHT
from dynaspec.propose.match import ahead, repeat_bonus
from dynaspec.propose.stopping import stop_mask

_HOST = torch.device("cpu")
_ROW = np.zeros(1, dtype=np.int64)


class DraftSignals:
    """Confidence and signal of one draft's tokens, one after the other; see ``contract.step.DraftView``."""

    def __init__(self, rule: StopRule | None, depth: int, text: torch.Tensor) -> None:
        """
        Args:
            text: [1, L] committed tokens, as the assistant reads them.
        """
        self.confidence: list[float] = []
        self.signal: list[float] = []
        self.repeat_bonus: list[float] = []
        self.stopped = False
        """The rule ended the draft before its depth."""
        self._depth = depth
        self._signal = "confidence" if rule is None else rule.signal
        self._mask = stop_mask(rule, np.array([depth], dtype=np.int64), _HOST)
        self._draft = np.zeros(depth, dtype=np.int64)
        # On a GPU the host would have to wait for the text.
        repeat_bonuses = self._signal == "survival" and text.device.type == "cpu"
        self._text = text[0].numpy().astype(np.int32) if repeat_bonuses else None

    def add(self, token: int, probability: torch.Tensor, lead: torch.Tensor, scores: torch.Tensor) -> bool:
        """Takes in a drafted token; returns whether to go on drafting.

        Args:
            probability, lead: [1] of the largest of the assistant's logits, see ``sampling.ops.leaders``.
            scores: [1, V] the logits after all processors, from which the token was drawn.
        """
        if self._signal == "token_prob":
            # That of the drawn token under what it was drawn from, as Transformers has it.
            value = float(scores.softmax(-1)[0, token])
        else:
            value = float(probability[0])
        self.confidence.append(value)
        if self._signal == "survival":
            value = self._weigh(token, ahead(float(lead[0]), float(probability[0]), LOGIT_RANGE))
        done = len(self.confidence)
        self._mask.update(done, _ROW, torch.tensor([value], dtype=torch.float32))
        going_on = bool(self._mask.running(done).size)
        self.stopped = not going_on and done < self._depth
        return going_on

    def _weigh(self, token: int, ahead_by: float) -> float:
        position = len(self.signal)
        self._draft[position] = token
        own = 0.0
        if self._text is not None:
            own = REPEAT_WEIGHT * repeat_bonus(self._text, self._text.size, self._draft, position, REPEAT_MATCH)
        self.signal.append(ahead_by + own)
        self.repeat_bonus.append(own)
        return self.signal[-1]
