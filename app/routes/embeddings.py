"""`POST /v1/embeddings`: not here, and where instead."""

from fastapi import APIRouter
from starlette.responses import Response

from app.errors import ErrorReply

router = APIRouter(prefix="/v1")

ELSEWHERE = ErrorReply(
    404,
    "This server generates text and makes no embeddings. Run a server for an embedding model beside it, such as "
    "text-embeddings-inference, `llama-server --embedding`, or `vllm serve` with a pooling model, and send "
    "/v1/embeddings there.",
    code="unsupported_endpoint",
)


@router.post("/embeddings")
async def embeddings() -> Response:
    """A 404 that says what to run."""
    return ELSEWHERE.response()
