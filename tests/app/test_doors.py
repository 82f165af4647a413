"""What must be right about a request before anybody asks who sent it, over sockets."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from pydantic import SecretStr

from app import announce
from app.configuration import load
from app.doors import MAX_HEADERS
from app.http_protocol import MAX_HEAD_BYTES
from tests.app.conftest import NAME, Scripted
from tests.app.live import client

if TYPE_CHECKING:
    import httpx

Serve = Callable[..., Scripted]
CHAT = "/v1/chat/completions"
SESSIONS = "/v1/sessions"
KEY = "dm-alice-0123456789"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": [{"role": "user", "content": "hi"}], **fields}


def refused(response: httpx.Response, status: int, code: str | None, param: str | None = None) -> dict[str, Any]:
    """An OpenAI error object, whole, with an id to ask about."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error: dict[str, Any] = response.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert (error["code"], error["param"]) == (code, param)
    assert "Traceback" not in response.text
    return error


# --- Host ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "is_ours"),
    [
        ("localhost", True),
        ("localhost:8000", True),
        ("LOCALHOST.:1", True),
        ("dormouse.localhost:8000", True),
        ("127.0.0.1", True),
        ("127.8.9.1:80", True),
        ("[::1]:8000", True),
        ("evil.example", False),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("notlocalhost", False),
        ("192.168.1.5:8000", False),
        ("evil.example@localhost", True),  # userinfo is no name; no browser sends any
        ("[::1", False),
        ("", False),
    ],
)
def test_without_keys_requests_come_by_a_loopback_name(serve: Serve, host: str, is_ours: bool) -> None:
    server = serve()
    with client(server.server) as http:
        for method, path in (("GET", SESSIONS), ("GET", "/admin"), ("GET", "/nothing"), ("DELETE", SESSIONS)):
            response = http.request(method, path, headers={"host": host})
            if is_ours:
                assert response.status_code in (200, 404)
            else:
                assert "--allowed-host" in refused(response, 403, "host_not_allowed")["message"]


def test_another_name_has_to_be_allowed(serve: Serve) -> None:
    server = serve(allowed_host=("Box.example", "[fd00::2]"), host="10.0.0.9")
    with client(server.server) as http:
        for host in ("box.example:8000", "BOX.example", "[fd00::2]:80", "10.0.0.9:80", "localhost"):
            assert http.get(SESSIONS, headers={"host": host}).status_code == 200
        refused(http.get(SESSIONS, headers={"host": "other.example"}), 403, "host_not_allowed")


@pytest.mark.parametrize("settings", [{"allowed_host": ("*",)}, {"api_keys": SecretStr(f"alice={KEY}")}])
def test_any_name_will_do_where_it_is_said_or_a_key_is_asked_for(serve: Serve, settings: dict[str, Any]) -> None:
    with client(serve(**settings).server, headers={"authorization": f"Bearer {KEY}"}) as http:
        assert http.get(SESSIONS, headers={"host": "chat.example"}).status_code == 200


# --- Origin and Content-Type --------------------------------------------------------------

OTHERS = [
    "https://evil.example",
    "http://localhost:3000",
    "http://127.0.0.1",
    "null",
    "file://",
    "chrome-extension://x",
]


@pytest.mark.parametrize("origin", OTHERS)
def test_pages_of_other_origins_change_nothing(serve: Serve, origin: str) -> None:
    server = serve()
    with client(server.server) as http:
        assert http.post(CHAT, json=body(session_id="s")).status_code == 200
        headers = {"origin": origin}
        for method, path in (
            ("POST", CHAT),
            ("POST", f"{SESSIONS}/s/sleep"),
            ("PATCH", f"{SESSIONS}/s"),
            ("DELETE", f"{SESSIONS}/s"),
            ("DELETE", SESSIONS),
            ("POST", "/admin/login"),
        ):
            refused(http.request(method, path, headers=headers, json={}), 403, "origin_not_allowed")
        assert "access-control-allow-origin" not in http.get(SESSIONS, headers=headers).headers
        preflight = http.options(CHAT, headers={**headers, "access-control-request-method": "POST"})
        assert not preflight.is_success
        assert http.get(f"{SESSIONS}/s").status_code == 200


def test_pages_of_this_server_may_change_things(serve: Serve) -> None:
    server = serve()
    own = urlsplit(server.url).netloc
    with client(server.server) as http:
        for origin in (f"http://{own}", f"https://{own}"):  # TLS may end before this server
            assert http.post(CHAT, json=body(session_id="s"), headers={"origin": origin}).status_code == 200
        assert http.delete(SESSIONS, headers={"origin": f"http://{own}"}).status_code == 200


