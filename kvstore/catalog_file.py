"""The catalog's SQLite file: its tables, how it is opened and judged, and how a batch is written to it.

    folders     one for each model_key: K/V of two models never share a slot, nor their sessions ids of tokens
    blocks      which block lies in which slot of a folder
    sessions    of a folder; (tenant, id) once in each
    branches    of a session, with the keys of their blocks and all that can be asked without a history
    histories   exact ids and text, by their digest; forks share one, and the last branch takes it along

Opened in WAL with `synchronous=NORMAL`: a process that is killed loses nothing that was committed, and a power cut
at most the newest commits. `secure_delete` overwrites what is deleted; the log, which still has it, is cut to
nothing after each deletion (`empty_log`).

A file that is damaged, of another program or of another version is renamed and never deleted or misread.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.catalog_rows import SlotShape, pack_history, pack_text
from kvstore.history import Unread

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvstore.catalog_pending import Batch
    from kvstore.catalog_rows import BranchRow, PlacedBlock, SessionRow
    from kvstore.history import History
    from kvstore.terms import Terms

APPLICATION_ID = 0x446F726D  # "Dorm", in the header of every SQLite file of ours
FORMAT = 3
"""Raised whenever an older program would misread the file, or this one an older file."""

BUSY_SECONDS = 2.0
"""Readers hold the file for milliseconds."""

SCHEMA = """
CREATE TABLE folders (
    number INTEGER PRIMARY KEY, model_key BLOB NOT NULL UNIQUE, name TEXT NOT NULL, block_tokens INTEGER NOT NULL,
    slot_bytes INTEGER NOT NULL, dtype TEXT NOT NULL, last_used REAL NOT NULL, has_all_blocks INTEGER NOT NULL,
    wants_sweep INTEGER NOT NULL DEFAULT 0);
CREATE TABLE blocks (
    folder INTEGER NOT NULL, slot INTEGER NOT NULL, key BLOB NOT NULL, parent BLOB, first_block INTEGER NOT NULL,
    PRIMARY KEY (folder, slot)) WITHOUT ROWID;
CREATE TABLE sessions (
    serial INTEGER PRIMARY KEY, folder INTEGER NOT NULL, tenant BLOB NOT NULL, id BLOB NOT NULL, parent_id BLOB,
    "group" BLOB, created REAL NOT NULL, last_active REAL NOT NULL, turns INTEGER NOT NULL,
    next_branch INTEGER NOT NULL, priority INTEGER NOT NULL, keep_seconds REAL NOT NULL, pinned INTEGER NOT NULL,
    expire_seconds REAL, persist TEXT NOT NULL, UNIQUE (tenant, id, folder));
CREATE TABLE branches (
    number INTEGER PRIMARY KEY, session INTEGER NOT NULL, branch INTEGER NOT NULL, last_active REAL NOT NULL,
    expected_return REAL, turns INTEGER NOT NULL, priority INTEGER NOT NULL, keep_seconds REAL NOT NULL,
    pinned INTEGER NOT NULL, expire_seconds REAL, num_tokens INTEGER NOT NULL, history BLOB NOT NULL,
    digests BLOB NOT NULL, keys BLOB NOT NULL, UNIQUE (session, branch));
CREATE INDEX branches_by_history ON branches (history);
CREATE TABLE histories (
    number INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, first_answer INTEGER NOT NULL, token_ids BLOB NOT NULL,
    text BLOB NOT NULL, seams BLOB NOT NULL, message_ends BLOB NOT NULL, told BLOB NOT NULL, replies BLOB NOT NULL);
"""

STATEMENTS = [statement.strip() for statement in SCHEMA.split(";")[:-1]]

KEEP_SESSION = """
INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (serial) DO UPDATE SET last_active = excluded.last_active, turns = excluded.turns,
    next_branch = excluded.next_branch, priority = excluded.priority, keep_seconds = excluded.keep_seconds,
    pinned = excluded.pinned, expire_seconds = excluded.expire_seconds, persist = excluded.persist
"""
KEEP_BRANCH = """
INSERT INTO branches (session, branch, last_active, expected_return, turns, priority, keep_seconds, pinned,
    expire_seconds, num_tokens, history, digests, keys) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (session, branch) DO UPDATE SET last_active = excluded.last_active,
    expected_return = excluded.expected_return, turns = excluded.turns, priority = excluded.priority,
    keep_seconds = excluded.keep_seconds, pinned = excluded.pinned, expire_seconds = excluded.expire_seconds,
    num_tokens = excluded.num_tokens, history = excluded.history, digests = excluded.digests, keys = excluded.keys
