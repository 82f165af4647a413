"""Sessions as /admin has them: found, sorted and paged over all tenants, looked at one by one, and acted upon."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import SecretStr

from app.admin.census import AT_ONCE
from tests.app.conftest import NAME, Scripted
from tests.app.live import client
from tests.app.scripted import WORDS

if TYPE_CHECKING:
    import httpx

Serve = Callable[..., Scripted]
PATH = "/admin/api/sessions"
LONG = "tell me of mice and of their sleep " * 12
ADMIN = {"authorization": "Bearer dm-admin-0123456789"}
KEYS: dict[str, Any] = {
    "api_keys": SecretStr("alice=dm-alice-0123456789,bob=dm-bob-0123456789ab"),
    "admin_key": SecretStr("dm-admin-0123456789"),
}


def say(http: httpx.Client, session_id: str, *texts: str, **fields: Any) -> None:
    messages = []
    for text in texts or (LONG,):
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "".join(WORDS)}]
    body = {"model": NAME, "messages": messages[:-1], "session_id": session_id, **fields}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text


def listed(http: httpx.Client, **question: Any) -> list[str]:
    answer = http.get(PATH, params=question)
    assert answer.status_code == 200, answer.text
    return [row["id"] for row in answer.json()["sessions"]]


def number_of(http: httpx.Client, session_id: str) -> int:
    (row,) = (row for row in http.get(PATH, params={"q": session_id}).json()["sessions"] if row["id"] == session_id)
    return int(row["number"])


def test_sessions_are_searched_sorted_and_paged(serve: Serve) -> None:
    with client(serve().server) as http:
        for name, times in (("run/a", 1), ("run/b", 3), ("chat-c", 2)):
            for time in range(times):
                say(http, name, *[LONG] * (time + 1))
        say(http, "d", "hi", parent_session_id="RUN/a", session={"expected_idle_seconds": 60}, priority=-3)
        assert listed(http) == ["d", "chat-c", "run/b", "run/a"]
        assert listed(http, sort="last_active", order="asc") == ["run/a", "run/b", "chat-c", "d"]
        assert listed(http, sort="id", order="asc") == ["chat-c", "d", "run/a", "run/b"]
        assert listed(http, sort="turns") == ["run/b", "chat-c", "d", "run/a"]
        assert listed(http, sort="tokens", limit=1, page=2) == ["chat-c"]
        assert listed(http, sort="priority", order="asc", limit=1) == ["d"]
        assert listed(http, sort="returns", order="asc")[0] == "d"
        assert listed(http, q="run/") == ["d", "run/b", "run/a"], "in any case, and by its parent's id"
        answer = http.get(PATH, params={"q": "RUN/B", "page": 3}).json()
        assert (answer["total"], answer["matched"], answer["pages"], answer["sessions"]) == (4, 1, 1, [])
        for wrong in ({"sort": "nothing"}, {"page": 0}, {"limit": 1000}):
            assert http.get(PATH, params=wrong).status_code == 400


def test_a_row_tells_what_is_kept_where_and_on_which_terms(serve: Serve) -> None:
    with client(serve().server) as http:
        say(http, "a", parent_session_id="p", session={"keep_seconds": 60, "expire_seconds": 3600})
        say(http, "salty", cache_salt="a secret")
        salty, row = http.get(PATH).json()["sessions"]
    assert row["parent_id"] == "p"
    assert row["blocks_in_all"] == row["blocks"]["dram"] > 2
    assert row["blocks"]["hbm"] == row["blocks_in_all"] // 2
    assert row["expires_at"] - row["last_active_at"] == pytest.approx(3600, abs=1)
    assert (row["keep_seconds"], row["pinned"], row["persist"], row["tenant"]) == (60, False, "disk", "")
    assert (row["is_salted"], salty["is_salted"]) == (False, True)


def test_the_admin_meets_the_sessions_of_every_key_and_a_key_none_of_this(serve: Serve) -> None:
    server = serve(**KEYS)
    alice = {"authorization": "Bearer dm-alice-0123456789"}
    with client(server.server) as http:
        for key in ("dm-alice-0123456789", "dm-bob-0123456789ab"):
            http.headers["authorization"] = f"Bearer {key}"
            say(http, "same")
        assert http.get(PATH).status_code == 401
        http.headers.update(ADMIN)
        rows = http.get(PATH).json()["sessions"]
        assert {(row["id"], row["tenant"]) for row in rows} == {("same", "alice"), ("same", "bob")}
        (bobs,) = (row["number"] for row in rows if row["tenant"] == "bob")
        assert http.delete(f"{PATH}/{bobs}").json()["deleted"] is True
        assert [row["tenant"] for row in http.get(PATH).json()["sessions"]] == ["alice"]
        assert http.get("/v1/sessions/same", headers=alice).status_code == 200


def test_every_button_is_a_call(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        say(http, "run/1")
        path = f"{PATH}/{number_of(http, 'run/1')}"
        woken = http.post(f"{path}/wake", json={"hold_seconds": 1})
        assert (woken.status_code, woken.json()["status"]) == (200, "awake")
        assert http.delete(f"{path}/wake").json()["status"] == "cancelled"
        assert http.post(f"{path}/sleep?tier=dram").json()["status"] == "asleep"
        assert http.post(f"{path}/sleep?tier=nvme").json()["reason"] == "no_such_tier"
        assert http.patch(path, json={"pinned": True}).json()["pinned"] is True
        fork = http.post(f"{path}/fork", json={"session_id": "run/1b"})
        assert (fork.status_code, fork.json()["id"], fork.json()["parent_id"]) == (201, "run/1b", "run/1")
        assert http.delete(path).json() == {"id": "run/1", "object": "session.deleted", "deleted": True}
        gone = http.get(path)
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "session_not_found")
        assert listed(http) == ["run/1b"]


def test_a_session_shows_its_turns_and_where_its_prompt_diverged(serve: Serve) -> None:
    with client(serve().server, headers={"user-agent": "some-agent/2.0"}) as http:
        say(http, "a", LONG)
        say(http, "a", LONG, "and then?")
        say(http, "a", LONG, "<b>something else</b>")
        told = http.get(f"{PATH}/{number_of(http, 'a')}").json()
        clients = http.get("/admin/api/state").json()["clients"]
    newest, second, first = told["last_turns"]
    assert (first["turn"], first["miss"], first["diverged"]) == (1, "new_session", None)
    assert (second["turn"], second["miss"], second["client"]) == (2, None, "some-agent")
    assert sum(second["reused"].values()) + second["computed"] + second["recomputed"] == second["prompt_tokens"]
    assert newest["diverged"]["received"].startswith("<b>something else</b>")
    assert newest["diverged"]["stored"].startswith("and then?")
    assert told["branches"][0]["estimate"]["decision"] == "restore"
    assert set(clients) <= {"some-agent"}


@pytest.mark.parametrize(
    ("settings", "fields"),
    [({"admin_text": "never"}, {}), ({}, {"cache_salt": "a secret"}), (KEYS, {})],
    ids=["never", "salted", "with keys"],
)
def test_text_is_not_shown_where_it_may_not_be(serve: Serve, settings: dict[str, Any], fields: dict[str, Any]) -> None:
    with client(serve(**settings).server, headers={"authorization": "Bearer dm-alice-0123456789"}) as http:
        say(http, "a", LONG, **fields)
        say(http, "a", LONG, "and then?", **fields)
        say(http, "a", LONG, "something else", **fields)
        http.headers.update(ADMIN)
        page = http.get(f"{PATH}/{number_of(http, 'a')}")
    assert page.json()["last_turns"][0]["diverged_at"] is not None
    assert page.json()["last_turns"][0]["diverged"] is None
    assert "something else" not in page.text
    assert "and then?" not in page.text


def test_nothing_is_left_of_a_deleted_sessions_turns(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        say(http, "a", LONG)
        say(http, "a", "something else")
        first = number_of(http, "a")
        http.delete("/v1/sessions/a")
        say(http, "a", LONG)
        assert http.get(f"{PATH}/{first}").status_code == 404
        told = http.get(f"{PATH}/{number_of(http, 'a')}").json()
    assert [turn["turn"] for turn in told["last_turns"]] == [1]


def test_sessions_kept_are_counted_a_few_at_a_time(serve: Serve) -> None:
    server = serve(max_sessions=2000)
    with client(server.server) as http:
        say(http, "a", LONG)
        keeper = server.server.gateway.keeper

        def many() -> None:
            for number in range(450):
                keeper.fork("", "a", f"fork-{number}", None)

        server.server.call(many)
        assert http.get("/admin/api/state").json()["kept"]["kept"] == AT_ONCE, "so far"
        for _ in range(3):
            state = http.get("/admin/api/state").json()
    assert state["kept"]["sessions"] == {"hbm": 0, "dram": 451, "nvme": 0, "nowhere": 0}
