"""What the catalog's file is to say and does not say yet (pure).

Not a queue of deeds but the latest word on each thing: a branch that took three turns while the disk was away is
written once, and what is pending does not grow past what there is, but for a number for each session that was
deleted since. It holds histories that the book of sessions holds anyway. A batch that could not be written comes
back, and fills in where nothing newer was said.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from kvstore.catalog_rows import BranchRow, PlacedBlock, SessionRow

K = TypeVar("K")
V = TypeVar("V")


@dataclass(slots=True)
class Batch:
    """Rows by what they are of; None: it is to be gone. Sessions by serial, branches by serial and index, blocks by
    folder and slot; `ids` are (tenant, id) to be gone in every folder before anything is kept, id None for all of a
    tenant. `sweeps` are folders that were swept, and how much they wanted it then."""

    sessions: dict[int, SessionRow | None] = field(default_factory=dict)
    branches: dict[tuple[int, int], BranchRow | None] = field(default_factory=dict)
    blocks: dict[tuple[int, int], PlacedBlock | None] = field(default_factory=dict)
    ids: dict[tuple[str, str | None], None] = field(default_factory=dict)
    sweeps: dict[int, int] = field(default_factory=dict)
    erases: bool = False  # of `blocks`, some whose very keys have to go

    def __len__(self) -> int:
        return len(self.sessions) + len(self.branches) + len(self.blocks) + len(self.ids) + len(self.sweeps)

    @property
    def removes(self) -> bool:
        """Something that a client said is to be gone."""
        return self.erases or bool(self.ids) or None in self.sessions.values() or None in self.branches.values()


class Pending:
    """See the module. `version` counts what was put."""

    def __init__(self, next_serial: int = 0) -> None:
        self.version = 0
        self._batch = Batch()
        self._highest_taken = next_serial - 1  # of a batch that failed, too: its commit may have come half way

    def __len__(self) -> int:
        return len(self._batch)

    def keep_session(self, row: SessionRow) -> None:
        """The session is this from now on."""
        self._batch.sessions[row.serial] = row
        self.version += 1

    def keep_branch(self, row: BranchRow) -> None:
        """The branch is this from now on; its session is kept with it."""
        self._batch.branches[row.serial, row.branch] = row
        self.version += 1

    def drop_session(self, serial: int) -> None:
        """The session is gone, its branches with it; a serial is never given again."""
        if serial > self._highest_taken:  # the file never heard of it
            self._batch.sessions.pop(serial, None)
        else:
            self._batch.sessions[serial] = None
        self.version += 1

    def drop_branch(self, serial: int, index: int) -> None:
        """The branch is gone."""
        if serial > self._highest_taken:
            self._batch.branches.pop((serial, index), None)
        else:
            self._batch.branches[serial, index] = None
        self.version += 1

    def drop_ids(self, tenant: str, session_id: str | None) -> None:
        """Sessions of that id that are in the file by now are gone, any model's; id None: all of the tenant's."""
        self._batch.ids[tenant, session_id] = None
        self.version += 1

    def place(self, folder: int, block: PlacedBlock) -> None:
        """The slot holds this block."""
        self._batch.blocks[folder, block.slot] = block
        self.version += 1

    def clear(self, folder: int, slot: int) -> None:
        """The slot holds nothing."""
        self._batch.blocks[folder, slot] = None
        self.version += 1

    def erase(self, folder: int, slot: int) -> None:
        """The slot holds nothing, and nothing is to tell what it held: a key tells whoever guesses the text."""
        self.clear(folder, slot)
        self._batch.erases = True

    def sweep(self, folder: int, wanted: int) -> None:
        """Nothing is left in the folder's slots that no session of it had when it wanted `wanted`."""
        self._batch.sweeps[folder] = wanted
        self.version += 1

    def take(self) -> Batch:
        """All of it, to be written."""
        taken, self._batch = self._batch, Batch()
        self._highest_taken = max(self._highest_taken, *taken.sessions, -1)
        return taken

    def give_back(self, taken: Batch) -> None:
        """It was not written."""
        newer = self._batch
        _fill_in(newer.sessions, taken.sessions)
        _fill_in(newer.branches, taken.branches)
        _fill_in(newer.blocks, taken.blocks)
        _fill_in(newer.ids, taken.ids)
        _fill_in(newer.sweeps, taken.sweeps)
        newer.erases = newer.erases or taken.erases


def _fill_in(newer: dict[K, V], older: dict[K, V]) -> None:
    for key, value in older.items():
        newer.setdefault(key, value)