@pytest.mark.parametrize(
    ("allowed", "origin", "may"),
    [
        ("https://chat.example", "https://chat.example", True),
        ("https://Chat.example", "https://chat.EXAMPLE", True),
        ("https://chat.example", "http://chat.example", False),
        ("https://chat.example", "https://chat.example:8443", False),
        ("https://chat.example", "https://xchat.example", False),
        ("https://chat.example", "https://chat.example.evil", False),
        ("https://chat.example", "https://chatxexample", False),
        ("http://localhost:*", "http://localhost", True),
        ("http://localhost:*", "http://localhost:5173", True),
        ("http://localhost:*", "http://localhost:5173.evil.example", False),
        ("http://[::1]:*", "http://[::1]:5173", True),
        ("tauri://localhost", "tauri://localhost", True),
        ("*", "https://anybody.example", True),
        ("*", "null", True),
    ],
)
def test_cors_is_for_the_origins_that_are_named(serve: Serve, allowed: str, origin: str, may: bool) -> None:
    server = serve(cors_origin=(allowed,))
    ask = {"origin": origin, "access-control-request-method": "POST", "access-control-request-headers": "x-session-id"}
    with client(server.server) as http:
        preflight = http.options(CHAT, headers=ask)
        plain = http.get("/v1/models", headers={"origin": origin})
        missing = http.get("/nothing", headers={"origin": origin})
        turn = http.post(CHAT, json=body(), headers={"origin": origin})
    assert preflight.is_success == may
    assert turn.is_success == may
    assert all(("access-control-allow-origin" in each.headers) == may for each in (preflight, plain, missing, turn))
    assert all("access-control-allow-credentials" not in each.headers for each in (preflight, plain, turn))
    assert "x-request-id" in preflight.headers


def test_a_key_is_not_needed_to_ask_whether_one_may_ask(serve: Serve) -> None:
    server = serve(cors_origin=("https://chat.example",), api_keys=SecretStr(f"alice={KEY}"))
    origin = {"origin": "https://chat.example"}
    with client(server.server) as http:
        preflight = http.options(CHAT, headers={**origin, "access-control-request-method": "POST"})
        without = http.post(CHAT, json=body(), headers=origin)
    assert preflight.is_success
    refused(without, 401, "missing_api_key")
    assert without.headers["access-control-allow-origin"] == "https://chat.example"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "json"])
def test_bodies_come_as_json_and_nothing_else(serve: Serve, kind: str) -> None:
    server = serve()
    content = json.dumps(body()).encode()
    with client(server.server) as http:
        headers = {"content-type": kind} if kind else {}
        for method, path in (("POST", CHAT), ("POST", f"{SESSIONS}/s/wake"), ("PATCH", f"{SESSIONS}/s")):
            refused(http.request(method, path, content=content, headers=headers), 415, "unsupported_media_type")


@pytest.mark.parametrize(
    "kind", ["application/json", "Application/JSON; charset=utf-8", "application/merge-patch+json"]
)
def test_json_is_known_by_each_of_its_names(serve: Serve, kind: str) -> None:
    with client(serve().server) as http:
        response = http.post(CHAT, content=json.dumps(body()).encode(), headers={"content-type": kind})
    assert response.status_code == 200


def test_without_a_body_a_program_needs_no_type_and_a_browser_does(serve: Serve) -> None:
    server = serve()
    own = {"origin": server.url}
    with client(server.server) as http:
        http.post(CHAT, json=body(session_id="s"))
        sleep = f"{SESSIONS}/s/sleep"
        assert http.post(sleep).status_code == 200
        refused(http.post(sleep, headers=own), 415, "unsupported_media_type")
        refused(http.post(sleep, headers={"sec-fetch-site": "cross-site"}), 415, "unsupported_media_type")
        assert http.post(sleep, headers={**own, "content-type": "application/json"}).status_code == 200


# --- sizes --------------------------------------------------------------------------------


def test_a_request_keeps_the_id_it_came_with(serve: Serve) -> None:
    with client(serve().server) as http:
        given = http.get("/healthz", headers={"x-request-id": "trace-1/2"})
        bad = [
            http.get("/healthz", headers={b"x-request-id": value})
            for value in (b"", b"x" * 129, b"two words", b"caf\xe9")
        ]
    assert given.headers["x-request-id"] == "trace-1/2"
    assert all(each.headers["x-request-id"].startswith("req_") for each in bad)


def test_too_many_headers_and_too_large_ones_are_refused(serve: Serve) -> None:
    with client(serve().server) as http:
        many = [(f"x-{number}", "1") for number in range(MAX_HEADERS)]
        refused(http.get("/healthz", headers=many), 431, "headers_too_large")
        refused(http.get("/healthz", headers={"x-large": "x" * 66_000}), 431, "headers_too_large")
        assert http.get("/healthz", headers={"x-large": "x" * 60_000}).status_code == 200


