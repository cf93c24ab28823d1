"""``/v1/chat/completions``."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Request, Response

from dynaspec.server.chat_input import render
from dynaspec.server.generation import Job
from dynaspec.server.params import asked_tokens, chat_params
from dynaspec.server.prompts import check_length, encode_text, in_thread
from dynaspec.server.protocol.chat import ChatReply, ChatRequest
from dynaspec.server.protocol.errors import EVENTS, GENERATION_ERRORS
from dynaspec.server.replies import ChatReplies
from dynaspec.server.reports import Reports
from dynaspec.server.respond import check_request, new_job, respond
from dynaspec.server.state import State
from dynaspec.server.tools import tool_use

router = APIRouter(tags=["generation"])


@router.post("/v1/chat/completions", response_model=ChatReply, responses={200: EVENTS, **GENERATION_ERRORS})
async def create_chat_completion(body: ChatRequest, request: Request, state: State) -> Response:
    """Answer a conversation."""
    check_request(body, request, state)
    use = tool_use(body, state.tool_format)
    params = chat_params(body, use.form(), state.llm.sampling_defaults)
    reports = Reports(body, state, continuations=params.n)
    params = reports.counted(params)
    if use.needs_special_tokens:
        params = replace(params, skip_special_tokens=False)
    llm = state.llm

    async def prepare() -> tuple[Job, ChatReplies]:
        text = await in_thread(
            lambda: render(
                llm.tokenizer,
                body.messages,
                body,
                tools=use.offered,
                tool_format=state.tool_format,
                template=state.config.chat_template,
            ),
            param="messages",
        )
        truncated = params.truncate_prompt_tokens is not None
        prompt = await encode_text(
            llm, text, special_tokens=body.add_special_tokens, truncated=truncated, param="messages"
        )
        check_length(prompt, params, llm.max_model_len, asked=asked_tokens(body), param="messages")
        job = new_job("chat", [prompt], params, body, request, state)
        return job, ChatReplies(body, job, llm.tokenizer, state.served_names[0], use, reports)

    return await respond(request, state, continuations=params.n, stream=bool(body.stream), prepare=prepare)
