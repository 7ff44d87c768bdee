"""Routes about the server itself: models, health, readiness, metrics, version."""

from __future__ import annotations

from fastapi import APIRouter, Response

from rocm_serve.server.context import Context
from rocm_serve.server.errors import ApiError
from rocm_serve.server.metrics import CONTENT_TYPE
from rocm_serve.server.token_routes import json_response
from rocm_serve.version import VERSION


def build_router(context: Context) -> APIRouter:
    router = APIRouter()
    info, gate = context.info, context.gate

    def max_model_len() -> int | None:
        try:
            return context.client.limits.max_model_len
        except RuntimeError:  # the engine has not been ready yet
            return None

    def model_card() -> dict[str, object]:
        return {
            "id": info.served_model_name,
            "object": "model",
            "created": info.created,
            "owned_by": "rocm_serve",
            "root": info.model,
            "parent": None,
            "max_model_len": max_model_len(),
            "parallel": info.parallel,
        }

    @router.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [model_card()]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name != info.served_model_name:
            message = f"the model {name!r} does not exist; this server has {info.served_model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return json_response(model_card())

    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    @router.get("/ping")  # SageMaker's name for it
    async def health() -> Response:
        """200 while the engine lives, also before it is ready and while it drains; 503 once it is dead."""
        if gate.state == "dead":
            gate.check_ready()
        return json_response({"status": gate.state})

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready")
    async def ready() -> Response:
        """200 only when requests are taken."""
        gate.check_ready()
        return json_response({"status": "ready"})

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(context.metrics.render(), media_type=CONTENT_TYPE)

    @router.get("/version")
    async def version() -> Response:
        return json_response({"version": VERSION})

    return router
