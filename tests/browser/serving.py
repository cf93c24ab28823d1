"""The real app on a free port of this machine, in a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from dynaspec import AsyncLLM
from dynaspec.server.app import create_app
from dynaspec.server.config import ServerConfig
from dynaspec.server.middleware import Admission
from dynaspec.server.state import ServerState

MODEL = "tiny <b>model</b>"
"""A name that would show if it got into the page as anything but text."""


class Served:
    """A running server; options are those of ``ServerConfig``."""

    def __init__(self, llm: AsyncLLM, **options: Any) -> None:
        self._state = ServerState(
            llm=llm,
            config=ServerConfig.build(stats_interval_s=0.2, access_log=False, **options),
            admission=Admission(64, 64),
            served_names=(MODEL,),
            started_at=int(time.time()),
        )
        self._server = uvicorn.Server(
            uvicorn.Config(create_app(self._state), port=0, log_level="error", lifespan="off", ws="none")
        )
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise RuntimeError("the server has not started")
            time.sleep(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/"

    def stop(self) -> None:
        """Lets watchers go; may be called twice."""
        self._state.admission.drain()
        self._server.should_exit = True
        self._thread.join()


@contextmanager
def serving(llm: AsyncLLM, **options: Any) -> Iterator[Served]:
    """A server for as long as it is needed."""
    running = Served(llm, **options)
    try:
        yield running
    finally:
        running.stop()
