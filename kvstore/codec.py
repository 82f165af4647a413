"""What a slot on a disk says of itself: its header (pure).

    [ header, 4,096 bytes                                                        | payload, slot_bytes ]
      fields ... zeros ............................................ check of [0, 4080)

A slot stands for itself: whoever finds it knows from the header alone which block it is, of which model, and where it
lies in its chain. Nothing in it is trusted before the check agrees, and no payload before its digest does. Payloads
are stored as they lie in memory (codec RAW); the digest is of the stored bytes, by whoever moves them.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Final

from kvstore.types import SLOT_ALIGNMENT, BlockKey

HEADER_BYTES: Final = SLOT_ALIGNMENT
FORMAT_VERSION: Final = 1
"""Of headers, and of the directory that holds them: another one is set aside, never read."""

_MAGIC: Final = b"dormouKV"
_PREFIX = struct.Struct("<8sI")  # magic, format version: in every version the same
_FIELDS = struct.Struct("<8sI I 16s B16s B16s Q I Q 16s")
_CHECK_BYTES: Final = 16
_CHECKED: Final = HEADER_BYTES - _CHECK_BYTES
_BLANK: Final = bytes(HEADER_BYTES)


class Codec(IntEnum):
    """How a payload is stored."""

    RAW = 0


class HeaderFault(Enum):
    """Why a page is no header that this version can use."""

    BLANK = "blank"  # nothing was ever written there, or it was erased
    DAMAGED = "damaged"
    OTHER_FORMAT = "other_format"


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """One block on a disk: tokens [first_token, first_token + token_count) of its chain.

    `key` is None for a turn's private block, `parent` where a chain begins. `model` is the start of the model_key that
    the folder is for. `payload_digest` is xxh3-128 of the `payload_bytes` that follow the header.
    """

    model: bytes
    key: BlockKey | None
    parent: BlockKey | None
    first_token: int
    token_count: int
    payload_bytes: int
    payload_digest: bytes
    codec: Codec = Codec.RAW

    def pack(self) -> bytes:
        """The header's page: HEADER_BYTES bytes."""
        fields = _FIELDS.pack(
            _MAGIC,
            FORMAT_VERSION,
            self.codec,
            self.model,
            self.key is not None,
            self.key or b"",
            self.parent is not None,
            self.parent or b"",
            self.first_token,
            self.token_count,
            self.payload_bytes,
            self.payload_digest,
        )
        return seal(fields)


def seal(fields: bytes) -> bytes:
    """The page of a header that begins with `fields`; in every version the same."""
    page = fields.ljust(_CHECKED, b"\0")
    return page + _check(page)


def model_mark(model_key: bytes) -> bytes:
    """What a header keeps of a model_key."""
    return model_key[:16].ljust(16, b"\0")


def unpack(page: bytes | memoryview) -> SlotHeader | HeaderFault:
    """What the HEADER_BYTES of `page` say, if they can be believed."""
    data = bytes(page)
    assert len(data) == HEADER_BYTES
    magic, version = _PREFIX.unpack_from(data)
    if magic != _MAGIC:
        return HeaderFault.BLANK if data == _BLANK else HeaderFault.DAMAGED
    if _check(data[:_CHECKED]) != data[_CHECKED:]:
        return HeaderFault.DAMAGED
    if version != FORMAT_VERSION:
        return HeaderFault.OTHER_FORMAT
    _, _, codec, model, has_key, key, has_parent, parent, first, count, size, digest = _FIELDS.unpack_from(data)
    try:
        codec = Codec(codec)
    except ValueError:
        return HeaderFault.OTHER_FORMAT
    return SlotHeader(
        model=model,
        key=BlockKey(key) if has_key else None,
        parent=BlockKey(parent) if has_parent else None,
        first_token=first,
        token_count=count,
        payload_bytes=size,
        payload_digest=digest,
        codec=codec,
    )


def _check(page: bytes) -> bytes:
    return hashlib.blake2b(page, digest_size=_CHECK_BYTES, person=b"dormouse-slot").digest()
