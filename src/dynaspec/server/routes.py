"""The HTTP endpoints: what takes prompts, what the server says of itself, and the live page."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Request, Response
from prometheus_client.registry import Collector
from starlette.responses import StreamingResponse
from starlette.staticfiles import StaticFiles

from dynaspec.contract.errors import DynaspecError
from dynaspec.observe.families import ENGINE_FAMILIES, HEALTH
from dynaspec.observe.prometheus import FamilyCollector
from dynaspec.observe.prometheus import render as render_metrics
from dynaspec.version import __version__

from .dashboard.live import About, LiveFeed, encode
from .errors import bad_request, engine_stopped, shutting_down, unknown_model
from .generation import Job
from .inputs import (
    EncodedPrompt,
    asked_tokens,
    chat_params,
    check_length,
    completion_params,
    encode_text,
    in_thread,
    render,
)
from .middleware import ADMISSION_FAMILIES, HTTP_FAMILIES
from .protocol.base import EVENTS, GENERATION_ERRORS, REQUEST_ERRORS, errors
from .protocol.chat import ChatReply, ChatRequest
from .protocol.completions import CompletionReply, CompletionRequest
from .protocol.model import DetokenizeReply, DetokenizeRequest, ModelCard, ModelList, TokenizeReply, TokenizeRequest
from .replies import ChatReplies, CompletionReplies
from .reports import Reports
from .respond import check_request, new_job, respond
from .state import ServerState, State
from .tools import tool_use

router = APIRouter()
dashboard = APIRouter(include_in_schema=False)


# --- what takes prompts: completions and chats; and /tokenize and /detokenize, as vLLM has them ---


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


# --- what the server says of itself: to supervisors, to clients (/v1/models), and to Prometheus ---


@router.get("/health", tags=["health"], summary="200 while the engine lives")
async def health(state: State) -> dict[str, str]:
    """Answers 503 once the engine has stopped. The server listens only when the model is loaded."""
    if not state.llm.healthy:
        raise engine_stopped("the engine has stopped; expected a restart")
    return {"status": "ok"}


@router.get("/ready", tags=["health"], summary="200 while requests are taken")
async def ready(state: State) -> dict[str, str]:
    """Answers 503 once the engine has stopped, and while the server shuts down."""
    if state.admission.draining:
        raise shutting_down()
    return await health(state)


@router.get("/ping", tags=["health"], summary="The same as /health")
@router.post("/ping", tags=["health"], summary="The same as /health", include_in_schema=False)
async def ping(state: State) -> dict[str, str]:
    """For platforms that ask here."""
    return await health(state)


@router.get("/version", tags=["health"], summary="The version of dynaspec")
async def version() -> dict[str, str]:
    """Nothing else, so that it may be open."""
    return {"version": __version__}


@router.get("/v1/models", tags=["models"], response_model=ModelList, responses=errors(_401="No valid API key."))
async def list_models(state: State) -> ModelList:
    """The names under which the model may be asked for."""
    return ModelList(data=[_card(name, state) for name in state.served_names])


@router.get(
    "/v1/models/{model:path}",
    tags=["models"],
    response_model=ModelCard,
    responses=errors(_401="No valid API key.", _404="The model is not served here."),
)
async def retrieve_model(model: str, state: State) -> ModelCard:
    """One of them."""
    if model not in state.served_names:
        raise unknown_model(model, state.served_names)
    return _card(model, state)


def _card(name: str, state: ServerState) -> ModelCard:
    return ModelCard(
        id=name, created=state.started_at, root=state.served_names[0], max_model_len=state.llm.max_model_len
    )


@router.get("/metrics", tags=["observability"], summary="Metrics for Prometheus", response_class=Response)
async def metrics(state: State, accept: str = Header("")) -> Response:
    """The text format, or OpenMetrics where the Accept header asks for it. Once the engine has stopped, ``engine_up``
    is 0 and the engine's other metrics are gone.
    """
    namespace, labels = state.config.metrics_namespace, {"model_name": state.served_names[0]}
    collectors: list[Collector] = [
        FamilyCollector(HTTP_FAMILIES, state.http, namespace=namespace, labels=labels),
        FamilyCollector(ADMISSION_FAMILIES, state.admission, namespace=namespace, labels=labels),
    ]
    try:
        snapshot = await state.llm.snapshot()
    except DynaspecError:
        up = False
    else:
        up = True
        collectors.append(FamilyCollector(ENGINE_FAMILIES, snapshot, namespace=namespace, labels=labels))
    collectors.append(FamilyCollector(HEALTH, up, namespace=namespace, labels=labels))
    body, content_type = render_metrics(collectors, accept)
    return Response(body, media_type=content_type)


# --- the live page, its files, and the stream of what it shows ---

_FILES = StaticFiles(packages=[("dynaspec.server.dashboard", "static")])
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "Cache-Control": "no-cache",  # asks whether a file has changed, so that an upgraded server gets an upgraded page
}
_STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def _live_feed(request: Request) -> LiveFeed:
    """The app's feed."""
    feed: LiveFeed = request.app.state.live_feed
    return feed


_Feed = Annotated[LiveFeed, Depends(_live_feed)]


@dashboard.get("/")
@dashboard.get("/dashboard")
async def page(request: Request) -> Response:
    """The page; its links are relative, so that it works below a proxy's path and under both names."""
    return await _file("index.html", request)


@dashboard.get("/dashboard/static/{path:path}")
async def static(path: str, request: Request) -> Response:
    """What the page is made of."""
    return await _file(path, request)


@dashboard.get("/dashboard/feed")
async def feed(state: State, live: _Feed) -> StreamingResponse:
    """Server-sent events: what is remembered, then a look at the engine each second, until the server is drained."""
    return StreamingResponse(_events(state, live), media_type="text/event-stream", headers=_STREAM_HEADERS)


async def _file(path: str, request: Request) -> Response:
    response = await _FILES.get_response(path, request.scope)
    response.headers.update(_HEADERS)
    return response


async def _events(state: ServerState, live: LiveFeed) -> AsyncGenerator[bytes, None]:
    about = About(model=state.served_names[0], version=__version__, started_at=state.started_at)
    async with aclosing(live.follow()) as updates:
        async for update in updates:
            draining = state.admission.draining
            yield b"data: " + encode(update, about, draining=draining) + b"\n\n"
            if draining and not state.admission.active:
                return  # or the server would wait for its watchers
