"""What the exactness tests share."""

from __future__ import annotations

import pytest

from support.checkpoints import Pair
from support.vocabularies import save_other_vocabulary


@pytest.fixture(params=["draft model", "head"])
def drafter(request: pytest.FixtureRequest, tiny: Pair, head: str) -> str:
    """The checkpoint of what drafts. The head does not know every token that may be allowed."""
    return head if request.param == "head" else tiny.drafter


@pytest.fixture(scope="session")
def tiny_other(tiny: Pair, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny drafter with another vocabulary."""
    return save_other_vocabulary(tmp_path_factory.mktemp("other"), tiny.drafter, merges=40, foreign=3)
