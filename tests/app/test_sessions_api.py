"""`/v1/sessions` over sockets, with a scripted engine and a store that notes what it is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from app.hints import Hints
from app.keeper import Keeper
from kvstore.events import WakeStatus
from kvstore.types import Tier
from tests.app.conftest import BLOCK_TOKENS, NAME, Scripted
from tests.app.live import client
from tests.app.scripted import WORDS

if TYPE_CHECKING:
    import httpx

Serve = Callable[..., Scripted]
CHAT = "/v1/chat/completions"
SESSIONS = "/v1/sessions"
ANSWER = "".join(WORDS)
LONG = "tell me of mice and of their sleep " * 8
"""Several blocks."""


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def say(http: httpx.Client, session_id: str, text: str = LONG, **fields: Any) -> dict[str, Any]:
    """One turn that begins a conversation; its `session` object."""
    body = {"model": NAME, "messages": [user(text)], "session_id": session_id, **fields}
    response = http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    session: dict[str, Any] = response.json()["session"]
    return session


def go_on(http: httpx.Client, session_id: str, text: str = LONG, **fields: Any) -> dict[str, Any]:
    """The turn after `say`."""
    messages = [user(text), {"role": "assistant", "content": ANSWER}, user("and then?")]
    response = http.post(CHAT, json={"model": NAME, "messages": messages, "session_id": session_id, **fields})
    assert response.status_code == 200, response.text
    session: dict[str, Any] = response.json()["session"]
    return session


def refused(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """An OpenAI error object, whole."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert error["code"] == code
    return error


# --- looking ------------------------------------------------------------------------------


def test_a_session_shows_its_branches_terms_and_where_its_blocks_are(serve: Serve) -> None:
    server = serve()
    before = time.time()
    with client(server.server) as http:
        say(http, "s", priority=2, session={"keep_seconds": 60, "expected_idle_seconds": 9}, parent_session_id="p")
        say(http, "s", "A title, please: " + LONG)
        shown = http.get(f"{SESSIONS}/s").json()
    assert (shown["id"], shown["object"], shown["parent_id"], shown["turns"]) == ("s", "session", "p", 2)
    first, second = shown["branches"]
    assert (first["index"], first["turns"], first["busy"], second["index"]) == (0, 1, False, 1)
    assert (first["priority"], first["keep_seconds"], second["priority"], second["keep_seconds"]) == (2, 60.0, 0, 0.0)
    assert (first["pinned"], first["persist"], first["expire_seconds"], first["expires_at"]) == (
        False,
        "disk",
        None,
        None,
    )
    assert shown["tokens"] == first["tokens"] + second["tokens"]
    blocks = (first["tokens"] - 1) // BLOCK_TOKENS
    assert first["blocks"] == {"hbm": blocks // 2, "dram": blocks, "nvme": 0}
    assert before - 1 < shown["created_at"] <= shown["last_active_at"] < time.time() + 1
    assert 5 < first["expected_return_at"] - first["last_active_at"] < 10
    assert "mice" not in str(shown)


def test_sessions_are_listed_newest_first_in_pages(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        for number in range(5):
            say(http, f"s{number}", "hello")
        seen: list[str] = []
        after: str | None = None
        while True:
            page = http.get(SESSIONS, params={"limit": 2, **({"after": after} if after else {})}).json()
            assert page["object"] == "list"
            ids = [one["id"] for one in page["data"]]
            assert (page["first_id"], page["last_id"]) == (ids[0], ids[-1])
            seen += ids
            after = page["last_id"]
            for one in ids:  # a client that deletes as it goes finds every one of them all the same
                assert http.delete(f"{SESSIONS}/{one}").json() == {
                    "id": one,
                    "object": "session.deleted",
                    "deleted": True,
                }
            if not page["has_more"]:
                break
        empty = http.get(SESSIONS).json()
    assert seen == ["s4", "s3", "s2", "s1", "s0"]
    assert empty == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "after=never", "cache_salt="])
