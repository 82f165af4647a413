"""A catalog in a folder, with the journal that writes it, and what a test asks of both."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvstore import chain
from kvstore.block_journal import FolderBlocks
from kvstore.catalog import FILE_NAME, Catalog
from kvstore.catalog_rows import SlotShape, pack_history
from kvstore.clocks import Clocks
from kvstore.history import History, Seam, Unread
from kvstore.session import Branch, Session
from kvstore.session_journal import CatalogJournal
from kvstore.terms import USUAL, Terms

if TYPE_CHECKING:
    from pathlib import Path

    from app.disk import Disk
    from kvstore.catalog import Restored
    from kvstore.catalog_reading import ReadFault
    from kvstore.catalog_rows import BlockRow
    from kvstore.types import BlockKey

MODEL = b"m" * 16
SHAPE = SlotShape(4, 4096, "float32")
SPACE = chain.namespace(MODEL, "", None)
WAIT_SECONDS = 30.0


class Shelf:
    """One server's life with a catalog: open it again for the next. Clocks stand still unless moved."""

    def __init__(
        self,
        root: Path,
        *,
        model: bytes = MODEL,
        wall: float = 1_000_000.0,
        max_sessions: int = 1000,
        in_slots: Iterable[BlockRow] = (),
    ) -> None:
        self.root = root
        self.monotonic, self.wall = 500.0, wall
        self.disk: Disk | None = None  # for a server that is asked about it
        self.losses = 0
        self.catalog = Catalog.open(root / FILE_NAME, wall)
        self.folder = self.catalog.folder("tiny", model, SHAPE, wall)
        self.restored: Restored = self.catalog.restore(self.folder, self.clocks, max_sessions, lambda: in_slots)
        self.catalog.start(self.folder, self.restored.next_serial, self._on_lost)
        self.erased: list[int] = []
        self.blocks = FolderBlocks(self.catalog, self.folder, self._erase)
        self.journal = CatalogJournal(self.catalog, lambda: self.monotonic, lambda: self.wall)

    def _erase(self, slots: Iterable[int]) -> tuple[int, ...]:
        self.erased += slots
        return ()

    def _on_lost(self) -> None:
        self.losses += 1

    @property
    def clocks(self) -> Clocks:
        return Clocks(self.monotonic, self.wall)

    @property
    def sessions(self) -> dict[tuple[str, str], Session]:
        return {(session.tenant, session.id): session for session in self.restored.sessions}

    def settle(self) -> None:
        assert self.catalog.wait(WAIT_SECONDS), self.catalog.health

    def close(self) -> None:
        self.journal.close()
        self.blocks.close()
        assert self.catalog.close(WAIT_SECONDS)

    def read(self, branch: Branch) -> History | ReadFault:
        if isinstance(branch.history, History):
            return branch.history
        return self.catalog.read(branch.history)

    def holds(self, *needles: bytes) -> bool:
        """Is any of these in any file of the folder, log and all?"""
        contents = [path.read_bytes() for path in self.root.rglob("*") if path.is_file()]
        return any(needle in content for needle in needles for content in contents)


def history(text: str, token_ids: list[int], *, digests: tuple[bytes, ...] = (b"d" * 16,)) -> History:
    seams = (Seam(len(text), len(token_ids)),)
    return History(array("I", token_ids), text, seams, min(2, len(token_ids)), seams, digests)


def keys_of(token_ids: list[int]) -> list[BlockKey]:
    return chain.extend(None, array("I", token_ids[:-1]), 4, SPACE)


def session(
    serial: int, name: str, told: History, *, terms: Terms = USUAL, at: float = 400.0, tenant: str = ""
) -> Session:
    """With one branch, which has had a turn."""
    made = Session(tenant, name, serial, at, terms=terms, turns=1, last_active=at, next_branch=1)
    keys = chain.pack(keys_of(list(told.token_ids)))
    made.branches[0] = Branch(0, at, terms, told, keys, turns=1)
    return made


def pairs(*sessions: Session) -> list[tuple[Session, Branch]]:
    return [(each, branch) for each in sessions for branch in each.branches.values()]


def bytes_of(told: History) -> tuple[bytes, bytes]:
    """What of a history must not be found: its text and its ids."""
    packed = pack_history(told)
    return packed.text, packed.token_ids


def unread(branch: Branch) -> Unread:
    assert isinstance(branch.history, Unread)
    return branch.history
