"""What must not be on the disk is not there: neither text, nor ids, nor K/V."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

import pytest

from tests.faults.server import Talk, serving, settings

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.server import Server


def traces(server: Server, talk: Talk) -> list[bytes]:
    """By which a session would be known again: its id, its text, its token ids, its blocks' keys and their bytes."""

    def look() -> list[bytes]:
        session = server.live.gateway.book.get("", talk.id)
        assert session is not None
        (branch,) = session.branches.values()
        history = server.live.gateway.book.histories("", talk.id)[0]
        keys = [bytes(key) for key in branch.block_keys]
        ids = history.token_ids
        return [talk.id.encode(), talk.name.encode(), ids[40:52].tobytes(), ids[-12:].tobytes(), *keys]

    return server.live.call(look)


def found(root: Path, needles: list[bytes]) -> list[str]:
    """Files that have any of them."""
    return [
        f"{path.name}: {needle!r}"
        for path in root.rglob("*")
        if path.is_file()
        for needle in needles
        if needle in path.read_bytes()
    ]


@pytest.mark.parametrize("persist", ["memory", "none"])
def test_what_may_not_be_kept_never_reaches_the_disk_however_it_is_pressed(
    model: Path, tmp_path: Path, persist: str
) -> None:
    root = tmp_path / "nvme"
    # HBM for two conversations and DRAM for two: what does not go down has to go.
    tight = {"hbm_bytes": 48 * 8192, "dram_bytes": 48 * 8192, "max_context": 512}
    with serving(settings(model, root, **tight)) as server:
        secret, plain = Talk("a mouse that hides"), Talk("a mouse that does not")
        server.say(secret, session={"persist": "memory"})
        needles = traces(server, secret)
        server.sleep(secret)
        if persist == "none":
            server.say(secret, session={"persist": "none"})
        for number in range(6):
            server.say(Talk(f"one of {number}"))
        server.say(plain)
        server.settle()
        known = traces(server, plain)
        assert found(root, known), "this is how one looks"
        assert found(root, needles) == []
    assert found(root, needles) == []
    with serving(settings(model, root)) as server:
        assert server.http.get(f"/v1/sessions/{secret.id}").status_code == 404
        assert server.http.get(f"/v1/sessions/{plain.id}").status_code == 200


@pytest.mark.parametrize("asleep", [True, False], ids=["asleep", "awake"])
def test_nothing_is_left_of_a_deleted_session_once_that_is_answered_but_erasing(
    model: Path, tmp_path: Path, asleep: bool
) -> None:
    root, talk = tmp_path / "nvme", Talk("a mouse to be forgotten")
    with serving(settings(model, root)) as server:
        server.say(talk)
        server.settle()
        needles = traces(server, talk)
        if asleep:
            server.asleep(talk)
        assert len(found(root, needles)) >= 2
        assert server.http.delete(f"/v1/sessions/{talk.id}").status_code == 200
        server.wait_for(lambda: server.metric("dormouse_erasing_slots") == 0)
        server.settle()
        assert found(root, needles) == []
    assert found(root, needles) == []


@pytest.mark.parametrize("is_running", [True, False], ids=["while serving", "while nobody serves"])
def test_nothing_is_left_of_a_session_that_expired(model: Path, tmp_path: Path, is_running: bool) -> None:
    root, talk = tmp_path / "nvme", Talk("a mouse that is short of time")
    seconds = 1.0 if is_running else 0.5
    with serving(settings(model, root)) as server:
        server.say(talk, session={"expire_seconds": 600})
        server.settle()
        needles = traces(server, talk)
        assert len(found(root, needles)) >= 2
        server.http.patch(f"/v1/sessions/{talk.id}", json={"expire_seconds": seconds})
        if is_running:
            server.wait_for(lambda: server.metric("dormouse_sessions") == 0)
            server.wait_for(lambda: server.metric("dormouse_erasing_slots") == 0)
            server.settle()
            assert found(root, needles) == []
    with serving(settings(model, root)) as server:
        server.wait_for(lambda: server.http.get(f"/v1/sessions/{talk.id}").status_code == 404)
        server.wait_for(lambda: server.metric("dormouse_erasing_slots") == 0)
        server.settle()
        assert found(root, needles) == []


def test_the_first_start_says_where_conversations_are_kept_and_how_to_stop_that_and_they_are_the_users_alone(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "nvme"
    with serving(settings(model, root)) as server:
        server.say(Talk("a mouse at home"))
        server.settle()
        modes = {stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*") if path.is_file()}
        folders = {stat.S_IMODE(path.stat().st_mode) for path in [root, *root.rglob("*")] if path.is_dir()}
    assert (modes, folders) == ({0o600}, {0o700})
    said = [record.message for record in caplog.records if str(root) in record.message]
    assert any("--nvme-bytes 0" in line for line in said)
    caplog.clear()
    with serving(settings(model, root)):
        assert not [record for record in caplog.records if "--nvme-bytes 0" in record.message]
