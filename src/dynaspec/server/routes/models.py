"""``/v1/models``."""

from __future__ import annotations

from fastapi import APIRouter

from dynaspec.server.errors import unknown_model
from dynaspec.server.protocol.errors import errors
from dynaspec.server.protocol.models import ModelCard, ModelList
from dynaspec.server.state import ServerState, State

router = APIRouter(prefix="/v1/models", tags=["models"])


@router.get("", response_model=ModelList, responses=errors(_401="No valid API key."))
async def list_models(state: State) -> ModelList:
    """The names under which the model may be asked for."""
    return ModelList(data=[_card(name, state) for name in state.served_names])


@router.get(
    "/{model:path}",
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
