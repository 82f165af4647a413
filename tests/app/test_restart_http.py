"""What a client hears of its session after a restart: its history is there, and why K/V is not is said."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.catalog import FILE_NAME
from kvstore.catalog_rows import BlockRow
from tests.app.conftest import NAME, Scripted
from tests.app.live import client
from tests.app.scripted import WORDS
from tests.kvstore.shelf import MODEL, Shelf

if TYPE_CHECKING:
    from pathlib import Path

    import httpx

Serve = Callable[..., Scripted]
CHAT = "/v1/chat/completions"
SESSIONS = "/v1/sessions"
ANSWER = "".join(WORDS)
LONG = "tell me of mice and of their sleep " * 16
"""Several blocks."""


@contextmanager
def life(serve: Serve, root: Path, model: bytes = MODEL) -> Iterator[tuple[httpx.Client, Scripted]]:
    """A server on `root`, until the block ends."""
    server = serve(shelf=functools.partial(Shelf, root, model=model))
    with client(server.server) as http:
        yield http, server
    server.check()
    server.server.stop()
    server.server.thread.join(30)


def say(http: httpx.Client, *texts: str, **fields: Any) -> dict[str, Any]:
    """A turn: what users said, with answers between; its `session` object."""
    messages = []
    for text in texts:
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": ANSWER}]
    body = {"model": NAME, "messages": messages[:-1], "session_id": "s", **fields}
    response = http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    session: dict[str, Any] = response.json()["session"]
    return session


def test_a_session_goes_on_after_a_restart_and_says_that_its_blocks_were_never_written(
    serve: Serve, tmp_path: Path
) -> None:
    with life(serve, tmp_path) as (http, _):
        first = say(http, LONG)
        assert (first["turn"], first["miss_reason"]) == (1, "new_session")
    with life(serve, tmp_path) as (http, _):
        listed = http.get(f"{SESSIONS}/s").json()
        assert (listed["turns"], listed["branches"][0]["turns"]) == (1, 1)
        assert listed["tokens"] > 100
        second = say(http, LONG, "and then?")
        assert (second["turn"], second["branch"], second["miss_reason"]) == (2, 0, "not_written")
        assert second["recomputed_tokens"] == listed["tokens"] - 1
        third = say(http, LONG, "and then?", "and after that?")
        assert (third["turn"], third["miss_reason"]) == (3, None)


def test_what_was_written_and_is_gone_was_evicted(serve: Serve, tmp_path: Path) -> None:
    with life(serve, tmp_path) as (http, server):
        say(http, LONG)
        keys = server.server.call(lambda: server.server.gateway.book.recent()[0].branches[0].block_keys)
    shelf = Shelf(tmp_path)
    shelf.blocks.record([BlockRow(slot, key, keys[slot - 1] if slot else None, slot) for slot, key in enumerate(keys)])
    shelf.close()
    with life(serve, tmp_path) as (http, _):
        assert say(http, LONG, "and then?")["miss_reason"] == "evicted"


def test_a_turn_without_an_id_finds_its_session_by_the_text(serve: Serve, tmp_path: Path) -> None:
    with life(serve, tmp_path) as (http, _):
        say(http, LONG)
    with life(serve, tmp_path) as (http, _):
        found = say(http, LONG, "and then?", session_id=None)
        assert (found["id"], found["id_source"], found["turn"]) == ("s", "text", 2)


def test_another_model_says_so_and_the_first_one_goes_on_where_it_was(serve: Serve, tmp_path: Path) -> None:
    with life(serve, tmp_path) as (http, _):
        say(http, LONG)
    with life(serve, tmp_path, model=b"n" * 16) as (http, _):
        assert http.get(f"{SESSIONS}/s").status_code == 404
        other = say(http, LONG, "and then?")
        assert (other["turn"], other["miss_reason"], other["recomputed_tokens"]) == (1, "model_changed", 0)
        assert say(http, LONG, "and then?", "more")["miss_reason"] is None
    with life(serve, tmp_path) as (http, _):
        back = say(http, LONG, "and then?")
        assert (back["turn"], back["miss_reason"]) == (2, "not_written")


def test_a_session_of_another_model_is_deleted_by_its_id(serve: Serve, tmp_path: Path) -> None:
    with life(serve, tmp_path) as (http, _):
        say(http, LONG)
    with life(serve, tmp_path, model=b"n" * 16) as (http, _):
        assert http.delete(f"{SESSIONS}/s").json()["deleted"] is True
        assert http.delete(f"{SESSIONS}/s").status_code == 404
        assert say(http, LONG)["miss_reason"] == "new_session"
    assert b"tell me of mice" in (tmp_path / FILE_NAME).read_bytes()  # the new one
    with life(serve, tmp_path) as (http, _):
        assert http.get(SESSIONS).json()["data"] == []


@pytest.mark.parametrize("goes_on", [True, False])
def test_after_a_lost_catalog_a_conversation_that_goes_on_says_why_it_starts_over(
    serve: Serve, tmp_path: Path, goes_on: bool
) -> None:
    with life(serve, tmp_path) as (http, _):
        say(http, LONG)
    (tmp_path / FILE_NAME).write_bytes(b"not a catalog " * 1000)
    with life(serve, tmp_path) as (http, _):
        turn = say(http, LONG, "and then?") if goes_on else say(http, LONG)
        assert (turn["turn"], turn["miss_reason"]) == (1, "catalog_lost" if goes_on else "new_session")


def test_a_private_session_is_gone_after_a_restart_and_never_was_on_disk(serve: Serve, tmp_path: Path) -> None:
    with life(serve, tmp_path) as (http, _):
        say(http, LONG, session={"persist": "memory"})
        assert http.get(f"{SESSIONS}/s").status_code == 200
    contents = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert contents
    assert not any(b"tell me of mice" in content for content in contents)
    with life(serve, tmp_path) as (http, _):
        assert http.get(f"{SESSIONS}/s").status_code == 404


def test_a_deletion_is_answered_when_no_file_has_the_session_any_more(serve: Serve, tmp_path: Path) -> None:
    with life(serve, tmp_path) as (http, _):
        for number in range(5):
            say(http, LONG, session_id=f"id-of-{number}")
        for number in range(4):
            assert http.delete(f"{SESSIONS}/id-of-{number}").status_code == 200
            contents = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
            assert f"id-of-{number}".encode() not in contents
        assert http.delete(SESSIONS).json()["deleted"] == 1
        contents = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
        assert b"id-of-" not in contents
        assert b"tell me of mice" not in contents


def test_a_deleted_session_leaves_neither_text_nor_ids_in_any_file(serve: Serve, tmp_path: Path) -> None:
    with life(serve, tmp_path) as (http, server):
        say(http, LONG)
        book = server.server.gateway.book
        told = server.server.call(lambda: book.histories("", "s")[0])
        needles = (b"tell me of mice", told.token_ids[:12].tobytes(), told.token_ids[-12:].tobytes())
    contents = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert any(needle in content for needle in needles for content in contents)
    with life(serve, tmp_path) as (http, _):
        assert http.delete(f"{SESSIONS}/s").status_code == 200
    contents = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(needle in content for needle in needles for content in contents)
