"""Look-ups beside a model's drafts: where a text goes on as it once did, tokens cost the target's rows and no more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dynaspec.contract.step import StepView, StopRule

from .agreement import Agreement
from .drafter import Drafter, LookupDrafter, ModelDrafter, Situation
from .guard import Prediction


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


class LookupsBeside:
    """Decides anew in every step, as what is found changes with every token; costs one compiled call."""

    def __init__(self, index: int, drafter: LookupDrafter) -> None:
        """
        Args:
            index: the lookup's, among the host's proposers.
        """
        self._index = index
        self._drafter = drafter

    def offered(self, view: StepView) -> bool:
        """Whether a look-up has found anything."""
        offers = view.offers[self._index]
        return offers is not None and any(match for match, _ in offers)

    def find(self, view: StepView, situation: Situation, agreed: Agreement, alone: Prediction) -> Found | None:
        """The requests for which a look-up brings more than what was agreed; None if there are none.

        Args:
            alone: what is expected of the step without look-ups; one that drafts, or plain decoding.
        """
        lengths, requests = agreed.lengths, len(view.ids)
        instead = lengths.worth if alone.drafts else np.zeros(requests)
        situation.base_rows += lengths.rows if alone.drafts else 0.0
        wish = self._drafter.finds(view, situation, instead)
        if not wish.rows:
            return None
        found = wish.depth > 0
        if not alone.drafts:
            owner = np.where(found, self._index, 0)
            return Found(
                depth=wish.depth.tolist(),
                owner=tuple(owner.tolist()),
                stop=None,
                emitted=requests + wish.expected,
                rows=wish.rows,
                context=wish.context,
                drafting_s=0.0,
            )
        owner = np.where(found, self._index, 0 if agreed.owner is None else agreed.owner)
        kept = float(lengths.depth[~found].sum() / lengths.depth.sum())
        return Found(
            depth=np.where(found, wish.depth, agreed.wish).tolist(),
            owner=tuple(owner.tolist()),
            stop=agreed.stop if kept else None,
            emitted=requests + wish.expected + kept * lengths.expected,
            rows=wish.rows + kept * lengths.rows,
            context=wish.context + kept * lengths.context,
            drafting_s=lengths.seconds if kept else 0.0,
        )


def beside_models(drafters: Sequence[Drafter]) -> LookupsBeside | None:
    """The look-up that stands beside drafters with models; None where there is none, or nothing else."""
    lookups = [(i, drafter) for i, drafter in enumerate(drafters) if isinstance(drafter, LookupDrafter)]
    if not lookups or not any(isinstance(drafter, ModelDrafter) for drafter in drafters):
        return None
    return LookupsBeside(*lookups[0])
