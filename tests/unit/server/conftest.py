"""An engine that speculates, and a server over it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from dynaspec import AsyncLLM
from support.checkpoints import Pair
from unit.server.serving import Client, make_app


@pytest.fixture(scope="module")
def llm(tiny: Pair) -> Iterator[AsyncLLM]:
    """Drafts three tokens in every step, each of which is told."""
    engine = AsyncLLM(
        tiny.target,
        speculative_config={"model": tiny.drafter, "policy": "constant", "num_speculative_tokens": 3},
        max_num_seqs=8,
        stream_interval_s=0,
    )
    yield engine
    engine.close()


@pytest.fixture
async def client(llm: AsyncLLM) -> AsyncIterator[Client]:
    one = Client(make_app(llm))
    yield one
    await one.close()
