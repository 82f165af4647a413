"""The directory that NVMe's files live in: whose it is, what lies in it, and how much that may be.

    <root>/                       0700
      dormouse.lock               locked as long as a server runs; holds its pid
      dormouse-format             the version that everything here is written in
      catalog.sqlite...           kvstore.catalog's
      <model name>-<12 hex>/      one per model_key, since their slots differ in size
        model.json                says that the folder is ours, and whose; its time, when it was last opened
        slabs/0000.kv ...         kvstore.tiers.segments'
      set-aside-format-<n>/       all of the above as another version left it

Only what bears these names, and lies in a folder with its model.json, is ours: anything else is never opened, counted
or removed. One quota holds over all slabs, what was set aside among them, and a share of the disk stays free. Whoever
needs room gets it from what was set aside, then from the folder that was longest unused; never from one in use.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvstore.codec import FORMAT_VERSION
from kvstore.errors import SettingInvalid
from kvstore.tiers.segments import SEGMENT_NAME

log = logging.getLogger(__name__)

FLAG: Final = "--nvme-dir"
KEEP_FREE_SHARE: Final = 0.10

_LOCK, _FORMAT, _MARKER, _PROBE, _SLABS = "dormouse.lock", "dormouse-format", "model.json", "probe", "slabs"
_CATALOG = "catalog.sqlite"
_FOLDER_NAME = re.compile(r".+-[0-9a-f]{12}")
_SET_ASIDE = re.compile(r"set-aside-format-.+")
_NAME_CHARS: Final = 80


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """Where the slabs of one model_key lie; `make` makes it, also after it was deleted under us."""

    path: Path
    model_name: str
    model_key: bytes

    @property
    def slabs(self) -> Path:
        return self.path / _SLABS

    @property
    def probe(self) -> Path:
        """A file to try the file system with."""
        return self.path / _PROBE

    def make(self) -> None:
        """Make what is missing of it, for this user alone.

        Raises:
            OSError: it cannot be made.
        """
        for path in (self.path.parent, self.path, self.slabs):
            _make_directory(path)
        marker = self.path / _MARKER
        if not marker.exists():
            _write(marker, json.dumps({"model_name": self.model_name, "model_key": self.model_key.hex()}))

    @classmethod
    def at(cls, path: Path) -> ModelFolder | None:
        """The one at `path`, if there is one."""
        if not _FOLDER_NAME.fullmatch(path.name) or path.is_symlink():
            return None
        try:
            said = json.loads((path / _MARKER).read_text())
            return cls(path, str(said["model_name"]), bytes.fromhex(said["model_key"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @property
    def bytes_held(self) -> int:
        """Of its slabs."""
        return sum(_size(path) for path in _segments(self.slabs))


class NvmeDirectory:
    """`root`, held for this process between `open` and `close`.

    `quota_bytes` holds over all slabs; None is no limit. `on_removed` is told the path of a folder that gave way, from
    whichever thread needed the room.
    """

    def __init__(
        self,
        root: Path,
        *,
        quota_bytes: int | None = None,
        keep_free_share: float = KEEP_FREE_SHARE,
        on_removed: Callable[[Path], None] | None = None,
    ) -> None:
        self.root = root
        self.quota_bytes = quota_bytes
        self.keep_free_share = keep_free_share
        self.set_aside: Path | None = None  # where `open` put what another version had left
        self.on_removed = on_removed
        self._in_use: set[Path] = set()
        self._lock = threading.Lock()
        self._lock_fd: int | None = None

    def __repr__(self) -> str:
        return f"<NvmeDirectory {self.root}>"

    def open(self) -> None:
        """Make the directory and take it; set aside what another version left there.

        Raises:
            SettingInvalid: another process holds it, or it cannot be used; names --nvme-dir.
        """
        try:
            _make_directory(self.root)
            if not self._take_lock() and not (holder(self.root) is None and self._take_lock()):
                raise SettingInvalid(FLAG, f"{self.root} is in use by {_named(holder(self.root))}; give another one")
            self._check_format()
        except OSError as exc:
            self.close()
            raise SettingInvalid(FLAG, f"{self.root} cannot be used: {exc}") from exc

    def close(self) -> None:
        """Let go of it; closing twice is closing once."""
        fd, self._lock_fd = self._lock_fd, None
        if fd is not None:
            os.close(fd)

    @property
    def catalog(self) -> Path:
        return self.root / _CATALOG

    # --- folders ------------------------------------------------------------------------------

    def folder(self, model_name: str, model_key: bytes) -> ModelFolder:
        """The folder of `model_key`, made if need be; from now on in use, and so never the one to give way.

        Raises:
            SettingInvalid: it cannot be made, or bears another model's key.
        """
        folder = ModelFolder(self.root / f"{_safe(model_name)}-{model_key.hex()[:12]}", model_name, model_key)
        there = ModelFolder.at(folder.path)
        if there is not None and there.model_key != model_key:
            raise SettingInvalid(FLAG, f"{folder.path} belongs to another model ({there.model_name}); remove it")
        try:
            folder.make()
            os.utime(folder.path / _MARKER)
        except OSError as exc:
            raise SettingInvalid(FLAG, f"{folder.path} cannot be made: {exc}") from exc
        self._in_use.add(folder.path)
        return folder

    def folders(self) -> list[ModelFolder]:
        """All there are, longest unused first."""
        found = [ModelFolder.at(path) for path in _entries(self.root)]
        return sorted((folder for folder in found if folder is not None), key=_last_opened)

    @property
    def bytes_held(self) -> int:
        """Of all slabs, those set aside among them."""
        return sum(map(_bytes_below, self._places()))

    def remove(self, folder: ModelFolder) -> bool:
        """Remove a folder that is not in use, with all its blocks; False if something of it could not be."""
        assert folder.path not in self._in_use
        return self._remove(folder.path)

    def make_room(self, size: int) -> bool:
        """May slabs grow by `size` bytes? Removes folders that are not in use until they may; blocking.

        Also makes the lock anew where the directory was deleted under us, and says no once another process has it.
        """
        with self._lock:
            try:
                return self._holds_lock() and self._make_room(size)
            except OSError as exc:
                log.warning("making room under %s: %s", self.root, exc)
                return False

    def _make_room(self, size: int) -> bool:
        if self._fits(size):
            return True
        victims = [path for path in self._places() if path not in self._in_use]
        if not self._fits(size - sum(map(_bytes_below, victims))):
            return False  # and so nothing is removed in vain: the disk is full of what is not ours
        for victim in victims:
            log.info("removing %s: what it holds was longest unused, and room is needed", victim)
            self._remove(victim)
            if self._fits(size):
                return True
        return False

    def _fits(self, size: int) -> bool:
        if self.quota_bytes is not None and self.bytes_held + size > self.quota_bytes:
            return False
        disk = os.statvfs(self.root)
        floor = int(self.keep_free_share * disk.f_blocks * disk.f_frsize)
        return disk.f_bavail * disk.f_frsize - size >= floor

    def _places(self) -> list[Path]:
        """Where slabs are, in the order in which they give way."""
        aside = sorted(path for path in _entries(self.root) if _SET_ASIDE.fullmatch(path.name))
        return aside + [folder.path for folder in self.folders()]

    def _remove(self, path: Path) -> bool:
        """Remove what is ours below `path`, then `path` if nothing else is in there."""
        _remove_ours(path)
        gone = not path.exists()
        if not gone:
            log.warning("%s could not be removed whole: something in it is not ours, or cannot be removed", path)
        if self.on_removed is not None:
            self.on_removed(path)
        return gone

    # --- format -------------------------------------------------------------------------------

    def _check_format(self) -> None:
        path = self.root / _FORMAT
        try:
            version = path.read_text().strip()
        except FileNotFoundError:
            # Blocks without it: it was deleted, and they say of themselves what they are.
            version = str(FORMAT_VERSION)
        if version != str(FORMAT_VERSION):
            self._set_aside(version)
        _write(path, f"{FORMAT_VERSION}\n")

    def _set_aside(self, version: str) -> None:
        name = f"set-aside-format-{_safe(version)}"
        names = iter([name, *(f"{name}-{number}" for number in range(2, 1000))])
        self.set_aside = next(self.root / name for name in names if not (self.root / name).exists())
        _make_directory(self.set_aside)
        for path in _entries(self.root):
            if path.name == _FORMAT or path.name.startswith(_CATALOG) or ModelFolder.at(path) is not None:
                path.rename(self.set_aside / path.name)
        log.warning("%s was written by another version (format %s); it lies in %s", self.root, version, self.set_aside)

    # --- the lock -----------------------------------------------------------------------------

    def _take_lock(self) -> bool:
        """False if another process, or another object of this one, has it."""
        fd = os.open(self.root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            # Not a record lock: that one goes when anybody in this process closes the file.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as exc:
            os.close(fd)
            if exc.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise
        self.close()
        self._lock_fd = fd
        return True

    def _holds_lock(self) -> bool:
        assert self._lock_fd is not None, "not open"
        held = os.fstat(self._lock_fd)
        try:
            there = os.stat(self.root / _LOCK)
        except FileNotFoundError:
            _make_directory(self.root)
            taken = self._take_lock()
            self._check_format()
            return taken
        return (held.st_dev, held.st_ino) == (there.st_dev, there.st_ino) or self._take_lock()


def holder(root: Path) -> int | None:
    """Pid of the process that holds `root`; None if none does, 0 if it cannot be told which."""
    try:
        fd = os.open(root / _LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        said = os.pread(fd, 32, 0).strip()
        return int(said) if said.isdigit() else 0
    finally:
        os.close(fd)
    return None


def _named(pid: int | None) -> str:
    return f"process {pid}" if pid else "another process"


def _make_directory(path: Path) -> None:
    if not path.is_dir():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)


def _write(path: Path, text: str) -> None:
    """The whole text or none of it, whenever the machine stops."""
    fresh = path.with_name(path.name + ".new")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(fd, text.encode())
        os.fsync(fd)
    finally:
        os.close(fd)
    fresh.replace(path)


def _safe(name: str) -> str:
    """A file name that begins with no dot and has no separator in it."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip(".")[-_NAME_CHARS:] or "model"


