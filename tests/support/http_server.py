"""A server in a test's own event loop, on a free port of this machine."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from dynaspec import AsyncLLM
from dynaspec.server.config import ServerConfig
from dynaspec.server.run import DrainingServer, bind, listen, make_server, make_state
from dynaspec.server.state import ServerState

PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Serving:
    """A running server."""

    url: str
    port: int
    state: ServerState
    server: DrainingServer
    task: asyncio.Task[None]

    def signal(self) -> None:
        """What a SIGTERM does."""
        self.server.handle_exit(signal.SIGTERM, None)

    async def ended(self) -> None:
        """Waits until it has shut down."""
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.shield(self.task)


@asynccontextmanager
async def serving(llm: AsyncLLM, **options: Any) -> AsyncIterator[Serving]:
    """Serves until the end of the block.

    Args:
        options: fields of ``ServerConfig``.
    """
    config = ServerConfig.build({}, **({"port": 0, "served_model_name": "tiny"} | options))
    state = make_state(llm, config)
    server = make_server(state)
    with bind(config) as bound:
        url = listen(bound, config)
        one = Serving(url, bound.getsockname()[1], state, server, asyncio.create_task(server.serve([bound])))
        try:
            yield one
        finally:
            one.signal()
            one.signal()
            await one.ended()
