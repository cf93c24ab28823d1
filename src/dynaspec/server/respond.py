"""From a checked request to its answer, whole or as a stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from itertools import islice

from fastapi import Request, Response

from dynaspec.contract.sampling_params import SamplingParams

from .errors import bad_request, unknown_model
from .generation import ClientGone, Job, running, unless_gone
from .prompts import EncodedPrompt
from .protocol.base import AddressedRequest
from .protocol.generation import GenerationRequest
from .replies import Replies
from .state import IGNORED_FIELDS, ServerState, shown_field
from .streaming import EventStream, events
from .tracing import Operation

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