"""
HISTORY = """
INSERT INTO histories (digest, first_answer, token_ids, text, seams, message_ends, told, replies)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?)
"""


WANT_SWEEP = "UPDATE folders SET wants_sweep = wants_sweep + 1 WHERE number ="
SWEPT = "UPDATE folders SET wants_sweep = 0 WHERE number = ? AND wants_sweep = ?"


class Judgement(StrEnum):
    """What a file turned out to be."""

    SOUND = "sound"
    EMPTY = "empty"
    DAMAGED = "damaged"
    FOREIGN = "foreign"  # an SQLite file of another program
    OTHER_FORMAT = "other_format"


@dataclass(frozen=True, slots=True)
class FolderRow:
    """A model's place. Of one that has not all its blocks here the slots' headers have to be read.

    `wants_sweep` counts sessions that went while nobody served it: their blocks are to be erased.
    """

    number: int
    model_key: bytes
    name: str
    shape: SlotShape
    last_used: float
    has_all_blocks: bool
    wants_sweep: int = 0


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """A connection whose transactions are begun by hand; any thread may use it, one at a time.

    Raises:
        sqlite3.Error: there is no such file, or it cannot be had.
    """
    mode = "ro" if read_only else "rw"
    address = f"{path.absolute().as_uri()}?mode={mode}"
    connection = sqlite3.connect(address, uri=True, isolation_level=None, check_same_thread=False, timeout=BUSY_SECONDS)
    connection.execute("PRAGMA temp_store = MEMORY")
    return connection


def judge(path: Path) -> Judgement:
    """Look at a file without changing it; blocking.

    Raises:
        sqlite3.OperationalError, OSError: it cannot be looked at.
    """
    if not path.exists() or path.stat().st_size == 0:
        return Judgement.EMPTY
    try:
        with closing(connect(path)) as connection:
            (application,) = connection.execute("PRAGMA application_id").fetchone()
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            tables = {sql for (sql,) in connection.execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL")}
            if application != APPLICATION_ID:
                return Judgement.FOREIGN if tables or application or version else Judgement.EMPTY
            if version != FORMAT:
                return Judgement.OTHER_FORMAT
            if tables != set(STATEMENTS):
                return Judgement.DAMAGED
    except sqlite3.DatabaseError as error:
        if is_of_the_medium(error):
            raise
        return Judgement.DAMAGED
    return Judgement.SOUND


def is_of_the_medium(error: Exception) -> bool:
    """It is the disk that fails, or somebody holds the file: another try may do. Else the file is not what it was."""
    if isinstance(error, OSError):
        return True
    primary = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_IOERR) & 0xFF
    return isinstance(error, sqlite3.OperationalError) and primary not in (sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT)


def set_aside(path: Path, why: str) -> Path:
    """Rename a file, its log with it, to a name that is free; its new name."""
    number = 0
    while (target := path.with_name(f"{path.name}.{why}-{number}")).exists():
        number += 1
    path.rename(target)
    for suffix in ("-wal", "-shm"):
        with suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(target.with_name(target.name + suffix))
    return target


class CatalogFile:
    """One connection that writes. Blocking; what fails raises sqlite3.Error or OSError and changes nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite gives the log the same mode
        self._connection = connect(path)
        try:
            self._connection.execute("PRAGMA secure_delete = ON")
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = NORMAL")
            if self._connection.execute("PRAGMA user_version").fetchone()[0] == 0:
                self._create()
            self._identity = _identity(path)
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        """Nothing more is written."""
        self._connection.close()

    @property
    def is_in_place(self) -> bool:
        """The file is still the one by that name: SQLite goes on writing into one that was deleted."""
        return _identity(self.path) == self._identity

    # --- writing ----------------------------------------------------------------------------

    def keep_folder(self, folder: FolderRow) -> None:
        """As it is now."""
        self._connection.execute(
            "INSERT OR REPLACE INTO folders VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                folder.number,
                folder.model_key,
                folder.name,
                *folder.shape,
                folder.last_used,
                folder.has_all_blocks,
                folder.wants_sweep,
            ),
        )

    def drop_folder(self, folder: int) -> None:
        """A folder with all its sessions and blocks."""
        with _Transaction(self._connection) as transaction:
            serials = self._connection.execute("SELECT serial FROM sessions WHERE folder = ?", (folder,)).fetchall()
            for (serial,) in serials:
                transaction.drop_session(serial)
            self._connection.execute("DELETE FROM blocks WHERE folder = ?", (folder,))
            self._connection.execute("DELETE FROM folders WHERE number = ?", (folder,))

    def replace_blocks(self, folder: int, blocks: Iterable[PlacedBlock]) -> None:
        """These are all the blocks that the folder has: read from the headers of its slots."""
        with _Transaction(self._connection):
            self._connection.execute("DELETE FROM blocks WHERE folder = ?", (folder,))
            self._connection.executemany("INSERT INTO blocks VALUES (?, ?, ?, ?, ?)", _placed(folder, blocks))
            self._connection.execute("UPDATE folders SET has_all_blocks = 1 WHERE number = ?", (folder,))

    def clear_slots(self, folder: int, slots: Iterable[int]) -> None:
        """Nothing is in these slots."""
        with _Transaction(self._connection):
            self._connection.executemany(
                "DELETE FROM blocks WHERE folder = ? AND slot = ?", ((folder, slot) for slot in slots)
            )

    def clear_from(self, folder: int, slot: int) -> None:
        """Nothing is in `slot` and those behind it."""
        with _Transaction(self._connection):
            self._connection.execute("DELETE FROM blocks WHERE folder = ? AND slot >= ?", (folder, slot))

    def expire(self, wall: float) -> int:
        """Drop branches whose time has come, and sessions left without one; how many branches those were."""
        with _Transaction(self._connection) as transaction:
            due = self._connection.execute(
                "SELECT branches.session, branches.branch, sessions.folder FROM branches"
                " JOIN sessions ON serial = session WHERE branches.last_active + branches.expire_seconds <= ?",
                (wall,),
            ).fetchall()
            for serial, branch, folder in due:
                transaction.drop_branch(serial, branch)
                transaction.want_sweep(folder)
            for (serial,) in self._connection.execute(
                "SELECT serial FROM sessions WHERE NOT EXISTS (SELECT 1 FROM branches WHERE session = serial)"
            ).fetchall():
                transaction.drop_session(serial)
        return len(due)

    def compact(self) -> None:
        """Give back what deleted rows have left free."""
        self._connection.execute("VACUUM")
        self.empty_log()

    def drop_sessions(self, serials: Iterable[int]) -> None:
        """These sessions, with what was said in them."""
        with _Transaction(self._connection) as transaction:
            for serial in serials:
                transaction.drop_session(serial, sweep=True)

    def swept(self, folder: int, wanted: int) -> None:
        """Nothing is left in the folder's slots that no session of it had when it wanted `wanted`."""
        self._connection.execute(SWEPT, (folder, wanted))

    def write(self, folder: int, batch: Batch) -> None:
        """All of `batch`, or nothing: sessions are `folder`'s."""
        with _Transaction(self._connection) as transaction:
            cleared = [place for place, block in batch.blocks.items() if block is None]
            self._connection.executemany("DELETE FROM blocks WHERE folder = ? AND slot = ?", cleared)
            for (place, _), block in batch.blocks.items():
                if block is not None:
                    self._connection.executemany(
                        "INSERT OR REPLACE INTO blocks VALUES (?, ?, ?, ?, ?)", _placed(place, (block,))
                    )
            self._connection.executemany(SWEPT, batch.sweeps.items())
            for serial, session in batch.sessions.items():
                if session is None:
                    transaction.drop_session(serial)
            for (serial, index), branch in batch.branches.items():
                if branch is None:
                    transaction.drop_branch(serial, index)
            for tenant, session_id in batch.ids:
                transaction.drop_ids(tenant, session_id)
            for session in batch.sessions.values():
                if session is not None:
                    transaction.keep_session(folder, session)
            for branch in batch.branches.values():
                if branch is not None:
                    transaction.keep_branch(branch)

    def empty_log(self) -> bool:
        """Move the log into the file and cut it to nothing; False while a reader needs it."""
        (busy, _, _) = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return not busy

    # --- within -----------------------------------------------------------------------------

    def _create(self) -> None:
        with _Transaction(self._connection):
            for statement in STATEMENTS:
                self._connection.execute(statement)
            self._connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            self._connection.execute(f"PRAGMA user_version = {FORMAT}")


