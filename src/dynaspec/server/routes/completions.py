"""``/v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from dynaspec.server.generation import Job
from dynaspec.server.params import completion_params
from dynaspec.server.prompts import EncodedPrompt, check_length, encode_text
from dynaspec.server.protocol.completions import CompletionReply, CompletionRequest
from dynaspec.server.protocol.errors import EVENTS, GENERATION_ERRORS
from dynaspec.server.replies import CompletionReplies
from dynaspec.server.reports import Reports
from dynaspec.server.respond import check_request, new_job, respond
from dynaspec.server.state import ServerState, State

router = APIRouter(tags=["generation"])


@router.post("/v1/completions", response_model=CompletionReply, responses={200: EVENTS, **GENERATION_ERRORS})
async def create_completion(body: CompletionRequest, request: Request, state: State) -> Response:
    """Continue one prompt, or several."""
    check_request(body, request, state)
    params = completion_params(body, state.llm.sampling_defaults)
    given = _prompts(body)
    reports = Reports(body, state, continuations=len(given) * params.n)
    params = reports.counted(params)

    async def prepare() -> tuple[Job, CompletionReplies]:
        prompts = await _encoded(given, body, state)
        asked = body.max_tokens if "max_tokens" in body.model_fields_set else None
        for prompt in prompts:
            check_length(prompt, params, state.llm.max_model_len, asked=asked, param="prompt")
        job = new_job("text_completion", prompts, params, body, request, state)
        return job, CompletionReplies(body, job, state.llm.tokenizer, state.served_names[0], reports)

    return await respond(request, state, continuations=len(given) * params.n, stream=bool(body.stream), prepare=prepare)


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    """One or several, as a list."""
    if isinstance(body.prompt, str):
        return [body.prompt]
    tokens = [part for part in body.prompt if isinstance(part, int)]
    return [tokens] if tokens else [part for part in body.prompt if not isinstance(part, int)]


async def _encoded(
    given: Sequence[str | list[int]], body: CompletionRequest, state: ServerState
) -> list[EncodedPrompt]:
    """One after the other: a request with many texts must not take all threads."""
    prompts = []
    for prompt in given:
        if isinstance(prompt, str):
            truncated = body.truncate_prompt_tokens is not None
            encoded = await encode_text(
                state.llm, prompt, special_tokens=body.add_special_tokens, truncated=truncated, param="prompt"
            )
        else:
            encoded = EncodedPrompt(prompt)
        prompts.append(encoded)
    return prompts