def _entries(path: Path) -> list[Path]:
    try:
        return list(path.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _segments(slabs: Path) -> Iterator[Path]:
    for path in _entries(slabs):
        if SEGMENT_NAME.fullmatch(path.name) and path.is_file() and not path.is_symlink():
            yield path


def _slabs_below(path: Path) -> Iterator[Path]:
    """Of a model's folder, or of all in what was set aside."""
    yield from _segments(path / _SLABS)
    if _SET_ASIDE.fullmatch(path.name):
        for folder in _entries(path):
            yield from _segments(folder / _SLABS)


def _bytes_below(path: Path) -> int:
    return sum(map(_size, _slabs_below(path)))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _last_opened(folder: ModelFolder) -> float:
    try:
        return (folder.path / _MARKER).stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _remove_ours(path: Path) -> None:
    """Slabs first and the marker last: what is left of an interrupted removal is still known as ours."""
    if _SET_ASIDE.fullmatch(path.name):
        for inner in _entries(path):
            if ModelFolder.at(inner) is not None:
                _remove_ours(inner)
            elif inner.name == _FORMAT or inner.name.startswith(_CATALOG):
                _unlink(inner)
    for slab in _segments(path / _SLABS):
        _unlink(slab)
    with contextlib.suppress(OSError):
        (path / _SLABS).rmdir()
    if not any(inner.name not in (_MARKER, _PROBE) for inner in _entries(path)):
        for name in (_PROBE, _MARKER):
            _unlink(path / name)
        with contextlib.suppress(OSError):
            path.rmdir()


def _unlink(path: Path) -> None:
    try:
        path.unlink()
    except FileNotFoundError:
        return
    except OSError as exc:
        log.warning("%s cannot be removed: %s", path, exc)
