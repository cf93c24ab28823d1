"""What the middlewares share: they stand between uvicorn and the app, and speak ASGI."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError, not_found


def header(scope: Scope, name: str) -> str | None:
    """A header of the request; None if it is not there."""
    return Headers(scope=scope).get(name)


def route_path(scope: Scope) -> str:
    """The path as the endpoints are written, whether or not a proxy in front has cut off the root path."""
    path: str = scope["path"]
    root = scope.get("root_path", "")
    inside = bool(root) and (path == root or path.startswith(root + "/"))
    return path[len(root) :] if inside else path


class BelowRootPath:
    """Tells the application under which path a proxy offers it.

    uvicorn could say so too, but it takes it for granted that the proxy has cut the path off.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "root_path": self._root_path}, receive, send)


class ExactPaths:
    """Answers 404 to a path that ends with a line feed, which the router would take for the path without it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].endswith("\n"):
            await answer(not_found(scope["method"], repr(scope["path"])), scope, receive, send)
        else:
            await self._app(scope, receive, send)


async def answer(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers a request that the app never sees."""
    await as_response(error)(scope, receive, send)


def as_response(error: ApiError) -> JSONResponse:
    """OpenAI's error object, with status and headers."""
    return JSONResponse(error.body(), error.status, error.headers)
