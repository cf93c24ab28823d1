"""What supervisors ask: is it alive, does it take requests, what is it."""

from __future__ import annotations

from fastapi import APIRouter

from dynaspec import __version__

from ..errors import engine_stopped, shutting_down
from ..state import State

router = APIRouter(tags=["health"])


@router.get("/health", summary="200 while the engine lives")
async def health(state: State) -> dict[str, str]:
    """Answers 503 once the engine has stopped. The server listens only when the model is loaded."""
    if not state.llm.healthy:
        raise engine_stopped("the engine has stopped; expected a restart")
    return {"status": "ok"}


@router.get("/ready", summary="200 while requests are taken")
async def ready(state: State) -> dict[str, str]:
    """Answers 503 once the engine has stopped, and while the server shuts down."""
    if state.admission.draining:
        raise shutting_down()
    return await health(state)


@router.get("/ping", summary="The same as /health")
@router.post("/ping", summary="The same as /health", include_in_schema=False)
async def ping(state: State) -> dict[str, str]:
    """For platforms that ask here."""
    return await health(state)


@router.get("/version", summary="The version of dynaspec")
async def version() -> dict[str, str]:
    """Nothing else, so that it may be open."""
    return {"version": __version__}
