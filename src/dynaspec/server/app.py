"""The application: endpoints, what stands before them, and how errors are told."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as RouterException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from dynaspec.contract.errors import DynaspecError, RequestError
from dynaspec.version import __version__

from .dashboard.live import LiveFeed
from .errors import ApiError, bad_request, engine_stopped, not_found, unreadable_body, validation_error
from .logs import request_log
from .middleware import REQUEST_ID, ApiKeys, BelowRootPath, BoundedBody, ExactPaths, Exchanges, as_response
from .routes import dashboard, router
from .state import ServerState

_DESCRIPTION = "OpenAI-compatible, with exact speculative decoding. Errors are OpenAI's error objects."


def create_app(state: ServerState) -> FastAPI:
    """The endpoints over one engine; the caller opens and closes the engine."""
    config = state.config
    app = FastAPI(
        title="dynaspec",
        version=__version__,
        description=_DESCRIPTION,
        docs_url=None,  # FastAPI's pages load their scripts from elsewhere
        redoc_url=None,
        openapi_url=None if config.disable_docs else "/openapi.json",
        redirect_slashes=False,
        middleware=_middleware(state),
    )
    app.state.dynaspec = state
    for kind in (ApiError, RequestError, DynaspecError, RequestValidationError, RouterException):
        app.add_exception_handler(kind, _tell)
    app.include_router(router)
    if config.enable_dashboard:
        app.state.live_feed = LiveFeed(state.llm.snapshot, interval_s=config.stats_interval_s)
        app.include_router(dashboard)
    return app


def _middleware(state: ServerState) -> list[Middleware]:
    """Outermost first. What refuses a request without its body stands before what reads it."""
    config = state.config
    stack = [
        Middleware(BelowRootPath, root_path=config.root_path),
        Middleware(Exchanges, metrics=state.http, access_log=config.access_log, quote=config.log_requests),
        Middleware(ExactPaths),
    ]
    if config.allowed_origins:
        stack.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.allowed_origins,
                allow_methods=config.allowed_methods,
                allow_headers=config.allowed_headers,
                allow_credentials=config.allow_credentials,
                expose_headers=[REQUEST_ID],
            )
        )
    if config.api_key:
        stack.append(Middleware(ApiKeys, keys=config.api_key))
    stack.append(
        Middleware(
            BoundedBody, limit=config.max_request_bytes, timeout_s=config.read_timeout_s, seen=request_log(config)
        )
    )
    return stack


async def _tell(request: Request, error: Exception) -> Response:
    return as_response(await _as_api_error(request, error))


async def _as_api_error(request: Request, error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return bad_request(str(error))
    if isinstance(error, RequestValidationError):
        return validation_error(error, body=await request.body())
    if isinstance(error, RouterException):
        return unreadable_body(error) or _http_error(request, error)
    return engine_stopped(str(error))


def _http_error(request: Request, error: RouterException) -> ApiError:
    """What the router itself refuses: no such path, no such method."""
    if error.status_code == 404:
        return not_found(request.method, request.url.path)
    asked = f"{request.method} {request.url.path}"
    headers = dict(error.headers or {})
    if error.status_code == 405:
        message = f"{asked} is not allowed; expected {headers.get('Allow', 'another method')}"
        return ApiError(405, message, code="method_not_allowed", headers=headers)
    return ApiError(error.status_code, f"{asked}: {error.detail}", headers=headers)
