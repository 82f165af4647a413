"""Is the process alive, will it answer, and what is it."""

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from app.disk_health import standing
from app.errors import NotReady
from app.gateway import gateway_of
from dormouse_gateway import __version__

router = APIRouter()


# HEAD as well: `wget --spider`, a usual container health check, asks with it.
# /health is its name at vLLM and llama.cpp, where benchmarks ask for it before they begin.
@router.head("/health", include_in_schema=False)
@router.get("/health", include_in_schema=False)
@router.head("/healthz", include_in_schema=False)
@router.get("/healthz")
async def healthz(request: Request) -> Response:
    """200 while the event loop runs; `degraded` where the disk fails, which costs reuse and no answer."""
    return JSONResponse(standing(gateway_of(request.app)))


@router.head("/readyz", include_in_schema=False)
@router.get("/readyz")
async def readyz(request: Request) -> Response:
    """200 while turns are accepted, also where the disk fails (`degraded`); 503 while loading or draining."""
    gateway = gateway_of(request.app)
    if gateway.is_draining:
        raise NotReady("the server is shutting down", "shutting_down", retry_after_seconds=5.0)
    told = standing(gateway)
    status = "ready" if told["status"] == "ok" else told["status"]
    return JSONResponse({**told, "status": status, "model": gateway.names.first})


@router.get("/version")
async def version() -> Response:
    """The version of Dormouse."""
    return JSONResponse({"version": __version__})
