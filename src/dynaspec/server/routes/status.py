"""What the server says of itself: to supervisors, to clients (``/v1/models``), and to Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Header
from prometheus_client.registry import Collector
from starlette.responses import Response

from dynaspec.contract.errors import DynaspecError
from dynaspec.observe.families import ENGINE_FAMILIES, HEALTH
from dynaspec.observe.prometheus import FamilyCollector, render
from dynaspec.server.admission import ADMISSION_FAMILIES
from dynaspec.server.errors import engine_stopped, shutting_down, unknown_model
from dynaspec.server.middleware import HTTP_FAMILIES
from dynaspec.server.protocol.base import errors
from dynaspec.server.protocol.model import ModelCard, ModelList
from dynaspec.server.state import ServerState, State
from dynaspec.version import __version__

router = APIRouter()


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
    body, content_type = render(collectors, accept)
    return Response(body, media_type=content_type)