@pytest.mark.parametrize("start", [b"GET / HTTP/1.1\r\nx-endless: ", b"GET /", b"GET / HTTP/1.1\r\nx"])
def test_a_head_that_does_not_end_ends_the_connection(serve: Serve, start: bytes) -> None:
    server = serve()
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        connection.sendall(start)
        sent = 0
        try:
            while sent < 4 * MAX_HEAD_BYTES:
                sent += connection.send(b"x" * 8192)
            answer = connection.recv(65_536)
        except ConnectionError:
            answer = b"HTTP/1.1 431 "  # the answer was lost with the connection: it was closed all the same
    assert answer.split(b" ")[1] in (b"431", b"400", b"")
    with client(server.server) as http:
        assert http.get("/healthz").status_code == 200


def test_trailers_are_no_headers(serve: Serve) -> None:
    server = serve(api_keys=SecretStr(f"alice={KEY}"))
    address = urlsplit(server.url)
    content = json.dumps(body()).encode()
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
            b"%x\r\n%s\r\n0\r\nauthorization: Bearer %s\r\n\r\n" % (len(content), content, KEY.encode())
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ('{"model": "%s", "messages": [{"role": "user", "content": "a\\u0000b"}]}', "messages[0].content"),
        ('{"model": "%s", "messages": [{"role": "user", "content": "\\ud83d"}]}', "messages[0].content"),
        ('{"model": "%s", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "temperature"),
        ('{"model": "%s", "messages": [{"role": "user", "content": "x"}], "other": Infinity}', "other"),
        ('{"model": "%s", "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', "temperature"),
        ('{"model": "%s", "messages": [{"role": "user", "content": "x"}], "seed": 1e400}', "seed"),
        ('{"model": "%s", "messages": [{"role": "user", "content": "x"}], "metadata": ' + "[" * 70 + "]" * 70 + "}",
         "metadata"),
        ('{"model": "%s", "messages": ' + "[" * 100_000 + "]" * 100_000 + "}", "messages"),
        ('{"model": "%s", "messages": [{"role": "user", "content": "x"}], "session_id": "' + "i" * 10_240 + '"}',
         "session_id"),
        ('{"model": "%s", "messages": [{"role": "user", "content": "x"}], "parent_session_id": "' + "i" * 10_240 + '"}',
         "parent_session_id"),
        ('{"model": "%s", "messages": [{"role": "user", "content": "x"}], "cache_salt": "' + "i" * 10_240 + '"}',
         "cache_salt"),
        ('{"model": "%s", "messages": [{"role": "user", "content": "x"}], "prompt_cache_key": "' + "i" * 10_240 + '"}',
         "prompt_cache_key"),
    ],
)  # fmt: skip
def test_what_no_model_could_take_is_a_400_that_names_it(serve: Serve, text: str, param: str) -> None:
    with client(serve().server) as http:
        response = http.post(
            CHAT, content=text.replace("%s", NAME).encode(), headers={"content-type": "application/json"}
        )
        refused(response, 400, "invalid_value", param)


def test_a_number_of_a_million_digits_is_a_400(serve: Serve) -> None:
    text = '{"model": "x", "seed": ' + "9" * 1_000_000 + "}"
    with client(serve().server) as http:
        response = http.post(CHAT, content=text.encode(), headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_ids_of_ten_kilobytes_are_skipped_in_headers_and_unknown_in_paths(serve: Serve) -> None:
    with client(serve().server) as http:
        turn = http.post(CHAT, json=body(), headers={"x-session-id": "i" * 10_240})
        assert turn.json()["session"]["id_source"] == "new"
        refused(http.get(f"{SESSIONS}/{'i' * 10_240}"), 404, "session_not_found", "session_id")
        refused(http.get(SESSIONS, params={"after": "i" * 10_240}), 400, "invalid_value", "after")


# --- what is said at start ----------------------------------------------------------------


def test_open_doors_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    announce.settings(load({"host": "0.0.0.0", "cors_origin": ["*"]}), asks_for_key=True)
    assert "no key" not in caplog.text
    announce.settings(load({"cors_origin": ["*"]}))
    assert "any web page" in caplog.text


def test_the_first_words_take_the_key_from_a_variable_where_one_is_needed() -> None:
    words = announce.hello("http://127.0.0.1:8000", "small", asks_for_key=True)
    assert '-H "Authorization: Bearer $DORMOUSE_CLIENT_KEY" -d ' in words
    assert "Bearer" not in announce.hello("http://127.0.0.1:8000", "small")
