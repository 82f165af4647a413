"""Reading the catalog: sessions without their histories, blocks and who claims them, one history.

A hundred thousand sessions are listed in about a second, so nothing here looks at a text. Blocking; every call
opens the file for itself and may run beside the thread that writes.
"""

from __future__ import annotations

import gc
import sqlite3
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore import chain
from kvstore.catalog_file import FolderRow, connect, is_of_the_medium
from kvstore.catalog_rows import PackedHistory, SlotShape, pack_text, split_digests, unpack_history, unpack_text
from kvstore.history import Unread
from kvstore.session import Branch, Session
from kvstore.terms import Persist, Terms
from kvstore.types import BlockKey

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.clocks import Clocks
    from kvstore.history import History

NO_PARENT = bytes(chain.KEY_BYTES)

SESSIONS = """
SELECT serial, tenant, id, parent_id, "group", created, sessions.last_active, sessions.turns, next_branch,
    sessions.priority, sessions.keep_seconds, sessions.pinned, sessions.expire_seconds, persist,
    branch, branches.last_active, expected_return, branches.turns, branches.priority, branches.keep_seconds,
    branches.pinned, branches.expire_seconds, num_tokens, history, digests, keys
FROM sessions JOIN branches ON session = serial WHERE +folder = ?
"""
"""The plus keeps SQLite from the index: sessions in the order of the file, each with its branches in a row."""

TERMS = slice(9, 14)
BRANCH = slice(14, None)


class ReadFault(Enum):
    """Why a history was not read."""

    LOST = "lost"  # it is not there
    CORRUPT = "corrupt"  # it is not what was written
    UNREADABLE = "unreadable"  # the disk would not, now


@dataclass(slots=True)
class Blocks:
    """A folder's blocks, one place in each array; keys are packed (chain.pack), a parent of zeros is none.

    `last_used` is when the latest branch that has the block was active; minus infinity where none has it.
    """

    keys: bytes = b""
    parents: bytes = b""
    slots: array[int] = field(default_factory=lambda: array("q"))
    first_blocks: array[int] = field(default_factory=lambda: array("q"))
    last_used: array[float] = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.slots)

    def unclaimed(self) -> list[int]:
        """Slots of blocks that no branch has, or that lie in another slot as well."""
        seen: set[BlockKey] = set()
        slots = []
        for key, slot, last in zip(chain.unpack(self.keys), self.slots, self.last_used, strict=True):
            if last == -np.inf or key in seen:
                slots.append(slot)
            seen.add(key)
        return slots

    def rows(self) -> Iterator[tuple[BlockKey, BlockKey | None, int, int, float]]:
        """(key, parent, first_block, slot, last_used) of each."""
        parents = chain.unpack(self.parents)
        for key, parent, first, slot, last in zip(
            chain.unpack(self.keys), parents, self.first_blocks, self.slots, self.last_used, strict=True
        ):
            yield key, None if parent == NO_PARENT else parent, first, slot, last


@dataclass(frozen=True, slots=True)
class Listing:
    """One row of `store ls`: a session of any folder; times are Unix seconds, texts are never read."""

    folder: int
    tenant: str
    id: str
    branches: int
    turns: int
    tokens: int
    last_active: float


def folders(path: Path) -> list[FolderRow]:
    """Every model that has a place here, the longest unused first."""
    with closing(connect(path, read_only=True)) as connection:
        return [
            FolderRow(number, key, name, SlotShape(*shape), last_used, bool(has_all), sweep)
            for number, key, name, *shape, last_used, has_all, sweep in connection.execute(
                "SELECT number, model_key, name, block_tokens, slot_bytes, dtype, last_used, has_all_blocks,"
                " wants_sweep FROM folders ORDER BY last_used"
            )
        ]


def sessions(path: Path, folder: int, clocks: Clocks) -> list[Session]:
    """A folder's sessions with their branches; histories are `Unread`.

    Raises:
        sqlite3.Error: the file cannot be read, or is damaged.
        ValueError, TypeError: it says what was never written.
    """
    with closing(connect(path, read_only=True)) as connection:
        return _sessions(connection.execute(SESSIONS, (folder,)), clocks)


