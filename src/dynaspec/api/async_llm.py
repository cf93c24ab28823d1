"""``AsyncLLM``: requests come and go while an engine steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Self, Unpack

from dynaspec.api.options import check_adapters, note_priority
from dynaspec.contract.outputs import RequestOutput
from dynaspec.contract.sampling_params import SamplingParams
from dynaspec.engine.config import EngineConfig
from dynaspec.engine.intake import Prompt
from dynaspec.engine.sampling_defaults import SamplingDefaults
from dynaspec.engine.tokenizer import Tokenizer
from dynaspec.observe.counts import SpecCounts
from dynaspec.observe.families import Metric
from dynaspec.observe.stats import EngineSnapshot

from .engine_thread import EngineThread, Stream
from .llm import open_embedded
from .options import EngineOptions, Speculation


class AsyncLLM:
    """The engine of ``LLM`` for asyncio; it steps in a thread of its own. Any number of event loops may use it.

    Args and errors: see ``LLM``. Under vLLM ``dynaspec serve --backend vllm`` serves requests that come and go.
    """

    def __init__(
        self, model: str, *, speculative_config: Speculation | None = None, **options: Unpack[EngineOptions]
    ) -> None:
        self._engine = open_embedded(model, speculative_config, options)
        self._thread = EngineThread(self._engine, self._engine.config.stream_interval_s)

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> Self:
        """From vLLM's ``AsyncEngineArgs`` (``dynaspec.AsyncEngineArgs``)."""
        return cls(**engine_args.options())

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    def get_tokenizer(self) -> Any:
        """See ``LLM.get_tokenizer``."""
        return self.tokenizer.of_transformers

    @property
    def config(self) -> EngineConfig:
        return self._engine.config

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, prompt included."""
        return self._engine.max_model_len

    @property
    def sampling_defaults(self) -> SamplingDefaults:
        """How requests without sampling parameters are sampled: see the option ``generation_config``."""
        return self._engine.sampling_defaults

    @property
    def healthy(self) -> bool:
        """The engine is running: it has neither failed nor been closed."""
        return self._thread.running

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str,
        lora_request: None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields outputs as they grow (what they carry: ``SamplingParams.output_kind``). Leaving early aborts.

        A reader that is slower than the engine gets fewer outputs, not late ones: those that came meanwhile are merged
        into one. The id may be used again as soon as the generator is closed.

        Args:
            lora_request: as vLLM has it; only None.
            priority: as vLLM has it, of no effect.

        Raises:
            RequestError: the request cannot be served.
            DynaspecError: the engine has stopped.
        """
        check_adapters(lora_request)
        note_priority(priority)
        params = sampling_params or self.sampling_defaults.params()
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

    async def get_metrics(self) -> list[Metric]:
        """See ``LLM.get_metrics``; taken between two steps.

        Raises:
            DynaspecError: the engine has stopped.
        """
        return await asyncio.wrap_future(self._thread.ask(self._engine.metrics))

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

    def shutdown(self) -> None:
        """``close`` by vLLM's name."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.close)
