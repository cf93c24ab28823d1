"""``AsyncLLM``: requests come and go while an engine steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from dynaspec.contract.errors import ConfigError
from dynaspec.contract.outputs import RequestOutput
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.engine.config import EngineConfig
from dynaspec.engine.intake import Prompt
from dynaspec.engine.tokenizer import Tokenizer
from dynaspec.observe.counts import SpecCounts
from dynaspec.observe.snapshot import EngineSnapshot

from .backend import Backend, open_embedded
from .engine_thread import EngineThread
from .stream import Stream


class AsyncLLM:
    """The engine of ``LLM`` for asyncio; it steps in a thread of its own. Any number of event loops may use it.

    Args and errors: see ``LLM``; the backend is always ``dynaspec``.
    """

    def __init__(
        self,
        model: str,
        *,
        speculative_config: Any = None,
        backend: Backend = "dynaspec",
        **options: Any,
    ) -> None:
        if backend != "dynaspec":
            raise ConfigError(
                f"AsyncLLM was given backend={backend!r}; expected 'dynaspec', or the command "
                "'dynaspec serve --backend vllm', as requests that come and go are served there by vLLM's own server"
            )
        self._engine = open_embedded(model, speculative_config, options)
        self._thread = EngineThread(self._engine, self._engine.config.stream_interval_s)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    @property
    def config(self) -> EngineConfig:
        return self._engine.config

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt included."""
        return self._engine.max_model_len

    @property
    def healthy(self) -> bool:
        """The engine is running: it has neither failed nor been closed."""
        return self._thread.running

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields outputs as they grow (what they carry: ``SamplingParams.output_kind``). Leaving early aborts.

        Who reads more slowly than the engine decodes gets fewer outputs, not late ones: what has come meanwhile is
        handed over as one. The id may be used again as soon as the generator is closed.

        Raises:
            RequestError: the request cannot be served.
            DynaspecError: the engine has stopped.
        """
        params = sampling_params or SamplingParams()
        if params.structured_outputs is not None:  # to compile it can take long, and the engine has others to serve
            await asyncio.to_thread(self._engine.prepare, params)
        stream = Stream(asyncio.get_running_loop())
        self._thread.submit(request_id, prompt, params, stream)
        try:
            while not stream.ended:
                yield await stream.take()
        finally:
            stream.leave()

    async def abort(self, request_id: str) -> None:
        """Ends a request; its stream yields a last output with finish reason ``abort``.

        Raises:
            DynaspecError: the engine has stopped.
        """
        self._thread.abort(request_id)

    async def abort_all(self) -> None:
        """Ends every request as ``abort`` ends one."""
        self._thread.abort_all()

    def stats(self) -> SpecCounts:
        """See ``LLM.stats``; safe from any thread."""
        return self._engine.stats()

    async def snapshot(self) -> EngineSnapshot:
        """What the engine is doing, taken between two steps.

        Raises:
            DynaspecError: the engine has stopped.
        """
        return await asyncio.wrap_future(self._thread.ask(self._engine.snapshot))

    async def verify_integrity(self) -> None:
        """Checks the KV cache's books between two steps.

        Raises:
            IntegrityError: they contradict each other.
            DynaspecError: the engine has stopped.
        """
        await asyncio.wrap_future(self._thread.ask(self._engine.verify_integrity))

    async def wait_ended(self) -> Exception:
        """Waits until the engine has stopped, and says why; any number of callers may."""
        return await asyncio.wrap_future(self._thread.end())

    def close(self) -> None:
        """Aborts everything and waits for the engine's thread. From any thread, as often as one likes."""
        self._thread.close()
