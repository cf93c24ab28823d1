"""From a checked request to its answer, whole or as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from itertools import islice
from typing import Any

from fastapi import Request, Response
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from dynaspec.contract.sampling_params import SamplingParams

from .errors import ApiError, bad_request, unknown_model
from .generation import ClientGone, Generation, Job, running, unless_gone
from .inputs import EncodedPrompt
from .protocol.base import AddressedRequest
from .protocol.generation import GenerationRequest
from .replies import Replies
from .state import IGNORED_FIELDS, Operation, ServerState, shown_field

_MOST_NAMED = 10
"""Unknown fields of a request that its answer's header names."""


async def respond(
    request: Request,
    state: ServerState,
    *,
    continuations: int,
    stream: bool,
    prepare: Callable[[], Awaitable[tuple[Job, Replies]]],
) -> Response:
    """Runs a request from its admission to the end of its answer.

    Everything that is wrong with it is told before an answer begins. When the client leaves, the engine's requests
    are aborted at once.

    Args:
        continuations: that it asks for: prompts times ``n``.
        prepare: encodes its prompts; called when it has been admitted.

    Raises:
        ApiError: it cannot be served.
    """
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(state.admission.slot(continuations))
        try:
            job, replies = await unless_gone(request.receive, prepare())
            stack.callback(_note_usage, request, replies)
            generation = await stack.enter_async_context(running(state.llm, job))
            if stream:
                await unless_gone(request.receive, generation.started())
                return EventStream(events(generation, replies), stack.pop_all().aclose)
            outputs = await unless_gone(request.receive, generation.final())
        except ClientGone:
            return Response(status_code=499)
        if job.params.logprobs is None and job.params.prompt_logprobs is None:
            content = replies.whole(outputs).model_dump_json()
        else:  # thousands of numbers: not in the event loop
            content = await asyncio.to_thread(lambda: replies.whole(outputs).model_dump_json())
        return Response(content, media_type="application/json")


def _note_usage(request: Request, replies: Replies) -> None:
    """For the log; whole answers that were never made have none."""
    usage = replies.usage()
    if usage.prompt_tokens:
        request.state.usage = usage


def check_request(body: AddressedRequest, request: Request, state: ServerState) -> None:
    """Sees to the model's name and to unknown fields: the log warns of these, and the answer's header names some.

    Raises:
        ApiError: 404, another model; or unknown fields, and the server is strict.
    """
    if body.model is not None and body.model not in state.served_names:
        raise unknown_model(body.model, state.served_names)
    unknown = list(islice(body.unknown_fields(), _MOST_NAMED))
    if not unknown:
        return
    if state.config.strict:
        raise bad_request(
            f"the request has the unknown field {unknown[0]!r}; expected it to be left out", param=unknown[0]
        )
    names = list(dict.fromkeys(map(shown_field, unknown)))
    request.state.answer_headers = {IGNORED_FIELDS: ", ".join(names)}
    state.unknown_fields.note(names, named=state.config.log_requests)


def new_job(
    operation: Operation,
    prompts: Sequence[EncodedPrompt],
    params: SamplingParams,
    body: GenerationRequest,
    request: Request,
    state: ServerState,
) -> Job:
    """What a checked request asks the engine for. The answer's id ends with the request's, unless the body has one."""
    kind = "chatcmpl" if operation == "chat" else "cmpl"
    return Job(
        id=f"{kind}-{body.request_id or request.state.request_id}",
        prompts=prompts,
        params=params,
        timeout_s=state.config.request_timeout_s,
        trace=state.tracing.trace(operation, body.model or state.served_names[0], request.headers),
        cache_salt=body.cache_salt,
    )


_DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends events as they come, until they or the client have ended.

    Args:
        events: each with its ``data:`` and empty line.
        close: called in any case, at the end.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], Awaitable[Any]]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send))
        except ClientGone:
            pass  # nobody is left to be told
        finally:
            await self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def events(generation: Generation, replies: Replies) -> AsyncIterator[bytes]:
    """A generation's events. An error that comes in the middle is the last event but one.

    Raises:
        Exception: what nobody expected, after an event that says so.
    """
    try:
        for chunk in replies.opening():
            yield _event(chunk)
        async for prompt, output in generation.outputs():
            for chunk in replies.chunks(prompt, output):
                yield _event(chunk)
        for chunk in replies.closing():
            yield _event(chunk)
    except ApiError as error:
        yield _error_event(error)
    except Exception:
        yield _error_event(ApiError(500, "the server failed; its log says why", "server_error", code="internal_error"))
        raise
    yield _DONE


def _event(chunk: BaseModel) -> bytes:
    return b"data: " + chunk.model_dump_json().encode() + b"\n\n"


def _error_event(error: ApiError) -> bytes:
    return b"data: " + to_json(error.body()) + b"\n\n"
