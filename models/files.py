"""Files that are whole or absent: written beside their place, then renamed into it."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Progress = Callable[[str], None]
"""Takes one line for whoever waits."""


def silent(_: str) -> None:
    """Progress that nobody watches."""


@contextmanager
def locked(path: Path, progress: Progress, waiting_for: str) -> Iterator[None]:
    """Hold the lock file `path` among processes; blocks, and says so once. The kernel lets go when a holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process that is {waiting_for}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextmanager
def folder_whole_or_absent(target: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `target` when the block ends well, and vanishes when it does not.

    What was at `target` is replaced.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        yield building
        if target.exists():
            shutil.rmtree(target)
        building.chmod(0o755)
        building.rename(target)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def write_whole(target: Path, content: bytes) -> None:
    """Replace `target` by `content`; a reader sees the old or the new, never a part."""
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}-")
    try:
        with os.fdopen(descriptor, "wb") as handle:
            handle.write(content)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
