"""`/v1/models`: one model, under one or more names."""

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from app.gateway import Gateway, gateway_of

router = APIRouter(prefix="/v1/models")


@router.get("")
async def list_models(request: Request) -> Response:
    """Every name that requests may ask for."""
    gateway = gateway_of(request.app)
    return JSONResponse({"object": "list", "data": [_model(gateway, name) for name in gateway.names.listed]})


@router.get("/{name:path}")
async def get_model(request: Request, name: str) -> Response:
    """One model by a name that is served; names may contain slashes."""
    gateway = gateway_of(request.app)
    gateway.names.check(name)
    return JSONResponse(_model(gateway, name))


def _model(gateway: Gateway, name: str) -> dict[str, object]:
    """OpenAI's four keys, and the context length under the two names that clients look for."""
    return {
        "id": name,
        "object": "model",
        "created": gateway.started_at,
        "owned_by": "dormouse",
        "root": gateway.names.own,
        "context_length": gateway.max_context,
        "max_model_len": gateway.max_context,
    }
