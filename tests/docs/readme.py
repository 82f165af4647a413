"""`make readme`: every `bash` and `python` block of README.md and docs/quickstart.md, in order, on a clean clone.

A block that serves runs in the background until the next one that does, and is waited for until it is ready; every
other must end well. The clone, the caches and the port are of this run alone; pip's cache is the user's, so that a
second run downloads less. The minutes of each block are printed at the end, and must be few; with `--tiny` every
command is run all the same, but a tiny random model answers: for a machine that has other things to do.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/quickstart.md")
ADDRESS = "127.0.0.1:8000"
READY_SECONDS = 3600.0
"""Of the first block that serves: it installs, with all downloads."""
BLOCK_SECONDS = 600.0
STOP_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Block:
    """What stands between the fences, and where."""

    page: str
    line: int
    language: str
    text: str

    @property
    def serves(self) -> bool:
        """It runs until it is stopped."""
        return re.search(r"^(make|dormouse|\.venv/bin/dormouse) serve\b", self.text, re.MULTILINE) is not None

    def __str__(self) -> str:
        return f"{self.page}:{self.line} {self.text.splitlines()[0][:70]}"


class ReadmeFailed(Exception):
    """A block did not do what the page says."""


@dataclass(slots=True)
class Took:
    """Seconds of each block that has been run."""

    blocks: list[tuple[Block, float]] = field(default_factory=list)

    def of(self, page: str) -> float:
        return sum(seconds for block, seconds in self.blocks if block.page == page)

    @property
    def until_first_ready(self) -> float:
        """Nearly all of it is installing, downloads among it."""
        return next((seconds for block, seconds in self.blocks if block.serves), 0.0)


def blocks(page: str, text: str) -> list[Block]:
    """In the order of the page; fences at the beginning of a line."""
    found = []
    for match in re.finditer(r"^```(bash|python)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        found.append(Block(page, text[: match.start()].count("\n") + 1, match[1], match[2]))
    return found


class Reader:
    """Somebody who follows the pages in a folder."""

    def __init__(self, folder: Path, port: int, **settings: str) -> None:
        self.folder = folder
        self.url = f"http://127.0.0.1:{port}"
        self._server: subprocess.Popen[bytes] | None = None
        caches = folder.parent / "cache"
        pip = subprocess.run([sys.executable, "-m", "pip", "cache", "dir"], capture_output=True, text=True, check=False)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("DORMOUSE_", "PYTHON"))}
        self._environment = kept | {
            "XDG_CACHE_HOME": str(caches),
            "XDG_CONFIG_HOME": str(folder.parent / "config"),
            "PIP_CACHE_DIR": pip.stdout.strip() or str(caches / "pip"),
            "DORMOUSE_PORT": str(port),
            "DORMOUSE_CLIENT_URL": self.url,
            "CURL_HOME": str(folder.parent),
            **settings,
        }
        (folder.parent / ".curlrc").write_text("silent\nshow-error\n")  # no terminal here to draw progress on
        self._environment.pop("VIRTUAL_ENV", None)

    def follow(self, block: Block) -> None:
        """Do what a block says.

        Raises:
            ReadmeFailed: it cannot be done.
        """
        text = block.text.replace(f"http://{ADDRESS}", self.url)
        if block.serves:
            self._serve(block, text)
            return
        command = (
            ["bash", "-euo", "pipefail", "-c", text] if block.language == "bash" else [".venv/bin/python", "-c", text]
        )
        got = subprocess.run(
            command,
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            timeout=BLOCK_SECONDS,
            check=False,
        )
        if got.returncode:
            raise ReadmeFailed(f"{block}: exit status {got.returncode}")

    def _serve(self, block: Block, text: str) -> None:
        self.stop()
        # A group of its own: what make started ends with it.
        self._server = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", text], cwd=self.folder, env=self._environment, start_new_session=True
        )
        deadline = time.monotonic() + READY_SECONDS
        while not self._is_ready():
            if self._server.poll() is not None:
                raise ReadmeFailed(f"{block}: it ended with {self._server.returncode} before it was ready")
            if time.monotonic() > deadline:
                raise ReadmeFailed(f"{block}: not ready after {READY_SECONDS:.0f} s")
            time.sleep(0.2)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=5) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def stop(self) -> None:
        """End the server that a block has started, if it has not ended by itself."""
        if self._server is None:
            return
        if self._server.poll() is None:
            os.killpg(self._server.pid, signal.SIGTERM)
        try:
            self._server.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self._server.pid, signal.SIGKILL)
            raise ReadmeFailed("the server did not stop") from None

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as reply:
            text: str = reply.read().decode()
        return text

    def check_seen(self, session: str) -> None:
        """The session is there, something has been woken, and the page shows it.

        Raises:
            ReadmeFailed: not so.
        """
        self.get(f"/v1/sessions/{session}")
        browser = shutil.which("chromium") or shutil.which("google-chrome")
        if browser is None:
            print("no Chromium here: the page is asked for, not looked at", flush=True)
            page = self.get("/admin") + self.get("/admin/api/state")
            shown = "<html" in page
        else:
            with tempfile.TemporaryDirectory() as profile:
                options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--dump-dom"]
                command = [browser, *options, "--timeout=8000"]
                # Its first screen shows the last turns, which a restart forgets; the other one all sessions.
                addresses = (f"{self.url}/admin", f"{self.url}/admin#/sessions")
                shown = any(session in _output(*command, address) for address in addresses)
        if not shown:
            raise ReadmeFailed(f"the page at {self.url}/admin does not show session {session}")


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout


@contextmanager
def tiny_settings() -> Iterator[dict[str, str]]:
    """Variables by which a tiny random model answers to every name."""
    from app.settings import Settings
    from models import embedded
    from tests.faults import tiny

    with tempfile.TemporaryDirectory(prefix="dormouse-tiny-") as place:
        model = tiny.save(Path(place) / "tiny", embedded.fetch(Settings().cache_dir, progress=print))
        yield {"DORMOUSE_MODEL": str(model), "DORMOUSE_SERVED_MODEL_NAME": "*", "DORMOUSE_MAX_CONTEXT": "1024"}


@contextmanager
def cloned() -> Iterator[Path]:
    """A clean clone of what is committed here."""
    with tempfile.TemporaryDirectory(prefix="dormouse-readme-") as place:
        folder = Path(place) / "dormouse"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
        yield folder


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
    return port


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most-minutes", type=float, default=5.0, help="of README.md, without installing")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model answers, and minutes mean nothing")
    options = parser.parse_args()
    took = Took()
    chosen: AbstractContextManager[dict[str, str]] = tiny_settings() if options.tiny else nullcontext({})
    with chosen as settings, cloned() as folder:
        reader = Reader(folder, free_port(), **settings)
        try:
            for page in PAGES:
                for block in blocks(page, (folder / page).read_text()):
                    print(f"\n--- {block}", flush=True)
                    started = time.monotonic()
                    reader.follow(block)
                    took.blocks.append((block, time.monotonic() - started))
                reader.check_seen({"README.md": "demo", "docs/quickstart.md": "quick"}[page])
        except (ReadmeFailed, subprocess.TimeoutExpired, OSError) as exc:
            print(f"\nFAILED: {exc}", flush=True)
            return 1
        finally:
            reader.stop()
    return tell(took, options.most_minutes)


def tell(took: Took, most_minutes: float) -> int:
    """Print the minutes; 1 where README.md takes more than it may."""
    print()
    for block, seconds in took.blocks:
        print(f"{seconds / 60:6.2f} min  {block}")
    rest = took.of("README.md") - took.until_first_ready
    print(f"\n{took.until_first_ready / 60:.2f} min to the first server: installing, with its downloads, and loading")
    print(
        f"{rest / 60:.2f} min for the rest of README.md: a chat that slept, woke, outlived a kill, and is on the page"
    )
    print(f"{took.of('docs/quickstart.md') / 60:.2f} min for docs/quickstart.md")
    return 0 if rest <= 60 * most_minutes else 1


if __name__ == "__main__":
    sys.exit(main())
