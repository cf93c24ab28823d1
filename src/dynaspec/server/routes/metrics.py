"""What Prometheus scrapes."""

from __future__ import annotations

from fastapi import APIRouter, Header
from prometheus_client.registry import Collector
from starlette.responses import Response

from dynaspec.contract.errors import DynaspecError
from dynaspec.observe.families import ENGINE_FAMILIES, HEALTH
from dynaspec.observe.prometheus import FamilyCollector, render

from ..metrics import ADMISSION_FAMILIES, HTTP_FAMILIES
from ..state import State

router = APIRouter(tags=["observability"])


@router.get("/metrics", summary="Metrics for Prometheus", response_class=Response)
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
