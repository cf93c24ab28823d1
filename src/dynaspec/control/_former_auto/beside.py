"""Look-ups beside a model's drafts: where a text goes on as it once did, tokens cost the target's rows and no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dynaspec.contract.step import StepView, StopRule

from .agreement import Agreement
from .drafter import Drafter, ModelDrafter, Situation
from .lengths import merge_depths
from .lookup_drafter import LookupDrafter
from .parts import row_s
from .prediction import Prediction

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Found:
    """A step in which look-ups draft for some requests; the others do as was agreed."""

    depth: list[int]
    """[B]"""
    owner: tuple[int, ...]
    """[B] proposers."""
    stop: StopRule | None
    emitted: float
    """Tokens expected."""
    rows: float
    """Drafted tokens expected."""
    context: float
    """KV entries that their rows see."""
    drafting_s: float
    share: float
    """Of the requests that look-ups draft for."""
    gain_s: float
    """Seconds that this is expected to bring."""


class LookupsBeside:
    """Decides anew in every step, as what is found changes with every token; costs two compiled calls."""

    def __init__(self, index: int, drafter: LookupDrafter, target: Floats) -> None:
        """
        Args:
            index: the lookup's, among the host's proposers.
            target: what its rows cost, see ``StepCosts``.
        """
        self._index = index
        self._drafter = drafter
        self._target = target

    def asked(self, view: StepView) -> bool:
        """Whether the host has asked the look-up."""
        return view.offers[self._index] is not None

    def offered(self, view: StepView) -> bool:
        """Whether a look-up has found anything."""
        offers = view.offers[self._index]
        return offers is not None and any(match for match, _ in offers)

    def find(
        self, view: StepView, situation: Situation, agreed: Agreement, alone: Prediction, trust: float
    ) -> Found | None:
        """The requests for which a look-up brings more than what was agreed; None if there are none.

        Args:
            alone: what is expected of the step without look-ups; one that drafts, or plain decoding.
            trust: what steps that draft really gave a second, over what was expected.
        """
        lengths, requests = agreed.lengths, len(view.ids)
        agreed_depth, instead, parts = np.zeros(requests, np.int64), np.zeros(requests), np.zeros(3)
        base_rows = situation.base_rows
        if alone.drafts:
            agreed_depth = lengths.depth
            more = (trust - 1.0) * alone.emitted * situation.value / requests
            instead = np.where(agreed_depth > 0, lengths.worth + more, 0.0)
            base_rows += lengths.rows
            parts[:] = lengths.expected, lengths.rows, lengths.seconds
        # There is something else that is known to pay: no optimism.
        surely = replace(situation, base_rows=base_rows, optimism=0.0)
        wish = self._drafter.finds(self._drafter.offers(view), surely, instead)
        if not wish.rows:
            return None
        owner = np.array(agreed.owner or (0,) * requests)
        row, value = row_s(self._target, base_rows), situation.value
        count, kept = merge_depths(wish.depth, self._index, agreed_depth, agreed.granted, value, row, parts, owner)
        # Who leaves the model's passes leaves them to the others to pay.
        others = float(instead[owner != self._index].sum()) - (1.0 - kept) * parts[2] if kept else 0.0
        gain_s = float(wish.worth.sum()) - wish.seconds + others - float(instead.sum())
        if gain_s <= 0.0:
            return None
        return Found(
            depth=wish.depth.tolist(),
            owner=tuple(owner.tolist()),
            stop=agreed.stop if kept else None,
            emitted=requests + wish.expected + kept * lengths.expected,
            rows=wish.rows + kept * lengths.rows,
            context=wish.context + kept * lengths.context,
            drafting_s=lengths.seconds if kept else 0.0,
            share=count / requests,
            gain_s=gain_s,
        )


def beside_models(drafters: Sequence[Drafter], target: Floats) -> LookupsBeside | None:
    """The look-up that stands beside drafters with models; None where there is none, or nothing else."""
    lookups = [(i, drafter) for i, drafter in enumerate(drafters) if isinstance(drafter, LookupDrafter)]
    if not lookups or not any(isinstance(drafter, ModelDrafter) for drafter in drafters):
        return None
    return LookupsBeside(*lookups[0], target)
