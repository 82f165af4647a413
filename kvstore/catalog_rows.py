"""What the catalog knows, as values, and how a history becomes bytes and a history again (pure).

Text is kept as UTF-8 that lets lone surrogates pass: ids of sessions and what clients said may hold any.
Integers are little-endian, four bytes each. A history is named by a digest of its bytes: forks share one, and one
that was changed on the disk is not taken for what was said.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvstore.history import DIGEST_BYTES, History, Reply, Seam, Told

if TYPE_CHECKING:
    from kvstore.history import Unread
    from kvstore.terms import Terms
    from kvstore.types import BlockKey


TOLD = struct.Struct(f"<QQQ{DIGEST_BYTES}s{DIGEST_BYTES}s")


class SlotShape(NamedTuple):
    """What a folder's slots hold: enough to read them without the model."""

    block_tokens: int
    slot_bytes: int  # of payload
    dtype: str


class SessionRow(NamedTuple):
    """A session without its branches; times are Unix seconds."""

    serial: int
    tenant: str
    id: str
    parent_id: str | None
    group: str | None
    created: float
    last_active: float
    turns: int
    next_branch: int
    terms: Terms


class BranchRow(NamedTuple):
    """A branch of the session of this serial, with its history, or the place where that lies already."""

    serial: int
    branch: int
    last_active: float
    expected_return: float | None
    turns: int
    terms: Terms
    keys: bytes
    history: History | Unread


class PlacedBlock(Protocol):
    """A block in a slot of an NVMe folder."""

    @property
    def slot(self) -> int: ...

    @property
    def key(self) -> BlockKey: ...

    @property
    def parent(self) -> BlockKey | None: ...

    @property
    def first_block(self) -> int:
        """Its index in its chain."""


class BlockRow(NamedTuple):
    """See PlacedBlock."""

    slot: int
    key: BlockKey
    parent: BlockKey | None
    first_block: int


class PackedHistory(NamedTuple):
    """A history's bytes; its digests are not among them, for they are wanted without it."""

    first_answer: int
    token_ids: bytes
    text: bytes
    seams: bytes
    message_ends: bytes
    told: bytes  # empty for none
    replies: bytes  # empty for none

    @property
    def digest(self) -> bytes:
        """Of all of it; each part is length-prefixed, so that parts cannot run into each other."""
        running = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"dormouse-histor")
        for part in (self.first_answer.to_bytes(8, "little"), *self[1:]):
            running.update(len(part).to_bytes(8, "little"))
            running.update(part)
        return running.digest()


def pack_text(text: str) -> bytes:
    """Any text."""
    return text.encode("utf-8", "surrogatepass")


def unpack_text(packed: bytes) -> str:
    """What `pack_text` made bytes of; raises ValueError or TypeError for what it did not."""
    return str(packed, "utf-8", "surrogatepass")


def pack_history(history: History) -> PackedHistory:
    """Its ids, text and places where both part cleanly."""
    return PackedHistory(
        history.first_answer,
        _to_bytes(history.token_ids),
        pack_text(history.text),
        _to_bytes(array("I", _flat(history.seams))),
        _to_bytes(array("I", _flat(history.message_ends))),
        b"" if history.told is None else _pack_told(history.told),
        _pack_replies(history.replies) if history.replies else b"",
    )


def unpack_history(packed: PackedHistory, digests: tuple[bytes, ...]) -> History:
    """What `pack_history` made bytes of; raises ValueError or TypeError for what it did not."""
    return History(
        token_ids=_from_bytes(packed.token_ids),
        text=unpack_text(packed.text),
        seams=_seams(packed.seams),
        first_answer=packed.first_answer,
        message_ends=_seams(packed.message_ends),
        digests=digests,
        told=_unpack_told(packed.told) if packed.told else None,
        replies=_unpack_replies(packed.replies) if packed.replies else (),
    )


def split_digests(packed: bytes) -> tuple[bytes, ...]:
    """Text digests that lie end to end."""
    return tuple(packed[start : start + DIGEST_BYTES] for start in range(0, len(packed), DIGEST_BYTES))


def _pack_told(told: Told) -> bytes:
    assert len(told.digest) == len(told.prompt_digest) == DIGEST_BYTES
    return TOLD.pack(told.num_messages, told.prompt_length, told.answer_start, told.digest, told.prompt_digest)


def _unpack_told(packed: bytes) -> Told:
    try:
        num_messages, prompt_length, answer_start, digest, prompt_digest = TOLD.unpack(packed)
    except struct.error as error:
        raise ValueError("not a conversation's marks") from error
    return Told(num_messages, digest, prompt_length, prompt_digest, answer_start)


def _pack_replies(replies: Iterable[Reply]) -> bytes:
    rows = [
        (each.id, each.made, each.previous, each.messages, each.num_tokens, each.ids_digest.hex(), each.asked)
        for each in replies
    ]
    return json.dumps(rows).encode()


def _unpack_replies(packed: bytes) -> tuple[Reply, ...]:
    rows = json.loads(packed)
    return tuple(
        Reply(reply_id, made, previous, messages, tokens, bytes.fromhex(digest), tuple(asked))
        for reply_id, made, previous, messages, tokens, digest, asked in rows
    )


def _flat(seams: Iterable[Seam]) -> list[int]:
    return [number for seam in seams for number in seam]


def _seams(packed: bytes) -> tuple[Seam, ...]:
    numbers = _from_bytes(packed)
    return tuple(map(Seam, numbers[::2], numbers[1::2]))


def _to_bytes(numbers: array[int]) -> bytes:
    return _little(numbers).tobytes()


def _from_bytes(packed: bytes) -> array[int]:
    numbers = array("I")
    numbers.frombytes(packed)
    return _little(numbers)


def _little(numbers: array[int]) -> array[int]:
    if sys.byteorder == "little":
        return numbers
    swapped = numbers[:]
    swapped.byteswap()
    return swapped
