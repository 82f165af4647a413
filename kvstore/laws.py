"""The laws of the store, as assertions (pure). Linear in everything: for tests and `store verify`.

1. per tier, free + open + filling + valid + quarantined = capacity, and no slot has two uses;
2. a target slot is reserved before bytes move; a source is pinned until its transfer has ended;
3. every FILLING slot has one live transfer; every OPEN slot one owner;
4. what a granted turn attends to is VALID in HBM and pinned, or has a pinned descendant;
5. a late or overtaken target is quarantined until its transfer has ended, and no longer;
6. a row may leave iff VALID, not held and childless there; HBM is closed under prefixes;
7. pins are those of turns, wakes and transfers, and no others;
8. when nothing runs, nothing is pinned, open, filling, quarantined or coming.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvstore.rows import NO_ROW
from kvstore.transfers import Purpose, Transfer
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.pool import Pool
    from kvstore.store import Store
    from kvstore.turns import Turn


def check_tiers(store: Store) -> None:
    """Laws that need no knowledge of turns."""
    store.blocks.rows.check()
    live = list(store.blocks.rows)
    for pool in store.blocks.pools:
        pool.check(live)
        _check_targets(store, pool, live)
    for transfer in store.traffic.transfers:
        _check_source(store, transfer)
    _check_prefix_closed(store, live)
    moving = [t for t in store.traffic.transfers if t.purpose is Purpose.DEMOTE and t.source is Tier.HBM and not t.late]
    assert store.traffic.coming == sum(len(t.rows) for t in moving), (
        f"{store.traffic.coming} slots are said to be coming"
    )
    idle = store.blocks.cleaner.rows()
    assert all(store.blocks.hbm.is_valid(row) for row in idle), "the cleaner knows rows that are not in HBM"


def check_owners(store: Store, tier: Tier, owned: list[int], pins: Counter[int]) -> None:
    """The OPEN slots of `tier` are `owned`, and `pins` are all there are on its rows besides transfers'."""
    pool, live = store.blocks.pools[tier], list(store.blocks.rows)
    owned = owned + [slot for t in store.traffic.transfers if t.owner is not None for slot in _open_sources(t, tier)]
    assert len(owned) == pool.num_open, f"{tier.name}: {pool.num_open} slots OPEN, {len(owned)} owned"
    private = [slot for t in store.traffic.transfers if t.owner is not None for slot in _filling_targets(t, tier)]
    known = [*pool.known_slots(live), *owned, *private]
    assert len(set(known)) == len(known), f"{tier.name}: an owned slot has a second use"
    expected = Counter(pins)
    for transfer in store.traffic.transfers:
        if transfer.owner is None:
            expected[transfer.rows[-1]] += transfer.source is tier and not transfer.has_ended
            expected[transfer.rows[-1]] += transfer.target is tier and not transfer.late
    for row in live:
        assert pool.num_pins((row,)) == expected[row], f"{tier.name}: row {row} has {pool.num_pins((row,))} pins"


def check_table(store: Store, turn: Turn) -> None:
    """The block table of a granted turn is its chain's slots and its OPEN ones."""
    row, in_rows = turn.tip, 0
    while row != NO_ROW:
        assert store.blocks.hbm.is_valid(row), f"turn {turn.id} attends to row {row}, which is not VALID"
        in_rows += store.blocks.rows.depth[row] not in turn.open
        row = store.blocks.rows.parent[row]
    total = in_rows + len(turn.open)
    assert total == turn.num_blocks, f"turn {turn.id} has {total} of {turn.num_blocks} blocks"


def check_idle(store: Store) -> None:
    """What must hold when there is no turn, no hint and no transfer."""
    for pool in store.blocks.pools:
        busy = pool.num_open + pool.num_filling + pool.num_held + len(pool.quarantined)
        assert busy == 0, f"{pool.tier.name}: nothing runs, and {busy} slots are not free or evictable"


def _check_targets(store: Store, pool: Pool, live: Iterable[int]) -> None:
    name = pool.tier.name
    awaited: dict[int, int] = {}
    quarantined: list[int] = []
    num_private = 0
    for transfer in store.traffic.transfers:
        if transfer.target is not pool.tier:
            continue
        if transfer.late:
            assert not transfer.has_ended, f"transfer {transfer.id} ended late and is still known"
            quarantined += transfer.target_slots
        elif transfer.owner is not None:
            num_private += len(transfer.target_slots)
        else:
            for row, slot in zip(transfer.rows, transfer.target_slots, strict=True):
                if pool.slot(row) == slot:
                    assert row not in awaited, f"{name}: row {row} is the target of two transfers"
                    awaited[row] = slot
                else:
                    quarantined.append(slot)
    filling = {row for row in live if pool.is_filling(row)}
    assert filling == awaited.keys(), f"{name}: rows {filling} are FILLING, transfers bring {awaited.keys()}"
    assert pool.num_filling == len(filling) + num_private, f"{name}: FILLING slots are miscounted"
    assert sorted(quarantined) == sorted(pool.quarantined), f"{name}: quarantine holds {pool.quarantined}"


def _check_source(store: Store, transfer: Transfer) -> None:
    if transfer.owner is not None or transfer.has_ended:
        return
    source = store.blocks.pools[transfer.source]
    for row, slot in zip(transfer.rows, transfer.source_slots, strict=True):
        assert source.is_valid(row), f"transfer {transfer.id} reads row {row}, which is not VALID"
        assert source.slot(row) == slot, f"transfer {transfer.id} reads a slot that is not row {row}'s any more"
        assert source.is_held(row), f"transfer {transfer.id} reads row {row}, which may leave"


def _check_prefix_closed(store: Store, live: Iterable[int]) -> None:
    hbm = store.blocks.hbm
    for row in live:
        parent = store.blocks.rows.parent[row]
        if parent == NO_ROW:
            continue
        if hbm.is_valid(row):
            assert hbm.is_valid(parent), f"row {row} is VALID in HBM and its parent {parent} is not"
        elif hbm.is_filling(row):
            assert hbm.is_present(parent), f"row {row} is FILLING in HBM and its parent {parent} is absent"


def _open_sources(transfer: Transfer, tier: Tier) -> list[int]:
    """A tail on its way down still lies in OPEN slots of HBM; on its way up its DRAM slots are the tail's own."""
    return transfer.source_slots if transfer.source is tier is Tier.HBM else []


def _filling_targets(transfer: Transfer, tier: Tier) -> list[int]:
    return transfer.target_slots if transfer.target is tier and not transfer.late else []
