"""The memory limit that a container or a service manager set on this process (Linux; elsewhere there is none).

Version 2 has one tree, version 1 one per controller; both are hierarchies in which the tightest limit above us holds.
Page cache that can be dropped counts as used there and as free here: otherwise reading a model file would look like
using its size twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class Group:
    """A limit in bytes, and how much of it is left."""

    limit_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class _Files:
    """What the two versions call the same things."""

    limit: str
    usage: str
    reclaimable: str


_V2 = _Files("memory.max", "memory.current", "inactive_file")
_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def tightest(root: Path = ROOT, own: Path = OWN) -> Group | None:
    """The group above this process with the least left, or None where no group has a limit."""
    groups = [group for folder, files in _folders(root, own) if (group := _read(folder, files)) is not None]
    return min(groups, key=lambda group: group.available_bytes, default=None)


def _folders(root: Path, own: Path) -> list[tuple[Path, _Files]]:
    """Our group's folder in each hierarchy that governs memory, and every folder above it."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    found: list[tuple[Path, _Files]] = []
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            found += [(folder, _V2) for folder in _upwards(root, path)]
        elif "memory" in controllers.split(","):
            found += [(folder, _V1) for folder in _upwards(root / "memory", path)]
    return found


def _upwards(top: Path, path: str) -> list[Path]:
    # Inside a container without a cgroup namespace the path may be the host's, and only `top` exists.
    folder = top / path.lstrip("/")
    return [folder, *(parent for parent in folder.parents if parent == top or top in parent.parents)]


def _read(folder: Path, files: _Files) -> Group | None:
    try:
        limit = int((folder / files.limit).read_text())  # "max": no limit here
        usage = int((folder / files.usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    used = max(0, usage - int(stat.get(files.reclaimable, 0)))
    return Group(limit, max(0, limit - used))