def test_a_list_that_cannot_be_is_refused_by_name(serve: Serve, query: str) -> None:
    with client(serve().server) as http:
        error = refused(http.get(f"{SESSIONS}?{query}"), 400, "invalid_value")
    assert error["param"] == query.split("=")[0]


def test_a_caller_without_the_salt_does_not_meet_salted_sessions(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        say(http, "s", cache_salt="secret")
        say(http, "open")
        listed = [one["id"] for one in http.get(SESSIONS).json()["data"]]
        salted = http.get(SESSIONS, params={"cache_salt": "secret"})
        refused(http.get(f"{SESSIONS}/s"), 404, "session_not_found")
        refused(http.post(f"{SESSIONS}/s/wake"), 404, "session_not_found")
        refused(http.delete(f"{SESSIONS}/s"), 404, "session_not_found")
        assert http.get(f"{SESSIONS}/s", params={"cache_salt": "secret"}).status_code == 200
        assert http.delete(SESSIONS).json() == {"object": "list.deleted", "deleted": 1}
        left = [one["id"] for one in http.get(SESSIONS, params={"cache_salt": "secret"}).json()["data"]]
    assert (listed, [one["id"] for one in salted.json()["data"]], left) == (["open"], ["s"], ["s"])
    assert "secret" not in salted.text


@pytest.mark.parametrize(
    ("session_id", "path"),
    [
        ("a/b", "a%2Fb"),
        ("a/b", "a%2fb"),
        ("a/wake", "a%2Fwake"),
        ("a/wake/wake", "a%2Fwake%2Fwake"),
        ("/", "%2F"),
        ("a//b/", "a%2F%2Fb%2F"),
        ("100%", "100%25"),
        ("%2F", "%252F"),
        ("a+b&c=d;e", "a+b&c=d;e"),
        ("what?#no", "what%3F%23no"),
        ("ses:1@x~y", "ses:1@x~y"),
    ],
)
def test_an_id_is_taken_as_it_was_encoded(serve: Serve, session_id: str, path: str) -> None:
    server = serve()
    with client(server.server) as http:
        say(http, "a", "hello there")
        say(http, session_id)
        url = f"{SESSIONS}/{path}"
        assert http.get(url).json()["id"] == session_id
        assert http.post(f"{url}/wake").json()["session_id"] == session_id
        assert http.patch(url, json={"priority": 1}).json()["id"] == session_id
        assert http.delete(f"{url}/wake").json()["session_id"] == session_id
        assert http.delete(url).json()["id"] == session_id
        assert [one["id"] for one in http.get(SESSIONS).json()["data"]] == ["a"]


@pytest.mark.parametrize("path", ["never", "%C3%BC", "%FF", "a%00b", "%20", "%", "%zz"])
def test_an_id_that_cannot_be_known_is_not_found(serve: Serve, path: str) -> None:
    with client(serve().server) as http:
        for method, url in (
            ("GET", f"{SESSIONS}/{path}"),
            ("DELETE", f"{SESSIONS}/{path}"),
            ("PATCH", f"{SESSIONS}/{path}"),
            ("POST", f"{SESSIONS}/{path}/wake"),
            ("DELETE", f"{SESSIONS}/{path}/wake"),
            ("POST", f"{SESSIONS}/{path}/sleep"),
            ("POST", f"{SESSIONS}/{path}/fork"),
        ):
            content = "{}" if method == "PATCH" else None
            headers = {"content-type": "application/json"}
            refused(http.request(method, url, content=content, headers=headers), 404, "session_not_found")


def test_a_slash_that_is_not_encoded_is_another_url(serve: Serve) -> None:
    with client(serve().server) as http:
        say(http, "a/b")
        refused(http.get(f"{SESSIONS}/a/b"), 404, "unknown_url")
        refused(http.put(f"{SESSIONS}/a"), 405, "method_not_allowed")


# --- forgetting ---------------------------------------------------------------------------


def test_what_is_deleted_is_closed_in_the_store_and_begins_anew(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        say(http, "s")
        (branch,) = server.server.call(lambda: [*server.server.gateway.book.recent()[0].branches.values()])
        http.delete(f"{SESSIONS}/s")
        assert server.store.closed == [branch.tip]
        refused(http.get(f"{SESSIONS}/s"), 404, "session_not_found")
        refused(http.delete(f"{SESSIONS}/s"), 404, "session_not_found")
        again = go_on(http, "s")
    assert (again["turn"], again["miss_reason"]) == (1, "new_session")


def test_all_of_a_callers_sessions_are_deleted_at_once(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        for number in range(7):
            say(http, f"s{number}")
        assert http.delete(SESSIONS).json() == {"object": "list.deleted", "deleted": 7}
        assert http.delete(SESSIONS).json() == {"object": "list.deleted", "deleted": 0}
    assert len(server.store.closed) == 7


def test_a_turn_whose_session_is_deleted_runs_on_and_leaves_nothing(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        say(http, "s")
        server.pause()
        answers: list[dict[str, Any]] = []
        turn = threading.Thread(target=lambda: answers.append(go_on(http, "s")))
        turn.start()
        server.server.wait_until(lambda: server.server.gateway.manager.snapshot().turns.granted == 1)
        assert http.get(f"{SESSIONS}/s").json()["busy"]
        http.delete(f"{SESSIONS}/s")
        server.go_on()
        turn.join()
        refused(http.get(f"{SESSIONS}/s"), 404, "session_not_found")
    assert answers[0]["turn"] == 2
    assert len(server.store.closed) == 2  # the branch as it was, and what the turn wrote
    assert server.store.closed[1] == server.store.recorded[-1].tip


# --- terms --------------------------------------------------------------------------------


def test_terms_are_changed_for_what_is_there_and_what_comes(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        say(http, "s")
        patch = {"priority": -3, "keep_seconds": 90, "pinned": True, "expire_seconds": 3600}
        shown = http.patch(f"{SESSIONS}/s", json=patch).json()
        assert {name: shown[name] for name in patch} == patch
        assert {name: shown["branches"][0][name] for name in patch} == patch
        told = server.store.recorded[-1]
        assert (told.tip, told.keep_seconds, told.pinned) == (told.old_tip, 90.0, True)
        go_on(http, "s")
        assert server.engine.specs[-1].priority == -3
        told = server.store.recorded[-1]
        assert (told.keep_seconds, told.pinned) == (90.0, True)
        assert told.tip != told.old_tip
        cleared = http.patch(f"{SESSIONS}/s", json={"expire_seconds": None}).json()
    assert cleared["branches"][0]["expires_at"] is None
    assert cleared["priority"] == -3


@pytest.mark.parametrize(
    ("patch", "param"),
    [
        ({"priority": "high"}, "priority"),
        ({"keep_second": 5}, "keep_second"),
        ({"expire_seconds": -1}, "expire_seconds"),
    ],
)
def test_a_patch_that_is_not_understood_changes_nothing(serve: Serve, patch: dict[str, Any], param: str) -> None:
    with client(serve().server) as http:
        say(http, "s", "hello")
        error = refused(http.patch(f"{SESSIONS}/s", json={"pinned": True, **patch}), 400, "invalid_value")
        assert not http.get(f"{SESSIONS}/s").json()["pinned"]
    assert error["param"] == param


def test_an_expired_session_is_gone_from_book_and_store_and_says_so(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        say(http, "s", session={"expire_seconds": 0.05})
        say(http, "other")
        server.server.wait_until(lambda: len(server.server.gateway.book) == 1)  # nobody asks: the timer does it
        assert len(server.store.closed) == 1
        refused(http.get(f"{SESSIONS}/s"), 404, "session_not_found")
        again = go_on(http, "s")
    assert (again["turn"], again["miss_reason"], again["recomputed_tokens"]) == (1, "expired", 0)


def test_a_session_is_not_met_after_its_time_even_where_the_timer_is_late(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        say(http, "s", session={"expire_seconds": 3600})
        gateway = server.server.gateway
        server.server.call(gateway.keeper.close)
        gateway.keeper = Keeper(gateway.book, gateway.store, clock=lambda: time.monotonic() + 3601)
        refused(http.get(f"{SESSIONS}/s"), 404, "session_not_found")


def test_persist_none_leaves_neither_history_nor_blocks(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        gone = say(http, "s", session={"persist": "none"})
        assert gone["stored_tokens"] > 0
        refused(http.get(f"{SESSIONS}/s"), 404, "session_not_found")
        assert server.store.closed == [server.store.recorded[-1].tip]
        # Said later it takes along what was kept until then.
        say(http, "t")
        tip = server.store.recorded[-1].tip
        go_on(http, "t", session={"persist": "none"})
        refused(http.get(f"{SESSIONS}/t"), 404, "session_not_found")
    assert tip in server.store.closed
    assert not +server.store.tips


def test_a_refused_turn_that_wanted_to_leave_nothing_leaves_what_was_there(serve: Serve) -> None:
    server = serve(hbm_slots=40, max_context=256)
    with client(server.server) as http:
        say(http, "s")
        messages = [user(LONG), {"role": "assistant", "content": ANSWER}, user("on and on " * 500)]
        body = {"model": NAME, "messages": messages, "session_id": "s", "session": {"persist": "none"}}
        refused(http.post(CHAT, json=body), 400, "context_length_exceeded")
        assert http.get(f"{SESSIONS}/s").json()["turns"] == 1
    assert server.store.closed == []


def test_a_final_turn_lets_its_branch_go_first_until_the_next(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        say(http, "s", session={"final": True})
        go_on(http, "s")
    assert [told.final for told in server.store.recorded] == [True, False]


def test_a_turn_that_was_left_puts_what_it_wrote_up_for_closing_with_its_branch(serve: Serve) -> None:
    server = serve(words=[" word"] * 200)
    with client(server.server) as http:
        say(http, "s", max_tokens=4)
        branch = server.server.call(lambda: server.server.gateway.book.recent()[0].branches[0])
        known = set(branch.block_keys)
        # It cannot come to its end before its client is seen to have left.
        server.server.call(lambda: setattr(server.engine, "pause_after_steps", server.engine.steps + 40))
        with http.stream(
            "POST",
            CHAT,
            json={
                "model": NAME,
                "messages": [user(LONG), {"role": "assistant", "content": " word" * 4}, user("and then? " * 20)],
                "session_id": "s",
                "stream": True,
            },
        ) as response:
            next(response.iter_lines())
        server.server.check_idle()
    left = server.store.recorded[-1]
    assert left.tip == left.old_tip == branch.tip
    assert left.superseded
    assert not known & set(left.superseded)


# --- forks --------------------------------------------------------------------------------


def test_a_fork_goes_on_from_the_same_history(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        say(http, "s")
        made = http.post(f"{SESSIONS}/s/fork", json={"session_id": "s/two"})
        assert (made.status_code, made.json()["id"], made.json()["parent_id"]) == (201, "s/two", "s")
        assert [told.tip for told in server.store.recorded] == [server.store.recorded[0].tip] * 2
        assert server.store.recorded[-1].old_tip is None
        turn = go_on(http, "s/two")
        assert (turn["turn"], turn["miss_reason"], turn["parent_id"]) == (2, None, "s")
        assert turn["reused_tokens"]["hbm"] > 0
        assert http.get(f"{SESSIONS}/s").json()["turns"] == 1
        given = http.post(f"{SESSIONS}/s/fork").json()
    assert given["id"].startswith("ses_")
    assert given["turns"] == 1


def test_forks_that_cannot_be_are_refused(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        say(http, "s")
        refused(http.post(f"{SESSIONS}/s/fork", json={"session_id": "s"}), 409, "session_exists")
        refused(http.post(f"{SESSIONS}/s/fork", json={"branch": 9}), 404, "session_not_found")
        error = refused(http.post(f"{SESSIONS}/s/fork", json={"session_id": "ü"}), 400, "invalid_value")
        assert error["param"] == "session_id"


# --- waking and sleeping ------------------------------------------------------------------


def test_a_hint_is_answered_at_once_or_when_it_has_settled(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        say(http, "s")
        awake = http.post(f"{SESSIONS}/s/wake", json={"hold_seconds": 60})
        server.store.answer = WakeStatus.WAKING
        waking = http.post(f"{SESSIONS}/s/wake", json={"to": "dram"})
        answers: list[httpx.Response] = []
        waits = threading.Thread(target=lambda: answers.append(http.post(f"{SESSIONS}/s/wake", json={"wait": True})))
        waits.start()
        server.server.wait_until(lambda: len(server.store.wakes) == 3)
        assert not answers
        server.server.call(lambda: server.store.wakes[-1].settle(WakeStatus.AWAKE))
        waits.join()
    assert awake.status_code == answers[0].status_code == 200
    assert waking.status_code == 202
    tokens = server.store.wakes[0].tokens
    expected = {
        "object": "session.wake",
        "session_id": "s",
        "branch": 0,
        "status": "awake",
        "reason": None,
        "source": "dram",
        "tokens": tokens,
        "bytes": tokens // BLOCK_TOKENS * 4096,
        "eta_ms": 0.0,
    }
    told = awake.json()
    assert 55 < told.pop("hold_until") - time.time() < 61
    assert told == expected
    assert (waking.json()["status"], waking.json()["eta_ms"]) == ("waking", None)
    assert [wake.target for wake in server.store.wakes] == [Tier.HBM, Tier.DRAM, Tier.HBM]
    assert [wake.is_cancelled for wake in server.store.wakes] == [True, True, False]  # the latest stands for all


@pytest.mark.parametrize("status", [WakeStatus.NO_ROOM, WakeStatus.NOT_STORED])
def test_a_hint_that_is_declined_is_no_error(serve: Serve, status: WakeStatus) -> None:
    server = serve()
    with client(server.server) as http:
        say(http, "s")
        server.store.answer = status
        response = http.post(f"{SESSIONS}/s/wake")
    told = response.json()
    assert (response.status_code, told["status"], told["reason"]) == (200, "declined", status.value)
    assert (told["tokens"], told["source"], told["hold_until"]) == (0, None, None)


def test_only_an_id_never_seen_is_not_found_by_a_hint(serve: Serve) -> None:
    server = serve(max_sessions=1)
    with client(server.server) as http:
        say(http, "short", "hi")
        say(http, "kept")
        evicted = http.post(f"{SESSIONS}/short/wake").json()
        branch = http.post(f"{SESSIONS}/kept/wake", json={"branch": 5}).json()
        http.delete(f"{SESSIONS}/kept")
        deleted = http.post(f"{SESSIONS}/kept/wake").json()
        refused(http.post(f"{SESSIONS}/never/wake"), 404, "session_not_found")
        refused(http.post(f"{SESSIONS}/kept/wake", json={"to": "tape"}), 400, "invalid_value")
        text = http.get("/metrics").text
    assert [(one["status"], one["reason"]) for one in (evicted, branch, deleted)] == [
        ("declined", "evicted"),
        ("declined", "unknown_branch"),
        ("declined", "deleted"),
    ]
    for reason in ("evicted", "unknown_branch", "deleted"):
        assert f'dormouse_hints_total{{outcome="declined",reason="{reason}"}} 1.0' in text
    assert "dormouse_sessions 0.0" in text


def test_hints_in_a_loop_are_declined_softly(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        say(http, "s")
        hints = server.server.gateway.hints = Hints(server.store, clock=lambda: 0.0)
        while hints.has_room():
            pass
        response = http.post(f"{SESSIONS}/s/wake")
    told = response.json()
    assert (response.status_code, told["status"], told["reason"]) == (200, "declined", "rate_limited")


def test_a_hint_can_be_taken_back(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        say(http, "s")
        server.store.answer = WakeStatus.WAKING
        http.post(f"{SESSIONS}/s/wake")
        back = http.delete(f"{SESSIONS}/s/wake")
        nothing = http.delete(f"{SESSIONS}/s/wake")
    assert server.store.wakes[-1].is_cancelled
    assert back.json() == {
        "object": "session.wake",
        "session_id": "s",
        "status": "cancelled",
        "cancelled": 1,
        "branches": [0],
    }
    assert (nothing.status_code, nothing.json()["cancelled"]) == (200, 0)


def test_deleting_a_session_takes_its_hints_back(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        say(http, "s")
        server.store.answer = WakeStatus.WAKING
        http.post(f"{SESSIONS}/s/wake")
        http.delete(f"{SESSIONS}/s")
    assert server.store.wakes[-1].is_cancelled


def test_idle_branches_are_put_to_sleep(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        say(http, "s")
        say(http, "s", "Something else: " + LONG)
        told = http.post(f"{SESSIONS}/s/sleep", params={"tier": "dram"}).json()
        deeper = http.post(f"{SESSIONS}/s/sleep", params={"tier": "nvme"}).json()
        error = refused(http.post(f"{SESSIONS}/s/sleep", params={"tier": "tape"}), 400, "invalid_value")
        say(http, "short", "hi", max_tokens=1, cache_prompt=True)
    assert len(server.store.slept) == 2
    assert told == {
        "object": "session.sleep",
        "session_id": "s",
        "status": "asleep",
        "reason": None,
        "tier": "dram",
        "tokens": sum(len(keys) for keys in server.store.slept) * BLOCK_TOKENS,
    }
    assert (deeper["status"], deeper["reason"]) == ("declined", "no_such_tier")
    assert error["param"] == "tier"


# --- waking on arrival --------------------------------------------------------------------


def test_a_session_is_woken_before_its_prompt_is_rendered(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        say(http, "s")
        assert server.store.wakes == []  # nothing to wake
        branch = server.server.call(lambda: server.server.gateway.book.recent()[0].branches[0])
        keys = branch.block_keys
        go_on(http, "s")
    (wake,) = server.store.wakes
    assert (wake.keys, wake.target) == (keys, Tier.HBM)
    assert server.engine.specs[-1].wake == wake.id
    assert not wake.is_cancelled


def test_a_session_found_by_its_text_is_woken_too(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        http.post(CHAT, json={"model": NAME, "messages": [user(LONG)]})
        messages = [user(LONG), {"role": "assistant", "content": ANSWER}, user("more")]
        http.post(CHAT, json={"model": NAME, "messages": messages})
    assert len(server.store.wakes) == 1


def test_what_cannot_be_used_is_not_woken(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        say(http, "s")
        go_on(http, "s", cache_prompt=False)
        go_on(http, "s", cache_salt="other")
    assert server.store.wakes == []


def test_a_wake_is_taken_back_when_its_turn_does_not_come_to_run(serve: Serve) -> None:
    server = serve(hbm_slots=40, max_context=256)
    server.server.call(lambda: setattr(server.store, "answer", WakeStatus.WAKING))
    with client(server.server) as http:
        say(http, "s")
        too_long = [user(LONG), {"role": "assistant", "content": ANSWER}, user("on and on " * 500)]
        body = {"model": NAME, "messages": too_long, "session_id": "s"}
        refused(http.post(CHAT, json=body), 400, "context_length_exceeded")
    assert [wake.is_cancelled for wake in server.store.wakes] == [True]
