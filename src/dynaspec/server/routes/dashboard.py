"""The live page, its files, and the stream of what it shows."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response, StreamingResponse
from starlette.staticfiles import StaticFiles

from dynaspec.version import __version__

from ..dashboard.live import About, LiveFeed, encode
from ..state import ServerState, State

router = APIRouter(include_in_schema=False)

_FILES = StaticFiles(packages=[("dynaspec.server.dashboard", "static")])
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "Cache-Control": "no-cache",  # asks whether a file has changed, so that an upgraded server gets an upgraded page
}
_STREAM_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def get_feed(request: Request) -> LiveFeed:
    """The app's feed."""
    feed: LiveFeed = request.app.state.live_feed
    return feed


Feed = Annotated[LiveFeed, Depends(get_feed)]


@router.get("/")
@router.get("/dashboard")
async def page(request: Request) -> Response:
    """The page; its links are relative, so that it works below a proxy's path and under both names."""
    return await _file("index.html", request)


@router.get("/dashboard/static/{path:path}")
async def static(path: str, request: Request) -> Response:
    """What the page is made of."""
    return await _file(path, request)


@router.get("/dashboard/feed")
async def feed(state: State, live: Feed) -> StreamingResponse:
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
