"""Drafts of a head as an engine makes them, held against a plain reference that reads every text from its beginning.

No output shows whether they are right: a head that reads another text's states, or its own where its target's are
known, is accepted less often, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

from dynaspec.contract.proposer import DecodeBatch, Drafts
from dynaspec.contract.step import SpecPlan
from dynaspec.model.decoder_heads.loader import load_head
from dynaspec.propose.autoregressive import AutoregressiveProposer

from .decoder_heads import FittedHead
from .head_passes import logits_of, states_of


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


def check_drafts(seen: Sequence[SeenDraft], head: FittedHead) -> None:
    """Each draft has the confidences of the head's own passes over the whole text, which are those of the plain
    reference up to rounding; and its first choices, where these are to be drafted.
    """
    assert seen
    own = load_head(head.layout.kind, head.path, head.target)
    for draft in seen:
        states = states_of(head.target, draft.text[:-1], head.layout.shape.states)
        chain = draft.tokens[:-1]
        passes = logits_of(own, states, draft.text, chain, len(draft.text))[len(draft.text) - 2 :]
        chances = passes.softmax(-1).numpy()
        drafted = np.where(head.ids.numpy() == np.array(draft.tokens)[:, None], chances, 0.0).sum(-1)
        best = chances.max(-1)
        wanted = drafted if draft.of_drawn else best
        np.testing.assert_allclose(draft.confidence, wanted, rtol=1e-5, atol=1e-7, err_msg=str(draft))
        reference = head.logits(draft.text, chain).softmax(-1).numpy()
        np.testing.assert_allclose(chances, reference, rtol=0.05, atol=0.01, err_msg=str(draft))
        if draft.greedy:
            np.testing.assert_allclose(drafted, best, rtol=1e-5, err_msg=str(draft))
