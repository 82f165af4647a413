"""Token ids -> chained block keys (pure).

key[i] = blake2b(key[i-1] || token_ids of block i, key=namespace), 16 bytes: equal keys mean
equal tokens from the first to the last, in one namespace. Equal keys are interchangeable,
not bitwise equal: K/V depends on how rows were batched unless attention is exact.

Token ids are kept as `array('I')`: four bytes each, and invisible to the garbage collector.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from kvstore.types import BlockKey, Namespace

KEY_BYTES = 16


def namespace(model_key: bytes, tenant: str, cache_salt: str | None) -> Namespace:
    """Digest of who may share blocks; each part is length-prefixed, so parts cannot run into each other."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES, person=b"dormouse-ns")
    parts = [model_key, tenant.encode(), b"" if cache_salt is None else b"\x01" + cache_salt.encode()]
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return Namespace(digest.digest())


def extend(parent: BlockKey | None, token_ids: array[int], block_tokens: int, space: Namespace) -> list[BlockKey]:
    """Keys of the full blocks of `token_ids`, the first of which follows `parent`."""
    keys: list[BlockKey] = []
    packed = token_ids.tobytes()
    width = block_tokens * token_ids.itemsize
    previous: bytes = parent if parent is not None else b""
    for start in range(0, len(packed) - width + 1, width):
        digest = hashlib.blake2b(previous, digest_size=KEY_BYTES, key=space)
        digest.update(packed[start : start + width])
        key = BlockKey(digest.digest())
        keys.append(key)
        previous = key
    return keys


def common_prefix(left: array[int], right: array[int]) -> int:
    """Length of the longest common prefix; compares slices, which runs in C."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def pack(keys: Sequence[BlockKey]) -> bytes:
    """Keys end to end: 16 bytes each, and one object for the garbage collector to know of instead of many."""
    return b"".join(keys)


def unpack(packed: bytes) -> tuple[BlockKey, ...]:
    """What `pack` made one of."""
    return tuple(BlockKey(packed[start : start + KEY_BYTES]) for start in range(0, len(packed), KEY_BYTES))


def last(packed: bytes) -> BlockKey | None:
    """The last of packed keys."""
    return BlockKey(packed[-KEY_BYTES:]) if packed else None


def beyond(packed: bytes, other: bytes) -> tuple[BlockKey, ...]:
    """The keys of `packed` from where it leaves `other` on.

    Chained keys agree up to some place and nowhere after it, so the place is found by bisection.
    """
    low, high = 0, min(len(packed), len(other)) // KEY_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        place = slice((middle - 1) * KEY_BYTES, middle * KEY_BYTES)
        if packed[place] == other[place]:
            low = middle
        else:
            high = middle - 1
    return unpack(packed[low * KEY_BYTES :])