def _sessions(rows: Iterable[tuple[Any, ...]], clocks: Clocks) -> list[Session]:
    """One loop with few calls in it: it runs a hundred thousand times while a server starts."""
    found: list[Session] = []
    last_serial = None
    known: dict[tuple[Any, ...], Terms] = {}  # few differ
    now, shift = clocks.monotonic, clocks.moment(0.0)
    for row in rows:
        if row[0] != last_serial:
            serial, tenant, name, parent, group, created, active, turns, next_branch = row[: TERMS.start]
            asked = row[TERMS]
            if (terms := known.get(asked)) is None:
                terms = known[asked] = _terms(*asked)
            branches: dict[int, Branch] = {}
            found.append(
                Session(
                    unpack_text(tenant),
                    unpack_text(name),
                    serial,
                    min(now, created + shift),
                    None if parent is None else unpack_text(parent),
                    None if group is None else unpack_text(group),
                    terms,
                    branches,
                    turns,
                    min(now, active + shift),
                    False,
                    next_branch,
                )
            )
            last_serial = serial
        index, active, back, turns, priority, keep, pinned, expire, num_tokens, history, digests, keys = row[BRANCH]
        asked = (priority, keep, pinned, expire, Persist.DISK)
        if (terms := known.get(asked)) is None:
            terms = known[asked] = _terms(*asked)
        if len(keys) % chain.KEY_BYTES:
            raise ValueError("a branch has part of a key")
        branches[index] = Branch(
            index,
            min(now, active + shift),
            terms,
            Unread(history, num_tokens, split_digests(digests)),
            keys,
            turns,
            False,
            None if back is None else back + shift,
        )
    return found


def _terms(priority: int, keep: float, pinned: int, expire: float | None, persist: str) -> Terms:
    return Terms(priority, keep, bool(pinned), expire, Persist(persist))


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """While a hundred thousand objects are made that all stay, looking through them again and again only costs."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def others(path: Path, folder: int) -> list[tuple[str, str, int]]:
    """(tenant, id, serial) of the sessions of every other folder."""
    with closing(connect(path, read_only=True)) as connection:
        rows = connection.execute("SELECT tenant, id, serial FROM sessions WHERE folder != ?", (folder,))
        return [(unpack_text(tenant), unpack_text(name), serial) for tenant, name, serial in rows]


def tenants(path: Path) -> list[str]:
    """Those that have sessions, of any model."""
    with closing(connect(path, read_only=True)) as connection:
        return [unpack_text(tenant) for (tenant,) in connection.execute("SELECT DISTINCT tenant FROM sessions")]


def next_serial(path: Path) -> int:
    """Greater than that of any session of any folder."""
    with closing(connect(path, read_only=True)) as connection:
        (highest,) = connection.execute("SELECT max(serial) FROM sessions").fetchone()
        return 0 if highest is None else int(highest) + 1


def listing(path: Path) -> list[Listing]:
    """All sessions of all models, the latest first."""
    with closing(connect(path, read_only=True)) as connection:
        rows = connection.execute(
            "SELECT folder, tenant, id, count(*), sessions.turns, sum(num_tokens), sessions.last_active"
            " FROM sessions JOIN branches ON session = serial GROUP BY serial ORDER BY sessions.last_active DESC"
        )
        return [Listing(folder, unpack_text(tenant), unpack_text(name), *rest) for folder, tenant, name, *rest in rows]


def serials(path: Path, session_id: str | None = None) -> list[int]:
    """Sessions by that id, of any model and any tenant; None: all of them."""
    query = "SELECT serial FROM sessions WHERE ?1 IS NULL OR id = ?1"
    with closing(connect(path, read_only=True)) as connection:
        rows = connection.execute(query, (None if session_id is None else pack_text(session_id),))
        return [serial for (serial,) in rows]


def blocks(path: Path, folder: int) -> Blocks:
    """A folder's blocks by slot; nobody claims them yet."""
    keys, parents, found = [], [], Blocks()
    with closing(connect(path, read_only=True)) as connection:
        for slot, key, parent, first in connection.execute(
            "SELECT slot, key, parent, first_block FROM blocks WHERE folder = ? ORDER BY slot", (folder,)
        ):
            if len(key) != chain.KEY_BYTES or len(parent or NO_PARENT) != chain.KEY_BYTES:
                continue
            keys.append(key)
            parents.append(parent or NO_PARENT)
            found.slots.append(slot)
            found.first_blocks.append(first)
    found.keys, found.parents = b"".join(keys), b"".join(parents)
    found.last_used = array("d", [-np.inf]) * len(found)
    return found


