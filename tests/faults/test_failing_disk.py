"""A disk that fails while a server runs: the text stays right, health and metrics say so, and it is used again after.

The catalog is on the same file system; where only the slabs fail, the faults are injected into their calls.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from tests.faults.server import MIB, Server, Talk, serving, settings
from tests.kvstore.faulty_files import FaultyFiles

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.faults.conftest import Control


@pytest.fixture
def files() -> Iterator[FaultyFiles]:
    made = FaultyFiles()
    yield made
    made.release()


@contextmanager
def small_mount(path: Path, size: int) -> Iterator[bool]:
    """A file system of `size` bytes at `path`; False where this user may not mount one."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(path)]
    try:
        is_mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        is_mounted = False
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(path)], check=True)


def check_degraded(server: Server) -> None:
    """Every place where one looks says that the disk does not take blocks, and none of them is an error."""
    server.wait_for(lambda: server.health()["status"] == "degraded")
    states = ("suspect", "off")
    server.wait_for(lambda: any(server.metric("dormouse_tier_health", tier="nvme", state=each) for each in states))
    server.wait_for(lambda: server.state()["nvme"]["health"]["blocks"] in states)


def check_recovered(server: Server, talk: Talk, control: Control) -> None:
    """Nothing is left of the fault: what is to be on disk gets there, and wakes from there."""
    server.wait_for(lambda: server.health() == {"status": "ok"})
    server.settle()
    server.wait_for(lambda: (server.state()["transfers"], server.state()["hints"]) == (0, 0))
    server.asleep(talk)
    told = server.say(talk)
    assert (told["miss_reason"], told["woke_from"]) == (None, "nvme")
    assert server.metric("dormouse_tier_health", tier="nvme", state="ok") == 1
    assert talk.texts == control(talk.name)[: len(talk.texts)]
    server.check_sound()


# --- writing ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("calls", "code", "said"),
    [
        (("write", "resize"), errno.ENOSPC, "No space left on device"),
        (("write", "resize", "open for writing"), errno.EROFS, "Read-only file system"),
        (("write",), errno.EIO, "Input/output error"),
    ],
    ids=["full", "read-only", "EIO"],
)
def test_a_disk_that_takes_no_blocks_costs_no_answer_and_is_used_again_when_it_does(
    model: Path, tmp_path: Path, control: Control, files: FaultyFiles, calls: tuple[str, ...], code: int, said: str
) -> None:
    with serving(settings(model, tmp_path / "nvme"), files) as server:
        talk = Talk(f"a mouse and error {code}")
        files.errors = dict.fromkeys(calls, code)
        server.say(talk)
        check_degraded(server)
        server.wait_for(lambda: any(said in each for each in server.state()["nvme"]["health"]["reasons"]))
        assert server.metric("dormouse_transfers_unsound_total", kind="down", reason="failed") > 0
        assert server.metric("dormouse_dirty_blocks") > 0
        server.sleep(talk)
        told = server.say(talk)
        assert told["reused_tokens"]["nvme"] == 0
        files.errors = {}
        check_recovered(server, talk, control)


def test_on_a_full_file_system_serving_goes_on_and_blocks_and_catalog_follow_when_there_is_room(
    model: Path, tmp_path: Path, control: Control, files: FaultyFiles
) -> None:
    root = tmp_path / "mount" / "nvme"
    filler = tmp_path / "mount" / "filler"

    def fill_up() -> None:
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while file.write(bytes(64 * 1024)):
                pass

    with small_mount(tmp_path / "mount", 16 * MIB) as is_mounted, serving(settings(model, root), files) as server:
        talk = Talk("a mouse that is fat")
        if is_mounted:
            fill_up()
        else:
            files.errors = dict.fromkeys(("write", "resize"), errno.ENOSPC)
        server.say(talk)
        check_degraded(server)
        if is_mounted:
            server.wait_for(lambda: server.state()["nvme"]["health"]["catalog"] != "ok")
            assert server.metric("dormouse_catalog_faults_total") > 0
            assert server.state()["nvme"]["catalog_pending"] > 0
        server.say(talk)
        if is_mounted:
            filler.unlink()
        files.errors = {}
        check_recovered(server, talk, control)


