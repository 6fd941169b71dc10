"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel

from seqmtp_serve.errors import ModelNotFound
from services.builtin_models import builtin_model
from services.gateway.coordinators import CoordinatorStatus
from services.gateway.gateway import Gateway
from services.gateway.openapi import problems


class ModelCard(BaseModel):
    """One served model. `root` and `max_model_len` are vLLM's additions, which its bench clients read; `description`
    is ours, and empty for a model that did not come with this service.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "seqmtp"
    root: str
    parent: str | None = None
    max_model_len: int
    description: str = ""


class ModelList(BaseModel):
    """Every served model."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


def model_routes(gateway: Gateway, created: int) -> APIRouter:
    """`created` is the start of this gateway, Unix seconds."""
    routes = APIRouter(tags=["models"])

    def card(status: CoordinatorStatus) -> ModelCard:
        name = gateway.board.name_of(status)
        root = gateway.text.root
        return ModelCard(
            id=name,
            created=created,
            root=root,
            max_model_len=status.max_model_len,
            description=builtin_model(root).about,
        )

    @routes.get("/v1/models", responses=problems(401, 503))
    async def models() -> ModelList:
        """The served models."""
        return ModelList(data=[card(await gateway.board.serving())])

    @routes.get("/v1/models/{model:path}", responses=problems(401, 404, 503))
    async def model(model: str) -> ModelCard:
        """One served model."""
        found = card(await gateway.board.serving())
        if found.id != model:
            raise ModelNotFound(f"The model '{model[:256]}' does not exist here: '{found.id}' does.", param="model")
        return found

    return routes
