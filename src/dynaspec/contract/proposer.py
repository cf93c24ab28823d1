"""The protocol between the engine and whoever drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from .step import ProposerTraits, SpecPlan

if TYPE_CHECKING:
    import torch

Ints = npt.NDArray[np.int64]


class DecodeBatch(Protocol):
    """What a proposer may read of the requests that decode in this step. Columns have one entry a request.

    A *lane* is the row that a running request keeps in all per-request tables until it ends or is preempted.
    """

    @property
    def ids(self) -> Sequence[str]: ...

    lanes: Ints
    """[B]"""
    lengths: Ints
    """[B] committed tokens, the last of which no model has processed yet."""
    tokens: npt.NDArray[np.int32]
    """[lanes, max_model_len] committed tokens of every lane; columns from ``lengths`` on are undefined."""
    block_tables: npt.NDArray[np.int32]
    """[lanes, max blocks] KV blocks of every lane, reserved for ``lengths`` + granted nodes."""


class TargetStep(Protocol):
    """What a target pass has committed, as proposers see it after the pass."""

    lanes: Ints
    """[N] lanes that had rows in the pass, decoding and prefilling ones."""
    lengths: Ints
    """[N] committed tokens before the pass."""
    accepted: Ints
    """[N] draft tokens accepted; 0 for prefill chunks."""


@dataclass(frozen=True, slots=True)
class NewText:
    """What a step has made output of running requests, the last tokens of those that end with it too."""

    lanes: Ints
    """[N] lanes that decoded, or whose prompt is complete."""
    tokens: npt.NDArray[np.int32]
    """[lanes, max_model_len] as in ``DecodeBatch``."""
    starts: Ints
    """[N] committed tokens before the step."""
    ends: Ints
    """[N] committed tokens after it."""


@dataclass(slots=True)
class Drafts:
    """Proposed tokens of one step; chains unless ``parents`` is set."""

    tokens: npt.NDArray[np.int64]
    """[B, max depth], zero-padded. Padding is neither verified nor counted."""
    lens: Ints
    """[B]"""
    confidence: npt.NDArray[np.float32] | None = None
    """[B, max depth] signal of each token; None where no proposer has one, NaN where this request's has none."""
    signal: npt.NDArray[np.float32] | None = None
    """[B, max depth] what speaks for each token (``DraftView.signal``); None or NaN = its confidence alone."""
    repeat_bonus: npt.NDArray[np.float32] | None = None
    """[B, max depth] the part of the signal that depends on which token was drawn (``DraftView.repeat_bonus``); None or
    NaN = nothing."""
    q: torch.Tensor | None = None
    """[B, max depth, vocabulary] the very distributions drawn from; None for deterministic drafts."""
    parents: npt.NDArray[np.int64] | None = None
    """[B, max nodes] for trees, see ``DraftView.parents``; ``tokens``, ``lens`` and signals are by node, q is None."""
    early_exit: npt.NDArray[np.bool_] | None = None
    """[B] drafting stopped before the granted length because of the stop rule."""
    rows_per_pass: tuple[int, ...] = ()
    kv_skipped: int = 0
    """See ``Work``."""
    kv_redone: int = 0
    """See ``Work``."""
    skipped: dict[str, str] | None = None
    """Request id → reason, where a granted depth came to nothing (``catching_up``, ``no_match``, …)."""


@dataclass(frozen=True, slots=True)
class ProposerNeeds:
    """What a proposer wants from the engine."""

    taps: tuple[int, ...] = ()
    """Hidden states of the target that it reads, see ``model.taps``."""
    kv: bool = False
    """Drafts by passes over KV, its own or the target's."""
    text: bool = False
    """Is told of all output (``Proposer.commit``)."""


@dataclass(frozen=True, slots=True)
class Offers:
    """What a lookup proposer has found, of B requests."""

    found: Ints
    """[B, 2] match length and tokens on offer, as in ``StepView.offers``."""
    tokens: npt.NDArray[np.int64]
    """[B, ≥ most on offer] the tokens themselves; what is behind them is undefined."""

    def select(self, keep: Sequence[int]) -> Offers:
        """What has been found for some of the requests."""
        return Offers(self.found[list(keep)], self.tokens[list(keep)])


class KeptText(NamedTuple):
    """Text that a proposer keeps to draft from."""

    answers: int
    """Of requests that may have ended."""
    tokens: int
    """Of all answers."""
    bytes: int
    """Memory, that for running requests' own texts included."""


@runtime_checkable
class KeepsText(Protocol):
    """A proposer whose memory goes with what it has read."""

    def kept(self) -> KeptText: ...


class Proposer(Protocol):
    """Drafts tokens. Keeps a watermark for each lane: the committed tokens that its state has seen."""

    traits: ProposerTraits
    needs: ProposerNeeds

    def lag(self, batch: DecodeBatch) -> tuple[int, ...]:
        """Committed tokens, but the last, that its state has not seen, for each request."""
        ...

    def peek(self, batch: DecodeBatch) -> Offers | None:
        """For lookup proposers: what they have found for each request. Others: None."""
        ...

    def propose(self, batch: DecodeBatch, plan: SpecPlan) -> Drafts:
        """Drafts at most ``plan.depth`` tokens in a row and ``plan.nodes`` in all for each request, honouring
        ``plan.stop`` between passes and, where it can draft trees, ``plan.tree``."""
        ...

    def advance(self, step: TargetStep) -> None:
        """Called after every target pass, prefill chunks too."""
        ...

    def commit(self, text: NewText) -> None:
        """Tokens have become output. Called after the step that made them, if ``needs.text``."""
        ...

    def admit(self, lane: int, cached_blocks: Sequence[int], cache_salt: str) -> None:
        """A request takes a lane; its first blocks came from the prefix cache.

        Args:
            cache_salt: requests with different ones share nothing that is kept.
        """
        ...

    def evict(self, lane: int) -> None:
        """The lane's request was preempted or has ended: its KV is gone."""
        ...
