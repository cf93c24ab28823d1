"""Runs the engine's requests behind one HTTP request, and ends them when nobody waits for them any more."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.types import Receive

from dynaspec.api import AsyncLLM
from dynaspec.contract.errors import DynaspecError, RequestError
from dynaspec.contract.outputs import RequestOutput
from dynaspec.contract.sampling_params import SamplingParams

from .errors import ApiError, bad_request, engine_stopped
from .inputs import EncodedPrompt
from .state import Outputs, Trace

T = TypeVar("T")


class ClientGone(Exception):
    """The client has closed the connection."""


@dataclass(frozen=True, slots=True)
class Job:
    """What an HTTP request asks the engine for.

    Args:
        id: of the answer; the engine's requests have it too, numbered if there are several prompts.
        prompts: each is continued ``params.n`` times.
        timeout_s: seconds after which it is given up; None = never.
        trace: follows the engine's requests.
        cache_salt: requests with different ones share nothing that is kept; None = shared with all that have none.
    """

    id: str
    prompts: Sequence[EncodedPrompt]
    params: SamplingParams
    timeout_s: float | None
    trace: Trace = field(default_factory=Trace)
    cache_salt: str | None = None


class Generation:
    """The outputs of a job's prompts, as they come.

    Args:
        source: (prompt's index, output), until all prompts are done.
    """

    def __init__(self, job: Job, source: AsyncIterator[tuple[int, RequestOutput]]) -> None:
        self._job = job
        self._source = source
        self._early: deque[tuple[int, RequestOutput]] = deque()
        """Taken from the source, but not yet handed out."""
        self._deadline = None if job.timeout_s is None else asyncio.get_running_loop().time() + job.timeout_s

    async def started(self) -> None:
        """Waits for a first output of every prompt: from then on nothing can be refused.

        Raises:
            ApiError: the engine refuses a prompt, or cannot serve any.
        """
        seen: set[int] = set()
        while len(seen) < len(self._job.prompts):
            index, output = await self._next()
            self._early.append((index, output))
            seen.add(index)

    async def outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(prompt's index, output) until all prompts are done.

        Raises:
            ApiError: the engine refuses a prompt or has stopped, or time is up.
        """
        running = len(self._job.prompts)
        while running:
            index, output = self._early.popleft() if self._early else await self._next()
            running -= output.finished
            yield index, output

    async def final(self) -> list[RequestOutput]:
        """Each prompt's last output, in the order of the prompts; for errors see ``outputs``."""
        last = {index: output async for index, output in self.outputs()}
        return [last[index] for index in range(len(self._job.prompts))]

    async def _next(self) -> tuple[int, RequestOutput]:
        try:
            async with asyncio.timeout_at(self._deadline):
                return await anext(self._source)
        except TimeoutError:
            raise _too_slow(self._job.timeout_s) from None
        except RequestError as error:
            raise bad_request(str(error)) from error
        except DynaspecError as error:
            raise engine_stopped(str(error)) from error


@asynccontextmanager
async def running(llm: AsyncLLM, job: Job) -> AsyncIterator[Generation]:
    """Runs a job; what is unfinished when it is left is aborted."""
    async with aclosing(_merged([_outputs_of(llm, job, index) for index in range(len(job.prompts))])) as source:
        yield Generation(job, source)


def _outputs_of(llm: AsyncLLM, job: Job, index: int) -> Outputs:
    request_id = f"{job.id}-{index}" if len(job.prompts) > 1 else job.id
    prompt: dict[str, object] = {"prompt_token_ids": job.prompts[index].tokens}
    if job.cache_salt is not None:
        prompt["cache_salt"] = job.cache_salt
    generated = llm.generate(prompt, job.params, request_id=request_id)
    return job.trace.follow(generated, job.params, request_id)


async def _merged(sources: Sequence[Outputs]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """(index, output) as they come. Closing it closes the sources, which aborts the engine's requests.

    Raises:
        Exception: a source's, the first that has one.
    """
    if len(sources) == 1:  # nearly always, so without the detour
        async with aclosing(sources[0]) as only:
            async for output in only:
                yield 0, output
        return
    # Short, so that what a slow client does not take is merged where it comes from instead of piling up here.
    arrived: asyncio.Queue[tuple[int, RequestOutput] | Exception] = asyncio.Queue(maxsize=1)
    pumps = [asyncio.create_task(_pump(index, source, arrived)) for index, source in enumerate(sources)]
    try:
        unfinished = len(sources)
        while unfinished:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            unfinished -= item[1].finished
            yield item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(index: int, source: Outputs, arrived: asyncio.Queue[tuple[int, RequestOutput] | Exception]) -> None:
    try:
        async with aclosing(source) as outputs:
            async for output in outputs:
                await arrived.put((index, output))
    except Exception as error:  # whoever reads the queue raises it
        await arrived.put(error)


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Waits for work, but no longer than the client does.

    Args:
        receive: the request's channel, of which the body has been read.

    Raises:
        ClientGone: the client left first; the work has been cancelled.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_slow(timeout_s: float | None) -> ApiError:
    return ApiError(
        504,
        f"the answer was not complete after {timeout_s} s; expected a shorter one, or a less busy server",
        type="server_error",
        code="request_timeout",
    )
