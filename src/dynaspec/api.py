"""``LLM`` for scripts, ``AsyncLLM`` for servers. Names and meaning are vLLM's."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Literal, cast

import numpy as np
from tqdm import tqdm

from dynaspec.contract.errors import ConfigError, DynaspecError, RequestError
from dynaspec.contract.outputs import RequestOutput
from dynaspec.contract.sampling_params import RequestOutputKind, SamplingParams
from dynaspec.engine.build import build_engine
from dynaspec.engine.config import EngineConfig
from dynaspec.engine.engine import Engine
from dynaspec.engine.intake import Prompt
from dynaspec.engine.tokenizer import Message, Tokenizer
from dynaspec.observe.counts import SpecCounts

_log = logging.getLogger(__name__)

Backend = Literal["dynaspec"]


def _engine(model: str, backend: str, speculative_config: Any, options: Mapping[str, Any]) -> Engine:
    if backend != "dynaspec":
        raise ConfigError(f"backend is {backend!r}; expected 'dynaspec', the only one in this version")
    return build_engine(EngineConfig.build(os.environ, model=model, speculative_config=speculative_config, **options))


class LLM:
    """Decodes prompts in batches.

    Args:
        model: checkpoint folder or hub id.
        speculative_config: mapping, JSON text or ``SpeculativeConfig``; None = plain decoding.
        options: fields of ``engine.config.EngineConfig``.

    Raises:
        ConfigError, CheckpointError, CapacityError: what was given cannot work.
    """

    def __init__(
        self,
        model: str,
        *,
        speculative_config: Any = None,
        backend: Backend = "dynaspec",
        **options: Any,
    ) -> None:
        self._engine = _engine(model, backend, speculative_config, options)
        self._ids = count()

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

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        on_output: Callable[[int, RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Continues every prompt; outputs in the order of the prompts.

        Args:
            prompts: one prompt or several; each is text, token ids or a mapping with one of them.
            sampling_params: for all prompts, or one for each.
            use_tqdm: show a progress bar over the prompts.
            on_output: called with (prompt's index, output so far) whenever a prompt has got tokens.

        Raises:
            RequestError: a prompt or parameters that cannot be served; nothing has been started.
        """
        many = _as_list(prompts)
        params = _params_for(many, sampling_params)
        return self._run(many, params, use_tqdm, on_output)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        on_output: Callable[[int, RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or several, through the model's chat template."""
        one = bool(messages) and isinstance(messages[0], Mapping)
        chats: Sequence[Any] = [messages] if one or not messages else messages
        prompts = [self.tokenizer.render_chat(chat) for chat in chats]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, on_output=on_output)

    def stats(self) -> SpecCounts:
        """Totals since the engine was built; subtract two of them for a span."""
        return self._engine.stats()

    def verify_integrity(self) -> None:
        """Checks the KV cache's books.

        Raises:
            IntegrityError: they contradict each other.
        """
        self._engine.verify_integrity()

    def close(self) -> None:
        """Frees the engine's threads."""
        self._engine.close()

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        use_tqdm: bool,
        on_output: Callable[[int, RequestOutput], None] | None,
    ) -> list[RequestOutput]:
        index_of: dict[str, int] = {}
        try:
            for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
                request_id = str(next(self._ids))
                if on_output is None:
                    one = replace(one, output_kind=RequestOutputKind.FINAL_ONLY)
                self._engine.add(request_id, prompt, one)
                index_of[request_id] = i
            outputs = self._drain(index_of, on_output)
            final = dict(tqdm(outputs, total=len(prompts), desc="prompts", disable=not use_tqdm))
        finally:
            for request_id in index_of:
                self._engine.abort(request_id)
        return [final[i] for i in range(len(prompts))]

    def _drain(
        self, index_of: Mapping[str, int], on_output: Callable[[int, RequestOutput], None] | None
    ) -> Iterator[tuple[int, RequestOutput]]:
        while self._engine.unfinished:
            for output in self._engine.step():
                i = index_of[output.request_id]
                if on_output is not None:
                    on_output(i, output)
                if output.finished:
                    yield i, output


@dataclass(slots=True)
class _Stream:
    """Where one request's outputs go; the queue belongs to ``loop``."""

    loop: asyncio.AbstractEventLoop
    outputs: asyncio.Queue[RequestOutput | Exception]

    def put(self, item: RequestOutput | Exception) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.outputs.put_nowait, item)