def key_at(path: Path, folder: int, slot: int) -> BlockKey | None:
    """The block that a slot is said to hold, now."""
    with closing(connect(path, read_only=True)) as connection:
        row = connection.execute("SELECT key FROM blocks WHERE folder = ? AND slot = ?", (folder, slot)).fetchone()
        return None if row is None else BlockKey(row[0])


def faults(path: Path) -> list[str]:
    """What SQLite finds wrong with the file; nothing, as a rule. Reads all of it."""
    try:
        with closing(connect(path, read_only=True)) as connection:
            found = [str(line) for (line,) in connection.execute("PRAGMA integrity_check")]
    except sqlite3.DatabaseError as error:
        return [str(error)]
    return [] if found == ["ok"] else found


def unread_histories(path: Path) -> list[Unread]:
    """Every history there is, once."""
    with closing(connect(path, read_only=True)) as connection:
        return [Unread(digest, 0) for (digest,) in connection.execute("SELECT digest FROM histories")]


def branch_keys(path: Path, folder: int) -> list[bytes]:
    """The packed keys of every branch of a folder."""
    with closing(connect(path, read_only=True)) as connection:
        rows = connection.execute(
            "SELECT keys FROM branches JOIN sessions ON serial = session WHERE folder = ?", (folder,)
        )
        return [keys for (keys,) in rows]


def claim(found: Blocks, branches: Sequence[tuple[bytes, float]]) -> list[int]:
    """Note in `found` when each block was last wanted; how many leading blocks of each branch are there.

    `branches` are packed keys and when the branch was last active. Keys are digests, so halves of them are compared.
    """
    lengths = np.array([len(keys) // chain.KEY_BYTES for keys, _ in branches], dtype=np.int64)
    if not len(found):
        return [0] * len(branches)
    heads = _heads(found.keys)
    order = np.argsort(heads, kind="stable")
    ordered = heads[order]
    claimed = _heads(b"".join(keys for keys, _ in branches))
    place = np.searchsorted(ordered, claimed).clip(max=len(ordered) - 1)
    is_there = ordered[place] == claimed
    active = np.repeat(np.array([moment for _, moment in branches], dtype=np.float64), lengths)
    last_used = np.array(found.last_used)
    np.maximum.at(last_used, order[place[is_there]], active[is_there])
    found.last_used = array("d", last_used.tobytes())
    starts = np.cumsum(lengths) - lengths
    owner = np.repeat(np.arange(len(lengths)), lengths)
    written = lengths.copy()
    missing = np.flatnonzero(~is_there)
    np.minimum.at(written, owner[missing], missing - starts[owner[missing]])
    return [int(count) for count in written]


def read_history(path: Path, unread: Unread) -> History | ReadFault:
    """One history, as it was written or not at all."""
    try:
        with closing(connect(path, read_only=True)) as connection:
            row = connection.execute(
                "SELECT first_answer, token_ids, text, seams, message_ends, told, replies FROM histories"
                " WHERE digest = ?",
                (unread.digest,),
            ).fetchone()
    except (sqlite3.Error, OSError) as error:
        return ReadFault.UNREADABLE if is_of_the_medium(error) else ReadFault.CORRUPT
    if row is None:
        return ReadFault.LOST
    try:
        packed = PackedHistory(*row)
        if packed.digest != unread.digest:
            return ReadFault.CORRUPT
        return unpack_history(packed, unread.digests)
    except (TypeError, ValueError, OverflowError):  # a column of another type is damage, too
        return ReadFault.CORRUPT


def _heads(packed: bytes) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.frombuffer(packed, dtype="<u8")[::2]
