"""Who has the directory: a second server is refused, a killed one's place is taken, a failed start gives it back."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from app import startup
from kvstore.errors import SettingInvalid
from kvstore.nvme_dir import NvmeDirectory, holder
from models.errors import ModelError
from tests.faults.server import Talk, serving, settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.faults.conftest import Control

CHECKOUT = Path(__file__).parents[2]
START_SECONDS = 90.0


@contextmanager
def process(model: Path, root: Path, *more: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own, in which the disk hangs if `more` says so, and its address."""
    command = [sys.executable, "-m", "tests.faults.hanging_server", str(model), str(root), *more]
    child = subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        url = child.stdout.readline().strip()
        assert url.startswith("http"), url
        yield child, url
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def test_a_second_server_on_the_directory_is_refused_and_the_first_goes_on_and_when_it_is_killed_the_next_has_it(
    model: Path, tmp_path: Path, control: Control
) -> None:
    root, talk = tmp_path / "nvme", Talk("a mouse with one home")
    with process(model, root) as (child, url):
        body = {"model": "tiny", "messages": talk.messages(), "session_id": talk.id, "max_tokens": 8, "temperature": 0}
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
            told = http.post("/v1/chat/completions", json=body).json()
            talk.texts.append(told["choices"][0]["message"]["content"])
            deadline = time.monotonic() + 20
            while http.get("/admin/api/state").json()["dirty_blocks"]:
                assert time.monotonic() < deadline
            before = http.get("/admin/api/state").json()["totals"]
            command = [sys.executable, "-m", "dormouse_gateway", "serve", "--model", str(model)]
            second = subprocess.run(
                [*command, "--nvme-dir", str(root), "--port", "0"],
                cwd=CHECKOUT,
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert second.returncode == 2
            assert second.stderr.strip().splitlines()[-1] == (
                f"dormouse: --nvme-dir: {root} is in use by process {child.pid}; give another one"
            )
            assert http.get("/healthz").json() == {"status": "ok"}
            assert http.get("/admin/api/state").json()["totals"] == before
        child.send_signal(signal.SIGKILL)
        child.wait()
    with serving(settings(model, root)) as server:
        assert holder(root) == os.getpid()
        told = server.say(talk)
        assert (told["miss_reason"], told["woke_from"], told["turn"]) == (None, "nvme", 2)
        assert talk.texts == control(talk.name)[:2]


def test_sigterm_ends_a_process_whose_disk_hangs_in_every_call(model: Path, tmp_path: Path) -> None:
    with process(model, tmp_path / "nvme", "hang") as (child, url):
        talk = Talk("a mouse that goes")
        body = {"model": "tiny", "messages": talk.messages(), "session_id": talk.id, "max_tokens": 8}
        told = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
        assert told.status_code == 200
        began = time.monotonic()
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 0
        assert time.monotonic() - began < 3 + 2 + 2 + 5, "drain, copies, catalog, and some for a busy machine"


# --- starts that fail ---------------------------------------------------------------------


def take(root: Path) -> None:
    """Somebody else can have the directory."""
    directory = NvmeDirectory(root)
    directory.open()
    directory.close()


def open_files(root: Path) -> list[str]:
    """Of this process, below `root`."""
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return [path for path in map(_target, links) if path.startswith(str(root))]


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:
        return ""


async def test_a_start_without_its_model_gives_the_directory_back(model: Path, tmp_path: Path) -> None:
    root, broken = tmp_path / "nvme", tmp_path / "tiny"
    shutil.copytree(model, broken)
    (broken / "model.safetensors").unlink()
    with pytest.raises(ModelError):
        async with startup.opened(settings(broken, root)):
            raise AssertionError("it started")
    assert open_files(root) == []
    take(root)


@pytest.mark.parametrize("stage", ["slabs", "catalog", "quota"])
async def test_a_start_that_fails_after_the_directory_was_taken_gives_back_all_of_it(
    model: Path, tmp_path: Path, stage: str
) -> None:
    root = tmp_path / "nvme"
    with serving(settings(model, root)) as server:
        server.say(Talk("a mouse of before"))
    more = {}
    if stage == "slabs":
        (slabs,) = root.glob("*/slabs")
        shutil.rmtree(slabs)
        slabs.write_bytes(b"not a folder")
    elif stage == "catalog":
        for path in root.glob("catalog.sqlite*"):
            path.unlink()
        (root / "catalog.sqlite").mkdir()
    else:
        more = {"nvme_bytes": 2**60}
    with pytest.raises(SettingInvalid, match="--nvme-"):
        async with startup.opened(settings(model, root, **more)):
            raise AssertionError("it started")
    assert open_files(root) == []
    take(root)