class _Transaction:
    """What is done within is done whole or not at all. Histories that nobody has any more go at its end, so that
    within it one may leave a branch and come to another."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._left: set[bytes] = set()

    def __enter__(self) -> _Transaction:
        self._connection.execute("BEGIN IMMEDIATE")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._drop_histories()
                self._connection.execute("COMMIT")
        finally:
            if self._connection.in_transaction:
                with suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")

    def drop_session(self, serial: int, *, sweep: bool = False) -> None:
        branches = self._connection.execute("SELECT history FROM branches WHERE session = ?", (serial,))
        self._left.update(history for (history,) in branches)
        if sweep:
            self._connection.execute(
                f"{WANT_SWEEP} (SELECT folder FROM sessions WHERE serial = ?)",
                (serial,),
            )
        self._connection.execute("DELETE FROM branches WHERE session = ?", (serial,))
        self._connection.execute("DELETE FROM sessions WHERE serial = ?", (serial,))

    def drop_branch(self, serial: int, index: int) -> None:
        self._leave_history(serial, index)
        self._connection.execute("DELETE FROM branches WHERE session = ? AND branch = ?", (serial, index))

    def drop_ids(self, tenant: str, session_id: str | None) -> None:
        query, values = "SELECT serial FROM sessions WHERE tenant = ?", [pack_text(tenant)]
        if session_id is not None:
            query, values = f"{query} AND id = ?", [*values, pack_text(session_id)]
        for (serial,) in self._connection.execute(query, values).fetchall():
            self.drop_session(serial, sweep=True)

    def want_sweep(self, folder: int) -> None:
        self._connection.execute(f"{WANT_SWEEP} ?", (folder,))

    def keep_session(self, folder: int, row: SessionRow) -> None:
        tenant, session_id = pack_text(row.tenant), pack_text(row.id)
        # One that could no longer be read was left in the file; the id is this one's now.
        for (serial,) in self._connection.execute(
            "SELECT serial FROM sessions WHERE folder = ? AND tenant = ? AND id = ? AND serial != ?",
            (folder, tenant, session_id, row.serial),
        ).fetchall():
            self.drop_session(serial)
        parent = None if row.parent_id is None else pack_text(row.parent_id)
        group = None if row.group is None else pack_text(row.group)
        self._connection.execute(
            KEEP_SESSION,
            (
                *(row.serial, folder, tenant, session_id, parent, group, row.created, row.last_active, row.turns),
                *(row.next_branch, *_terms(row.terms), row.terms.persist.value),
            ),
        )

    def keep_branch(self, row: BranchRow) -> None:
        if not self._has("SELECT 1 FROM sessions WHERE serial = ?", row.serial):
            return  # it went while the branch waited to be written
        history = self._kept(row.history)
        if history is None:
            return
        self._leave_history(row.serial, row.branch)
        self._connection.execute(
            KEEP_BRANCH,
            (
                *(row.serial, row.branch, row.last_active, row.expected_return, row.turns, *_terms(row.terms)),
                *(row.history.num_tokens, history, b"".join(row.history.digests), row.keys),
            ),
        )

    def _kept(self, history: History | Unread) -> bytes | None:
        """The digest of a history that is here from now on; None for one that was to be here already and is not."""
        if isinstance(history, Unread):
            is_here = self._has("SELECT 1 FROM histories WHERE digest = ?", history.digest)
            return history.digest if is_here else None
        packed = pack_history(history)
        digest = packed.digest
        if not self._has("SELECT 1 FROM histories WHERE digest = ?", digest):
            self._connection.execute(HISTORY, (digest, *packed))
        return digest

    def _leave_history(self, serial: int, index: int) -> None:
        left = self._connection.execute(
            "SELECT history FROM branches WHERE session = ? AND branch = ?", (serial, index)
        )
        self._left.update(history for (history,) in left)

    def _has(self, query: str, value: int | bytes) -> bool:
        return self._connection.execute(query, (value,)).fetchone() is not None

    def _drop_histories(self) -> None:
        self._connection.executemany(
            "DELETE FROM histories WHERE digest = ? AND NOT EXISTS (SELECT 1 FROM branches WHERE history = digest)",
            ((history,) for history in self._left),
        )


def _terms(terms: Terms) -> tuple[int, float, bool, float | None]:
    return terms.priority, terms.keep_seconds, terms.pinned, terms.expire_seconds


def _placed(folder: int, blocks: Iterable[PlacedBlock]) -> Iterator[tuple[int, int, bytes, bytes | None, int]]:
    return ((folder, block.slot, block.key, block.parent, block.first_block) for block in blocks)


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
