"""Lookups that Transformers' ``generate`` is given."""

from __future__ import annotations

import pytest
import torch

from dynaspec.control.keys import SuffixSettings
from dynaspec.hosts.transformers.drafters import SuffixLookup, TextLookup
from dynaspec.propose.suffix import ResponseCache

REPEATS = [5, 6, 7, 8, 5, 6, 7]
ENDS_NEWLY = [*REPEATS, 99]


def suffix() -> SuffixLookup:
    settings = SuffixSettings()
    return SuffixLookup(settings, 4, ResponseCache(settings.max_tree_depth, 10, 1000))


@pytest.mark.parametrize("make", [lambda: TextLookup(1, 3, 4), suffix], ids=["ngram", "suffix"])
def test_a_lookup_drafts_what_it_has_found_last(make) -> None:
    lookup = make()
    lookup.offer(torch.tensor([REPEATS]))
    drafted = lookup.draft(torch.tensor([REPEATS]), 1, None)
    assert drafted.sequence[0].tolist() == [*REPEATS, 8]
    lookup.offer(torch.tensor([ENDS_NEWLY]))  # finds nothing
    nothing = lookup.draft(torch.tensor([ENDS_NEWLY]), 1, None)
    assert (nothing.length, nothing.sequence[0].tolist()) == (0, ENDS_NEWLY)
