"""Every error leaves as an OpenAI error object, and every lower error has a row."""

import json
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from fastapi import FastAPI

from app.boundary import BodyLimit, LastResort, RequestIds
from app.errors import TABLE, ModelNotFound, install, reply_for
from app.schema import ChatRequest
from kvstore.errors import ContextTooLong, QueueFull, ShuttingDown, StoreError, TurnFailed


def application() -> FastAPI:
    app = FastAPI()
    install(app)
    app.add_middleware(BodyLimit, max_bytes=200_000)
    app.add_middleware(LastResort)
    app.add_middleware(RequestIds)

    @app.post("/chat")
    async def chat(request: ChatRequest) -> dict[str, str]:
        return {"model": request.model}

    failures: dict[str, Exception] = {
        "queue": QueueFull(9, 1.25),
        "context": ContextTooLong(9000, 8192),
        "drain": ShuttingDown(),
        "turn": TurnFailed("cuda:0 at 0xdeadbeef"),
        "model": ModelNotFound("gpt", ["here"]),
        "bug": ZeroDivisionError("secret of the inside"),
    }

    @app.get("/fail/{kind}")
    async def fail(kind: str) -> None:
        raise failures[kind]

    return app


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(application())
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


def error_of(response: httpx.Response) -> dict[str, object]:
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"].startswith("req_")
    body = response.json()
    assert list(body) == ["error"]
    assert sorted(body["error"]) == ["code", "message", "param", "type"]
    assert body["error"]["message"]
    return dict(body["error"])


@pytest.mark.parametrize(
    ("content", "param", "code"),
    [
        (b"{", None, None),
        (b"", None, None),
        (b"[]", None, None),
        (b'"text"', None, None),
        (b"null", None, None),
        (b"5", None, None),
        (b"\xff\xfe", None, None),
        (b"[" * 100_000, None, None),
        (b"{}", "model", "missing_required_parameter"),
        (b'{"model": "m"}', "messages", "missing_required_parameter"),
        (b'{"model": "m", "messages": []}', "messages", "invalid_value"),
        (b'{"model": "m", "messages": ["x"]}', "messages[0]", "invalid_value"),
        (b'{"model": "m", "messages": [{"role": "x", "content": ""}]}', "messages[0].role", "invalid_value"),
        (b'{"model": "m", "messages": [{"role": "user"}]}', "messages[0].content", "missing_required_parameter"),
        (
            b'{"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            "messages[0].content[0].type",
            "unsupported_content_part",
        ),
        (
            b'{"model": "m", "messages": [{"role": "function", "content": "x"}]}',
            "messages[0].role",
            "unsupported_value",
        ),
        (
            b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "store": true}',
            "store",
            "unsupported_parameter",
        ),
        (
            b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "session": {"expire_seconds": -1}}',
            "session.expire_seconds",
            "invalid_value",
        ),
        (
            b'{"model": "m", "messages": [{"role": "user", "content": "x"}], "stop": ["a", ""]}',
            "stop[1]",
            "invalid_value",
        ),
    ],
)
async def test_a_bad_body_is_a_400_that_names_the_parameter(
    client: httpx.AsyncClient, content: bytes, param: str | None, code: str | None
) -> None:
    response = await client.post("/chat", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error = error_of(response)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")


@pytest.mark.parametrize("is_announced", [True, False])
async def test_a_body_too_large_is_refused_announced_or_not(client: httpx.AsyncClient, is_announced: bool) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b" " * 50_000

    content = b" " * 250_000 if is_announced else chunks()
    response = await client.post("/chat", content=content, headers={"content-type": "application/json"})
    assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")


async def test_unknown_urls_and_wrong_methods_are_error_objects(client: httpx.AsyncClient) -> None:
    missing = await client.get("/v1/nothing")
    assert (missing.status_code, error_of(missing)["code"]) == (404, "unknown_url")
    wrong = await client.get("/chat")
    assert (wrong.status_code, error_of(wrong)["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        ("queue", 429, "queue_full"),
        ("context", 400, "context_length_exceeded"),
        ("drain", 503, "shutting_down"),
        ("turn", 500, "turn_failed"),
        ("model", 404, "model_not_found"),
        ("bug", 500, "internal_error"),
    ],
)
async def test_raised_errors_are_translated(client: httpx.AsyncClient, kind: str, status: int, code: str) -> None:
    response = await client.get(f"/fail/{kind}")
    assert (response.status_code, error_of(response)["code"]) == (status, code)


async def test_nothing_of_the_inside_leaks(client: httpx.AsyncClient) -> None:
    for kind in ("bug", "turn"):
        text = (await client.get(f"/fail/{kind}")).text
        assert "secret" not in text
        assert "deadbeef" not in text


async def test_a_full_queue_says_when_to_come_back(client: httpx.AsyncClient) -> None:
    headers = (await client.get("/fail/queue")).headers
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("2", "1250")
    assert "retry-after" in (await client.get("/fail/drain")).headers
    assert "retry-after" not in (await client.get("/fail/turn")).headers


def test_a_prompt_too_long_names_both_numbers() -> None:
    message = reply_for(ContextTooLong(9000, 8192)).message
    assert "9000" in message
    assert "8192" in message


def every_kind(root: type[Exception]) -> Iterator[type[Exception]]:
    for kind in root.__subclasses__():
        yield kind
        yield from every_kind(kind)


def test_every_error_of_the_store_has_a_row_of_its_own() -> None:
    abstract = {kind for kind in every_kind(StoreError) if kind.__subclasses__()}
    assert set(every_kind(StoreError)) - abstract <= set(TABLE)


def test_messages_survive_text_that_is_no_unicode() -> None:
    payload = reply_for(ModelNotFound("\ud800", ["a"])).payload()
    assert json.loads(payload)["error"]["param"] == "model"
