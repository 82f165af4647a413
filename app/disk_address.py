"""Where the server answers that holds an NVMe directory: a file beside its lock, for `dormouse store`."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

NAME = "dormouse.address"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a process answers, and the key that opens its /admin."""

    url: str
    key: str


def tell(root: Path, url: str, key: str) -> None:
    """This process answers at `url`, and whoever may read this directory may use its /admin with `key`.

    A disk that does not take it is no reason not to serve.
    """
    fresh = root / f"{NAME}.new"
    with contextlib.suppress(OSError):
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w") as file:
            json.dump({"pid": os.getpid(), "url": url, "key": key}, file)
        fresh.replace(root / NAME)


def find(root: Path, pid: int) -> Address | None:
    """Where process `pid` answers; None where it has not said, or the file is another's. 0 is any process."""
    try:
        said = json.loads((root / NAME).read_text())
        return Address(str(said["url"]), str(said["key"])) if pid in (0, said["pid"]) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
