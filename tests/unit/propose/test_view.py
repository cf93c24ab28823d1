"""What drafts look like to a controller."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from dynaspec.contract.proposer import Drafts
from dynaspec.propose.router import draft_view

NAN = float("nan")
DRAFTS = Drafts(tokens=np.ones((3, 3), dtype=np.int64), lens=np.array([2, 0, 3]))
CONFIDENCE = np.array([[0.5, 0.25, 0.0], [0.0] * 3, [NAN] * 3], dtype=np.float32)
EVIDENCE = np.array([[NAN] * 3, [9.0] * 3, [1.5, -2.5, 6.0]], dtype=np.float32)


def test_signals_are_cut_to_the_drafts() -> None:
    view = draft_view(replace(DRAFTS, confidence=CONFIDENCE, signal=EVIDENCE))
    assert view.length == (2, 0, 3)
    assert view.confidence == ((0.5, 0.25), (), ())
    assert view.signal == ((), (), (1.5, -2.5, 6.0))


def test_a_proposer_may_have_either_both_or_none() -> None:
    assert draft_view(DRAFTS).confidence == ((), (), ())
    assert draft_view(DRAFTS).signal == ()
    only = draft_view(replace(DRAFTS, signal=EVIDENCE))
    assert (only.confidence, only.signal) == (((), (), ()), ((), (), (1.5, -2.5, 6.0)))
    assert draft_view(replace(DRAFTS, confidence=CONFIDENCE)).signal == ()
