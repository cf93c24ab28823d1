"""Drafts of a head as an engine makes them, held against a plain reference that reads every text from its beginning.

No output shows whether they are right: a head that reads another text's states, or its own where its target's are
known, is accepted less often, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol
from unittest import mock

import numpy as np
import torch

from dynaspec.contract.proposer import DecodeBatch, Drafts
from dynaspec.contract.step import SpecPlan
from dynaspec.propose.autoregressive import AutoregressiveProposer


@dataclass(frozen=True, slots=True)
class SeenDraft:
    """A request's draft of one step, or a path of a tree that is one."""

    text: list[int]
    tokens: list[int]
    confidence: np.ndarray
    of_drawn: bool
    """The confidence is the drafted token's own probability, not the largest."""
    greedy: bool
    """The request's tokens are first choices, and nothing edits its logits."""
    unread: int
    """Tokens of the text that the head had not read before."""


@contextmanager
def watch_drafts(kind: type[Any] = AutoregressiveProposer) -> Iterator[list[SeenDraft]]:
    """Collects the drafts of all engines that run in the block, by proposers of one kind.

    Left out is what is not meant to follow the whole text: probes of the latest tokens, and what comes after a token
    whose KV was gated. Of trees, those of requests whose logits are edited: their probabilities are, too.
    """
    seen: list[SeenDraft] = []
    honest = kind.propose

    def propose(self: Any, batch: DecodeBatch, plan: SpecPlan) -> Drafts:
        unread = batch.lengths - self._marks.seen[batch.lanes] if hasattr(self, "_marks") else 0 * batch.lengths
        drafts = honest(self, batch, plan)
        of_drawn = plan.stop is not None and plan.stop.signal == "token_prob"
        lens = np.minimum(drafts.lens, 1) if plan.gate_kv_below else drafts.lens
        for i in () if plan.probe_context else np.flatnonzero(lens).tolist():
            lane = batch.lanes[i : i + 1]
            greedy = bool(self._sampler.greedy[lane].all()) and self._sampler.leaves_alone(lane)
            branches = drafts.parents is not None
            for path in paths_of(drafts, i) if branches and greedy else () if branches else [np.arange(lens[i])]:
                assert drafts.confidence is not None
                seen.append(
                    SeenDraft(
                        text=batch.tokens[lane[0], : batch.lengths[i]].tolist(),
                        tokens=drafts.tokens[i, path].tolist(),
                        confidence=drafts.confidence[i, path].copy(),
                        of_drawn=of_drawn or branches,
                        greedy=greedy and not branches,
                        unread=int(unread[i]),
                    )
                )
        return drafts

    with mock.patch.object(kind, "propose", propose):
        yield seen


def paths_of(drafts: Drafts, i: int) -> list[np.ndarray]:
    """The nodes from the root to every leaf of a request's tree."""
    assert drafts.parents is not None
    parents, leaves = drafts.parents[i, : drafts.lens[i]].tolist(), []
    for leaf in sorted(set(range(len(parents))) - set(parents)):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        leaves.append(np.array(path))
    return leaves


class Fitted(Protocol):
    """A drafter of the tests whose drafts are known without an engine."""

    @property
    def path(self) -> str: ...

    @property
    def ids(self) -> torch.Tensor:
        """[drafted vocabulary] the target's."""
        ...

    proposer: ClassVar[type[Any]]
    """Of what it drafts in."""
    tolerance: ClassVar[float]
    """Of ``chances``, relative to each."""

    def chances(self, text: Sequence[int], drafted: Sequence[int]) -> np.ndarray:
        """[drafted + 1, drafted vocabulary] probabilities of what should follow a text, and each token drafted behind
        it, from a pass over all of that."""
        ...


def check_drafts(seen: Sequence[SeenDraft], head: Fitted) -> None:
    """Each draft has the confidences of passes over the whole text; and their first choices, where these are to be
    drafted."""
    assert seen
    for draft in seen:
        chances = head.chances(draft.text, draft.tokens[:-1])
        drafted = np.where(head.ids.numpy() == np.array(draft.tokens)[:, None], chances, 0.0).sum(-1)
        best = chances.max(-1)
        wanted, near = drafted if draft.of_drawn else best, head.tolerance
        np.testing.assert_allclose(draft.confidence, wanted, rtol=near, atol=near / 200, err_msg=str(draft))
        if draft.greedy:
            np.testing.assert_allclose(drafted, best, rtol=near, err_msg=str(draft))
