"""What takes prompts: completions and chats; and ``/tokenize`` and ``/detokenize``, as vLLM has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fastapi import APIRouter, Request, Response

from dynaspec.server.errors import bad_request
from dynaspec.server.generation import Job
from dynaspec.server.params import asked_tokens, chat_params, completion_params
from dynaspec.server.prompts import EncodedPrompt, check_length, encode_text, in_thread, render
from dynaspec.server.protocol.base import EVENTS, GENERATION_ERRORS, REQUEST_ERRORS
from dynaspec.server.protocol.chat import ChatReply, ChatRequest
from dynaspec.server.protocol.completions import CompletionReply, CompletionRequest
from dynaspec.server.protocol.model import DetokenizeReply, DetokenizeRequest, TokenizeReply, TokenizeRequest
from dynaspec.server.replies import ChatReplies, CompletionReplies
from dynaspec.server.reports import Reports
from dynaspec.server.respond import check_request, new_job, respond
from dynaspec.server.state import ServerState, State
from dynaspec.server.tools import tool_use

router = APIRouter()


@router.post(
    "/v1/completions",
    response_model=CompletionReply,
    responses={200: EVENTS, **GENERATION_ERRORS},
    tags=["generation"],
)
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


@router.post(
    "/v1/chat/completions",
    response_model=ChatReply,
    responses={200: EVENTS, **GENERATION_ERRORS},
    tags=["generation"],
)
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
        text = await in_thread(lambda: render(state, body.messages, body, use.offered), param="messages")
        truncated = params.truncate_prompt_tokens is not None
        prompt = await encode_text(
            llm, text, special_tokens=body.add_special_tokens, truncated=truncated, param="messages"
        )
        check_length(prompt, params, llm.max_model_len, asked=asked_tokens(body), param="messages")
        job = new_job("chat", [prompt], params, body, request, state)
        return job, ChatReplies(body, job, llm.tokenizer, state.served_names[0], use, reports)

    return await respond(request, state, continuations=params.n, stream=bool(body.stream), prepare=prepare)


@router.post("/tokenize", response_model=TokenizeReply, responses=REQUEST_ERRORS, tags=["tokenizer"])
async def tokenize(body: TokenizeRequest, request: Request, state: State) -> TokenizeReply:
    """The tokens of a text or of a conversation."""
    check_request(body, request, state)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("the request has both prompt and messages, or neither; expected one of them", param="prompt")
    tokens = await in_thread(lambda: _tokens(body, state), param="prompt" if body.messages is None else "messages")
    spell = state.llm.tokenizer.spell
    return TokenizeReply(
        count=len(tokens),
        max_model_len=state.llm.max_model_len,
        tokens=tokens,
        token_strs=[spell(token) for token in tokens] if body.return_token_strs else None,
    )


@router.post("/detokenize", response_model=DetokenizeReply, responses=REQUEST_ERRORS, tags=["tokenizer"])
async def detokenize(body: DetokenizeRequest, request: Request, state: State) -> DetokenizeReply:
    """The text of tokens, special ones included."""
    check_request(body, request, state)
    tokenizer = state.llm.tokenizer
    outside = next((token for token in body.tokens if token >= tokenizer.vocab_size), None)
    if outside is not None:
        raise bad_request(f"tokens holds {outside}; expected ids from 0 to {tokenizer.vocab_size - 1}", param="tokens")
    text = await in_thread(lambda: tokenizer.decode(body.tokens, skip_special_tokens=False), param="tokens")
    return DetokenizeReply(prompt=text)


def _tokens(body: TokenizeRequest, state: ServerState) -> list[int]:
    tokenizer = state.llm.tokenizer
    if body.messages is None:
        special = body.add_special_tokens is not False
        return tokenizer.encode(body.prompt or "", special_tokens=special)
    text = render(state, body.messages, body, body.tools or ())
    return tokenizer.encode(text, special_tokens=bool(body.add_special_tokens))