class AsyncLLM:
    """The same engine for asyncio: requests come and go while a thread of its own steps.

    Args and errors: see ``LLM``.
    """

    def __init__(
        self,
        model: str,
        *,
        speculative_config: Any = None,
        backend: Backend = "dynaspec",
        **options: Any,
    ) -> None:
        self._engine = _engine(model, backend, speculative_config, options)
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._gate = threading.Lock()
        self._ended: Exception | None = None
        """Why no more requests are taken; changed under the gate."""
        self._thread = threading.Thread(target=self._serve, name="dynaspec-engine", daemon=True)
        self._thread.start()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    @property
    def healthy(self) -> bool:
        """The engine's thread is alive and has met no error."""
        return self._ended is None

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields outputs as they grow (what they carry: ``SamplingParams.output_kind``). Leaving early aborts.

        Raises:
            RequestError: the request cannot be served.
            DynaspecError: the engine has stopped.
        """
        params = sampling_params or SamplingParams()
        stream = _Stream(asyncio.get_running_loop(), asyncio.Queue())
        self._order(lambda: self._add(request_id, prompt, params, stream))
        finished = False
        try:
            while not finished:
                item = await stream.outputs.get()
                if isinstance(item, Exception):
                    finished = True
                    raise item
                finished = item.finished
                yield item
        finally:
            if not finished and self.healthy:
                self._order(lambda: self._abort(request_id, stream))

    async def abort(self, request_id: str) -> None:
        """Ends a request; its stream yields a last output with finish reason ``abort``."""
        self._order(lambda: self._abort(request_id, None))

    def stats(self) -> SpecCounts:
        """See ``LLM.stats``; safe from any thread."""
        return self._engine.stats()

    def close(self) -> None:
        """Aborts everything and waits for the engine's thread."""
        self._commands.put(None)
        self._thread.join()

    def _order(self, command: Callable[[], None]) -> None:
        """
        Raises:
            DynaspecError: the engine has stopped.
        """
        with self._gate:
            if self._ended is not None:
                raise DynaspecError("the engine has stopped; expected a running one") from self._ended
            self._commands.put(command)

    # --- the engine's thread ----------------------------------------------------------------------------------

    def _serve(self) -> None:
        ended: Exception = DynaspecError("the engine was closed; expected a running one")
        try:
            while self._take_commands():
                for output in self._engine.step():
                    self._emit(output)
                self._engine.log_stats(time.monotonic())
        except Exception as error:  # whatever it was, every waiting caller must hear of it
            _log.exception("the engine has stopped")
            ended = error
        finally:
            self._end_all(ended)

    def _take_commands(self) -> bool:
        """Runs what callers have asked for; waits if there is nothing else to do. False: close."""
        while True:
            try:
                command = self._commands.get(block=not self._engine.unfinished)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _add(self, request_id: str, prompt: Prompt, params: SamplingParams, stream: _Stream) -> None:
        try:
            if self._ended is not None:
                raise self._ended
            self._engine.add(request_id, prompt, params)
        except DynaspecError as error:
            stream.put(error)
        else:
            self._streams[request_id] = stream

    def _abort(self, request_id: str, only: _Stream | None) -> None:
        """Aborts a request, but not another one that has taken its id since."""
        if only is None or self._streams.get(request_id) is only:
            output = self._engine.abort(request_id)
            if output is not None:
                self._emit(output)

    def _emit(self, output: RequestOutput) -> None:
        self._streams[output.request_id].put(output)
        if output.finished:
            del self._streams[output.request_id]

    def _end_all(self, error: Exception) -> None:
        """Tells everyone, those whose command is still in the queue too."""
        with self._gate:
            self._ended = DynaspecError(f"the engine has stopped: {error}")
        while not self._commands.empty():
            command = self._commands.get()
            if command is not None:
                command()
        for stream in self._streams.values():
            stream.put(self._ended)
        self._streams.clear()
        self._engine.close()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    one = isinstance(prompts, str | Mapping) or (bool(prompts) and isinstance(prompts[0], int | np.integer))
    return cast(list[Prompt], [prompts] if one else list(prompts))


def _params_for(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * len(prompts)
    wrong = next((one for one in params if not isinstance(one, SamplingParams)), None)
    if wrong is not None:
        raise RequestError(f"sampling_params holds a {type(wrong).__name__}; expected SamplingParams")
    if len(params) != len(prompts):
        raise RequestError(
            f"{len(params)} sampling_params were given for {len(prompts)} prompts; expected one for each"
        )
    return list(params)
