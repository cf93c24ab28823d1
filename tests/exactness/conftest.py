"""What the exactness tests share."""

from __future__ import annotations

import pytest

from support.checkpoints import Pair


@pytest.fixture(params=["draft model", "head"])
def drafter(request: pytest.FixtureRequest, tiny: Pair, head: str) -> str:
    """The checkpoint of what drafts. The head does not know every token that may be allowed."""
    return head if request.param == "head" else tiny.drafter
