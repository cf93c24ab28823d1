"""API keys. Without one configured, everything is open."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import sha256

from pydantic import SecretStr
from starlette.types import ASGIApp, Receive, Scope, Send

from .asgi import answer, header, route_path
from .errors import ApiError

_OPEN = frozenset({"/health", "/ready", "/ping", "/version", "/metrics", "/openapi.json", "/", "/dashboard"})
"""Paths that need no key: what supervisors and Prometheus ask for, and pages without any data. Every other does, known
or not."""
_OPEN_FOLDER = "/dashboard/static/"


class ApiKeys:
    """Answers requests without a valid key with 401, before their body is read.

    Args:
        app: who gets the others.
        keys: any of them is valid.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[SecretStr]) -> None:
        self._app = app
        self._digests = [_digest(key.get_secret_value()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _is_open(route_path(scope)):
            await self._app(scope, receive, send)
            return
        kind, _, key = (header(scope, "authorization") or "").partition(" ")
        if kind.lower() == "bearer" and self._knows(key.strip()):
            await self._app(scope, receive, send)
        else:
            await answer(_unauthorized(), scope, receive, send)

    def _knows(self, key: str) -> bool:
        """Takes equally long whichever key it is, and however much of one is right."""
        given, found = _digest(key), False
        for digest in self._digests:
            found |= hmac.compare_digest(digest, given)
        return found


def _is_open(path: str) -> bool:
    return path in _OPEN or path.startswith(_OPEN_FOLDER)


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def _unauthorized() -> ApiError:
    return ApiError(
        401,
        "the request has no valid API key; expected the header 'Authorization: Bearer KEY'",
        type="authentication_error",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
