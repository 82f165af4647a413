"""`/metrics` for Prometheus."""

from typing import Any

from fastapi import APIRouter, Request
from prometheus_client.exposition import choose_encoder
from starlette.responses import PlainTextResponse, Response

from app.gateway import gateway_of

router = APIRouter()


OPEN_METRICS: dict[int | str, dict[str, Any]] = {200: {"content": {"application/openmetrics-text": {}}}}


@router.get("/metrics", response_class=PlainTextResponse, responses=OPEN_METRICS)
async def metrics(request: Request) -> Response:
    """The registry in the format the scraper accepts: text, or OpenMetrics."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(gateway_of(request.app).metrics.registry), headers={"content-type": content_type})