def test_below_the_free_space_floor_nothing_new_is_taken_and_serving_goes_on(
    model: Path, tmp_path: Path, control: Control
) -> None:
    with serving(settings(model, tmp_path / "nvme", nvme_free_share=0.999)) as server:
        talk = Talk("a frugal mouse")
        server.say(talk)
        check_degraded(server)
        server.say(talk)
        assert server.state()["nvme"]["file_bytes"] == 0
        assert talk.texts == control(talk.name)[:2]


# --- reading ------------------------------------------------------------------------------


def test_a_disk_that_cannot_be_read_is_a_failed_load_and_the_rest_is_read_again_later(
    model: Path, tmp_path: Path, control: Control, files: FaultyFiles
) -> None:
    with serving(settings(model, tmp_path / "nvme"), files) as server:
        talk = Talk("a mouse and EIO")
        server.say(talk)
        server.asleep(talk)
        files.errors = {"read": errno.EIO}
        server.check_missed(server.say(talk), "load_failed")
        assert server.metric("dormouse_transfers_unsound_total", kind="load", reason="failed") > 0
        files.errors = {}
        check_recovered(server, talk, control)


def test_a_reader_that_hangs_past_its_deadline_is_not_waited_for_and_the_disk_is_read_again_when_it_answers(
    model: Path, tmp_path: Path, control: Control, files: FaultyFiles
) -> None:
    configured = settings(model, tmp_path / "nvme", wake_deadline_seconds=0.3, demote_deadline_seconds=0.3)
    with serving(configured, files) as server:
        talks = [Talk(f"mouse {number} that waits") for number in range(4)]
        for talk in talks:
            server.say(talk)
            server.asleep(talk)
        files.hang("read")
        for talk in talks[:3]:
            server.check_missed(server.say(talk), "load_timeout")
        assert server.metric("dormouse_transfers_unsound_total", kind="load", reason="late") >= 3
        check_degraded(server)
        assert server.state()["nvme"]["health"]["blocks"] == "off"
        told = server.say(talks[3])
        server.check_missed(told, "load_failed")
        assert told["wake_ms"] < 300, "what is off is not even asked"
        files.release()
        for talk in talks:
            check_recovered(server, talk, control)


# --- the directory ------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["all", "model"])
def test_a_directory_that_is_deleted_under_the_server_is_made_anew(
    model: Path, tmp_path: Path, control: Control, what: str
) -> None:
    root = tmp_path / "nvme"
    with serving(settings(model, root)) as server:
        talk = Talk(f"a mouse and {what} of its nest")
        server.say(talk)
        server.asleep(talk)
        for path in [root] if what == "all" else root.glob("*/"):
            shutil.rmtree(path)
        server.check_missed(server.say(talk), "load_failed")
        assert server.metric("dormouse_transfers_unsound_total", kind="load", reason="failed") > 0
        # Until something was written the folder might have come back, as one that was unmounted does.
        server.settle()
        server.asleep(talk)
        server.check_missed(server.say(talk), "evicted")
        check_recovered(server, talk, control)
    with serving(settings(model, root)) as server:
        assert server.say(talk)["woke_from"] == "nvme"
        assert talk.texts == control(talk.name)[:5]


@pytest.mark.parametrize("hangs", ["read", "write"])
def test_a_server_whose_disk_hangs_ends_in_time(model: Path, tmp_path: Path, files: FaultyFiles, hangs: str) -> None:
    with serving(settings(model, tmp_path / "nvme", drain_seconds=1, wake_deadline_seconds=0.3), files) as server:
        talk = Talk("a mouse that leaves")
        server.say(talk)
        if hangs == "read":
            server.asleep(talk)
        files.hang(hangs)
        server.say(talk)
        began = time.monotonic()
        server.live.stop()
        server.live.thread.join(30)
        assert not server.live.thread.is_alive()
        assert time.monotonic() - began < 1 + 2 + 2 + 3, "drain, copies, catalog, and some for a busy machine"
