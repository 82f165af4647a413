"""Keys, tenants and the admin, over sockets."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from openai import AuthenticationError, OpenAI, RateLimitError
from pydantic import SecretStr

from app import keys
from app.cookies import KEPT_SECONDS, NAME, AdminCookies
from app.settings import Settings
from tests.app import conftest
from tests.app.conftest import Scripted
from tests.app.live import Live, client, live

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

Serve = Callable[..., Scripted]
MODEL = conftest.NAME
CHAT = "/v1/chat/completions"
SESSIONS = "/v1/sessions"
ALICE, BOB, ADMIN = "dm-alice-0123456789", "dm-bob-0123456789ab", "dm-admin-0123456789"
TWO: dict[str, Any] = {"api_keys": SecretStr(f"alice={ALICE},bob={BOB}"), "admin_key": SecretStr(ADMIN)}
LONG = "tell me of mice and of their sleep " * 8


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def turn(http: httpx.Client, session_id: str | None = None, text: str = LONG, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": text}]
    return http.post(CHAT, json={"model": MODEL, "messages": messages, "session_id": session_id, **fields})


def refused(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert error["code"] == code
    return error


# --- keys ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        bearer("dm-nobody-0123456789"),
        bearer(ALICE + "x"),
        bearer(ALICE[:-1]),
        bearer(ADMIN),
        {"authorization": f"Basic {ALICE}"},
        {"authorization": ALICE},
        {"x-api-key": BOB[1:]},
        {"authorization": "Bearer nonsense-0123456789", "x-api-key": ALICE},
        {"cookie": f"{NAME}={ALICE}"},
    ],
)
def test_without_one_of_its_keys_nothing_of_the_api_is_reached(serve: Serve, headers: dict[str, str]) -> None:
    with client(serve(**TWO).server, headers=headers) as http:
        for method, path in (
            ("POST", CHAT),
            ("GET", "/v1/models"),
            ("GET", SESSIONS),
            ("DELETE", SESSIONS),
            ("GET", f"{SESSIONS}/s"),
            ("GET", "/nothing"),
            ("GET", "/v1/sessions/%2e%2e%2fhealthz"),
            ("GET", "//healthz"),
            ("GET", "/healthz/"),
            ("POST", "/v1%2Fchat/completions"),
        ):
            response = http.request(method, path, json={} if method == "POST" else None)
            error = refused(response, 401, response.json()["error"]["code"])
            assert error["code"] in ("missing_api_key", "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
            assert "0123456789" not in response.text


def test_what_says_only_that_the_server_lives_is_open(serve: Serve) -> None:
    with client(serve(**TWO).server) as http:
        for path in ("/health", "/healthz", "/readyz", "/version", "/openapi.json", "/metrics"):
            assert http.get(path).status_code == 200
        for path in ("/docs", "/redoc"):
            assert http.get(path).status_code == 401  # not there: they would load scripts from elsewhere


@pytest.mark.parametrize("headers", [bearer(ALICE), {"authorization": f"bearer  {ALICE}"}, {"x-api-key": ALICE}])
def test_a_key_may_come_as_openais_or_anthropics_clients_send_it(serve: Serve, headers: dict[str, str]) -> None:
    with client(serve(**TWO).server, headers=headers) as http:
        assert http.get("/v1/models").status_code == 200
        assert turn(http).status_code == 200


def test_without_keys_whatever_a_client_sends_as_one_is_ignored(serve: Serve) -> None:
    with client(serve().server, headers=bearer("unused")) as http:
        assert turn(http).status_code == 200


def test_no_body_is_waited_for_from_a_stranger(serve: Serve) -> None:
    address = urlsplit(serve(**TWO).url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: 1000000\r\n\r\n"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 401 ")


def test_the_openai_client_understands_a_wrong_key(serve: Serve) -> None:
    server = serve(**TWO)
    for key, works in ((ALICE, True), ("dm-wrong-0123456789", False)):
        openai = OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
        if works:
            assert openai.models.list().data
        else:
            with pytest.raises(AuthenticationError) as caught:
                openai.models.list()
            assert caught.value.code == "invalid_api_key"
        openai.close()


# --- tenants ------------------------------------------------------------------------------


def test_two_tenants_with_one_id_and_one_prompt_share_nothing(serve: Serve) -> None:
    server = serve(**TWO)
    with client(server.server, headers=bearer(ALICE)) as alice, client(server.server, headers=bearer(BOB)) as bob:
        first = turn(alice, "s").json()["session"]
        turn(alice, "only-alices")
        assert turn(alice, "again").json()["session"]["reused_tokens"]["hbm"] > 0  # her own prompt
        second = turn(bob, "s").json()["session"]
        assert (first["turn"], second["turn"]) == (1, 1)
        assert sum(second["reused_tokens"].values()) == 0
        assert second["computed_tokens"] == first["computed_tokens"]
        assert second["miss_reason"] == "new_session"
        assert [one["id"] for one in bob.get(SESSIONS).json()["data"]] == ["s"]
        assert bob.get(f"{SESSIONS}/s").json()["turns"] == 1
        for method, path in (
            ("GET", f"{SESSIONS}/only-alices"),
            ("DELETE", f"{SESSIONS}/only-alices"),
            ("POST", f"{SESSIONS}/only-alices/wake"),
            ("POST", f"{SESSIONS}/only-alices/sleep"),
            ("POST", f"{SESSIONS}/only-alices/fork"),
            ("DELETE", f"{SESSIONS}/only-alices/wake"),
        ):
            refused(bob.request(method, path), 404, "session_not_found")
        refused(bob.patch(f"{SESSIONS}/only-alices", json={"pinned": True}), 404, "session_not_found")
        refused(bob.get(SESSIONS, params={"after": "only-alices"}), 400, "invalid_value")
        # Found by its text it would be alice's.
        assert turn(bob).json()["session"]["id_source"] == "new"
        assert bob.delete(SESSIONS).json()["deleted"] == 2
        assert {one["id"] for one in alice.get(SESSIONS).json()["data"]} == {"s", "only-alices", "again"}


def test_what_one_tenant_does_with_an_id_does_nothing_to_anothers_session_of_that_id(serve: Serve) -> None:
    server = serve(**TWO)
    with client(server.server, headers=bearer(ALICE)) as alice, client(server.server, headers=bearer(BOB)) as bob:
        for http in (alice, bob):
            assert turn(http, "s").status_code == 200
        assert {spec.tenant for spec in server.engine.specs} == {"alice", "bob"}
        before = alice.get(f"{SESSIONS}/s").json()
        assert bob.post(f"{SESSIONS}/s/sleep").status_code == 200
        assert bob.patch(f"{SESSIONS}/s", json={"pinned": True}).status_code == 200
        assert bob.post(f"{SESSIONS}/s/fork", json={"session_id": "f"}).status_code == 201
        assert alice.get(f"{SESSIONS}/s").json() == before
        refused(alice.get(f"{SESSIONS}/f"), 404, "session_not_found")
        # A parent that is another's is nobody.
        child = turn(bob, "c", parent_session_id="only-alices").json()["session"]
        assert sum(child["reused_tokens"].values()) > 0  # of his own prompt, which is the same
        assert turn(alice, "only-alices").status_code == 200
        assert bob.delete(SESSIONS).json()["deleted"] == 3
        again = turn(alice, "s").json()["session"]
        assert again["turn"] == 2
        assert again["reused_tokens"]["hbm"] > 0


def test_the_admin_sees_both_sessions_of_one_id_and_whose_each_is(serve: Serve) -> None:
    server = serve(**TWO)
    with client(server.server, headers=bearer(ALICE)) as alice, client(server.server, headers=bearer(BOB)) as bob:
        for http in (alice, bob):
            turn(http, "same")
    with client(server.server, headers=bearer(ADMIN)) as admin:
        rows = admin.get("/admin/api/sessions").json()["sessions"]
        assert sorted((row["tenant"], row["id"]) for row in rows) == [("alice", "same"), ("bob", "same")]
        # The admin key is no tenant: it has no sessions, and meets nobody's.
        refused(admin.get(f"{SESSIONS}/same"), 401, "invalid_api_key")


def test_a_salt_is_one_within_its_tenant(serve: Serve) -> None:
    server = serve(**TWO)
    with client(server.server, headers=bearer(ALICE)) as alice, client(server.server, headers=bearer(BOB)) as bob:
        turn(alice, "s", cache_salt="shared")
        assert bob.get(SESSIONS, params={"cache_salt": "shared"}).json()["data"] == []
        session = turn(bob, "s", cache_salt="shared").json()["session"]
        assert (session["turn"], sum(session["reused_tokens"].values())) == (1, 0)


def test_tenants_on_one_connection_are_told_apart(serve: Serve) -> None:
    """A connection that is kept alive runs one request after the other in the same context."""
    server = serve(**TWO)
    with client(server.server) as http:
        for number in range(6):
            key = (ALICE, BOB)[number % 2]
            messages = [{"role": "user", "content": LONG}]
            body = {"model": MODEL, "messages": messages, "session_id": f"{key}-{number}"}
            assert http.post(CHAT, json=body, headers=bearer(key)).status_code == 200
            listed = [one["id"] for one in http.get(SESSIONS, headers=bearer(key)).json()["data"]]
            assert all(one.startswith(key) for one in listed)
            refused(http.get(SESSIONS), 401, "missing_api_key")


def test_a_tenant_that_streams_keeps_its_own_sessions(serve: Serve) -> None:
    server = serve(**TWO)
    with client(server.server, headers=bearer(ALICE)) as alice, client(server.server, headers=bearer(BOB)) as bob:
        assert "[DONE]" in turn(alice, "s", stream=True).text
        assert [one["id"] for one in alice.get(SESSIONS).json()["data"]] == ["s"]
        assert bob.get(SESSIONS).json()["data"] == []


def test_the_context_of_a_key_is_what_it_is_shown_and_held_to(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f"{keys.lines('alice', ALICE)}\nmax_context = 40\n{keys.lines('bob', BOB)}\n")
    server = serve(api_keys_file=file)
    with client(server.server, headers=bearer(ALICE)) as alice, client(server.server, headers=bearer(BOB)) as bob:
        lengths = [http.get("/v1/models").json()["data"][0]["context_length"] for http in (alice, bob)]
        assert lengths == [40, 2048]
        refused(turn(alice), 400, "context_length_exceeded")
        assert turn(bob).status_code == 200
        assert turn(alice, text="hi").status_code == 200
        assert server.engine.specs[-1].max_new_tokens <= 40


# --- budgets ------------------------------------------------------------------------------


def test_requests_beyond_a_keys_rate_are_told_when_to_come_back(serve: Serve) -> None:
    server = serve(**TWO, key_requests_per_minute=2)
    with client(server.server, headers=bearer(ALICE)) as alice, client(server.server, headers=bearer(BOB)) as bob:
        first, second, third = turn(alice, "s"), turn(alice, "s"), turn(alice, "s")
        assert [each.status_code for each in (first, second)] == [200, 200]
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        error = refused(third, 429, "rate_limit_exceeded")
        assert error["type"] == "requests"
        assert 1 <= int(third.headers["retry-after"]) <= 30
        assert 0 < int(third.headers["retry-after-ms"]) <= 30_000
        assert third.headers["x-ratelimit-remaining-requests"] == "0"
        assert re.fullmatch(r"(\d+m)?[\d.]+s", third.headers["x-ratelimit-reset-requests"])
        # Looking after sessions costs none, and bob has his own.
        assert alice.get(f"{SESSIONS}/s").status_code == alice.post(f"{SESSIONS}/s/sleep").status_code == 200
        assert turn(bob).status_code == 200
    openai = OpenAI(base_url=f"{server.url}/v1", api_key=ALICE, max_retries=0)
    with pytest.raises(RateLimitError):
        openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    openai.close()


def test_tokens_are_counted_when_a_turn_has_used_them(serve: Serve) -> None:
    server = serve(**TWO, key_tokens_per_minute=50)
    with client(server.server, headers=bearer(ALICE)) as alice, client(server.server, headers=bearer(BOB)) as bob:
        first = turn(alice)
        used = first.json()["usage"]["total_tokens"]
        assert used > 50
        second = turn(alice)
        error = refused(second, 429, "rate_limit_exceeded")
        assert error["type"] == "tokens"
        assert second.headers["x-ratelimit-remaining-tokens"] == "0"
        wait = int(second.headers["retry-after-ms"]) / 1000
        assert (used - 50) * 60 / 50 - 3 < wait < (used - 48) * 60 / 50
        assert turn(bob).status_code == 200


def test_a_key_that_floods_is_refused_beyond_its_part_of_the_queue_and_others_pass(serve: Serve) -> None:
    server = serve(**TWO, max_running=2, key_max_running=1, key_max_waiting=1)
    with client(server.server, headers=bearer(ALICE)) as alice, client(server.server, headers=bearer(BOB)) as bob:
        server.pause()
        answers: list[httpx.Response] = []
        runs = [threading.Thread(target=lambda: answers.append(turn(alice))) for _ in range(2)]
        for thread in runs:
            thread.start()
        server.server.wait_until(lambda: server.server.gateway.manager.snapshot().turns.granted == 1)
        server.server.wait_until(lambda: server.server.gateway.queue.waiting == 1)
        flooded = turn(alice)
        refused(flooded, 429, "queue_full")
        assert "retry-after" in flooded.headers
        other = threading.Thread(target=lambda: answers.append(turn(bob)))
        other.start()
        server.server.wait_until(lambda: server.server.gateway.manager.snapshot().turns.granted == 2)
        server.go_on()
        for thread in (*runs, other):
            thread.join()
    assert [each.status_code for each in answers] == [200, 200, 200]


# --- the admin ----------------------------------------------------------------------------

ADMIN_PATHS = (
    "/admin/api/state",
    "/admin/api/events",
    "/admin/api/sessions",
    "/admin/api/sessions/0",
    "/admin/api/health",
    "/admin/static/app.js",
    "/admin/nothing",
    "/admin/",
)


@pytest.mark.parametrize(
    "headers", [{}, bearer(ALICE), bearer("wrong-0123456789"), {"cookie": f"{NAME}=9999999999.00"}]
)
def test_admin_asks_for_its_own_key(serve: Serve, headers: dict[str, str]) -> None:
    with client(serve(**TWO).server, headers=headers) as http:
        for path in ADMIN_PATHS:
            refused(http.get(path), 401, "invalid_admin_key")
        page = http.get("/admin")
        assert (page.status_code, page.headers["content-type"]) == (401, "text/html; charset=utf-8")
        assert "Admin key" in page.text
        assert "default-src 'none'" in page.headers["content-security-policy"]
        own = re.findall(r'(?:src|href)="(admin/[^"]*)"', page.text)
        assert len(own) == 2
        assert all(http.get(f"/{address}").status_code == 200 for address in own)
        assert MODEL not in page.text


def test_the_admin_key_opens_admin_and_nothing_else(serve: Serve) -> None:
    with client(serve(**TWO).server, headers=bearer(ADMIN)) as http:
        assert http.get("/admin").status_code == http.get("/admin/api/state").status_code == 200
        refused(http.get("/v1/models"), 401, "invalid_api_key")


def test_a_browser_exchanges_the_key_for_a_cookie_that_scripts_and_other_sites_have_not(serve: Serve) -> None:
    server = serve(**TWO)
    own = {"origin": server.url}
    with client(server.server) as http, client(server.server, headers=bearer(ALICE)) as alice:
        turn(alice, "s")
        refused(http.post("/admin/login", json={"key": ALICE}, headers=own), 401, "invalid_admin_key")
        refused(http.post("/admin/login", json={"key": 3}, headers=own), 400, "invalid_value")
        done = http.post("/admin/login", json={"key": ADMIN}, headers=own)
        assert done.status_code == 204
        cookie = done.headers["set-cookie"]
        assert ADMIN not in cookie
        attributes = {part.strip().lower() for part in cookie.split(";")[1:]}
        assert {"httponly", "samesite=strict", "path=/", f"max-age={KEPT_SECONDS}"} <= attributes
        assert http.get("/admin/api/sessions").json()["sessions"][0]["tenant"] == "alice"
        assert http.get("/admin/api/state").status_code == 200
        refused(http.get("/v1/models"), 401, "missing_api_key")
        http.post("/admin/logout", headers={**own, "content-type": "application/json"})
        assert http.get("/admin").status_code == 401


def test_the_admin_key_cannot_be_guessed_by_trying(serve: Serve) -> None:
    with client(serve(**TWO).server) as http:
        tries = [http.post("/admin/login", json={"key": f"guess-{number}"}) for number in range(25)]
        assert [each.status_code for each in tries].count(401) == 20
        refused(tries[-1], 429, "rate_limit_exceeded")


def test_with_api_keys_and_no_admin_key_admin_is_nobodys(serve: Serve) -> None:
    with client(serve(api_keys=TWO["api_keys"]).server, headers=bearer(ALICE)) as http:
        for path in ("/admin", *ADMIN_PATHS):
            refused(http.get(path), 403, "no_admin_key")


def test_a_command_of_the_servers_own_user_opens_admin_with_the_key_of_the_process(serve: Serve) -> None:
    server = serve(api_keys=TWO["api_keys"])
    process_key = server.server.app.state.process_key
    with client(server.server, headers=bearer(process_key)) as http:
        assert http.get("/admin/api/state").status_code == 200
        refused(http.get("/v1/models"), 401, "invalid_api_key")
    with client(serve().server, headers=bearer(process_key)) as http:
        assert http.get("/metrics").status_code == 200
    with client(serve(**TWO).server, headers=bearer(process_key)) as http:
        refused(http.get("/admin/api/state"), 401, "invalid_admin_key")


def test_with_an_admin_key_alone_the_api_is_open_and_admin_is_not(serve: Serve) -> None:
    with client(serve(admin_key=TWO["admin_key"]).server) as http:
        assert turn(http).status_code == 200
        refused(http.get("/admin/api/state"), 401, "invalid_admin_key")


@pytest.mark.parametrize(("guarded", "status"), [(False, 200), (True, 401)])
def test_metrics_are_guarded_where_it_is_said(serve: Serve, guarded: bool, status: int) -> None:
    with client(serve(**TWO, guard_metrics=guarded).server) as http:
        assert http.get("/metrics").status_code == status
        assert http.get("/metrics", headers=bearer(ADMIN)).status_code == 200


def test_a_cookie_is_valid_for_its_time_and_for_this_process() -> None:
    now = 1000.0
    cookies = AdminCookies(lambda: now)
    value = cookies.value()
    assert cookies.is_valid(f"other=1; {NAME}={value}")
    assert not AdminCookies(lambda: now).is_valid(f"{NAME}={value}")
    expiry, mark = value.split(".")
    for forged in (f"{int(expiry) + 1}.{mark}", expiry, f".{mark}", f"{expiry}.", "", "é.é", f"{expiry}.{mark}.x"):
        assert not cookies.is_valid(f"{NAME}={forged}")
    now += KEPT_SECONDS
    assert not cookies.is_valid(f"{NAME}={value}")


# --- the real model -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def keyed(cache_dir: Path) -> Iterator[Live]:
    """The embedded model behind two keys."""
    settings = Settings(model="embedded", hbm_bytes=64 * 1024**2, dram_bytes=0, cache_dir=cache_dir, **TWO)
    with live(settings) as server:
        yield server
        server.check_idle()


def test_two_tenants_of_a_real_model_share_neither_content_nor_ids_nor_kv(keyed: Live) -> None:
    model = keyed.gateway.names.first
    messages = [{"role": "user", "content": "The password of the north door is Haselmaus. Say only: noted. " * 4}]
    ask: dict[str, Any] = {"model": model, "messages": messages, "session_id": "run-1", "max_tokens": 4, "seed": 1}
    with client(keyed, headers=bearer(ALICE)) as alice, client(keyed, headers=bearer(BOB)) as bob:
        first = alice.post(CHAT, json=ask).json()
        again = alice.post(CHAT, json=ask).json()
        other = bob.post(CHAT, json=ask).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert other["session"]["reused_tokens"] == {"hbm": 0, "dram": 0, "nvme": 0}
        assert other["session"]["computed_tokens"] == first["session"]["computed_tokens"]
        assert (again["session"]["turn"], other["session"]["turn"]) == (2, 1)
        # The same weights and the same seed: tenants differ in what they share and in nothing else.
        assert other["choices"][0]["message"] == first["choices"][0]["message"]
        follow = [*messages, first["choices"][0]["message"], {"role": "user", "content": "Which door?"}]
        found = bob.post(CHAT, json={**ask, "messages": follow, "session_id": None}).json()["session"]
        assert found["id"] == "run-1"  # his own, by its text
        bob.delete(SESSIONS)
        assert bob.post(CHAT, json={**ask, "messages": follow, "session_id": None}).json()["session"]["turn"] == 1
        assert alice.get(f"{SESSIONS}/run-1").json()["turns"] == 2
