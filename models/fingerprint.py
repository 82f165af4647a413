"""Which weights these are: a digest over every byte of their files, and the key of the K/V they make.

Hashing a file again costs as long as reading it, so its digest is remembered by (path, size,
mtime_ns, inode), one small file each, so that two servers starting at once cannot harm each other.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from models.files import write_whole

if TYPE_CHECKING:
    from kvstore.types import KVLayout

CHUNK_BYTES = 8 << 20
KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class _Identity:
    """What must be unchanged for a remembered digest to hold."""

    path: str
    size: int
    mtime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> _Identity:
        stat = path.stat()
        return cls(str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino)


def fingerprint(files: Iterable[Path], cache_dir: Path) -> bytes:
    """16 bytes over the names and every byte of `files`; their order and folder do not matter.

    Raises:
        OSError: a file cannot be read. Trouble with the cache is no trouble: it is computed again.
    """
    total = hashlib.blake2b(digest_size=KEY_BYTES, person=b"dormouse-weights")
    for path in sorted(files, key=lambda file: file.name):
        name = path.name.encode()
        total.update(len(name).to_bytes(4, "little") + name + file_digest(path, cache_dir))
    return total.digest()


def file_digest(path: Path, cache_dir: Path) -> bytes:
    """xxh3-128 over every byte of one file, remembered in `cache_dir`."""
    identity = _Identity.of(path.resolve())
    remembered = (
        cache_dir / "fingerprints" / f"{hashlib.blake2b(identity.path.encode(), digest_size=12).hexdigest()}.json"
    )
    found = _recall(remembered, identity)
    if found is not None:
        return found
    digest = _hash(path)
    if _Identity.of(path.resolve()) == identity:  # else it was written to meanwhile: remember nothing
        _remember(remembered, identity, digest)
    return digest


def model_key(
    weights: bytes, dtype: str, layout: KVLayout, settings: Mapping[str, object], adapter: str | None = None
) -> bytes:
    """16 bytes that differ wherever K/V of the same tokens would: two models never share a block.

    `settings` is what shapes K/V beside the weights (rope, windows, which attention), as JSON takes it.
    """
    parts = {
        "weights": weights.hex(),
        "dtype": dtype,
        "layout": asdict(layout),
        "settings": dict(settings),
        "adapter": adapter,
    }
    canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(canonical.encode(), digest_size=KEY_BYTES, person=b"dormouse-model").digest()


def _hash(path: Path) -> bytes:
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as handle:
        while count := handle.readinto(buffer):
            digest.update(buffer[:count])
    return digest.digest()


def _recall(remembered: Path, identity: _Identity) -> bytes | None:
    try:
        entry = json.loads(remembered.read_bytes())
        if entry["identity"] != asdict(identity):
            return None
        digest = bytes.fromhex(entry["xxh3_128"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return digest if len(digest) == KEY_BYTES else None


def _remember(remembered: Path, identity: _Identity, digest: bytes) -> None:
    entry = {"identity": asdict(identity), "xxh3_128": digest.hex()}
    try:
        write_whole(remembered, json.dumps(entry).encode())
    except OSError:
        return  # a read-only cache costs time at the next start, nothing more
