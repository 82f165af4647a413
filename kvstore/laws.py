"""The laws of the store, as assertions (pure). Linear in everything: for tests and `store verify`.

1. per tier, free + open + filling + valid + quarantined + erasing = capacity, and no slot has two uses;
2. a target slot is reserved before bytes move; a source is pinned until its transfer has ended;
3. every FILLING slot has one live transfer; every OPEN slot one owner;
4. what a granted turn attends to is VALID in HBM and pinned, or has a pinned descendant;
5. a late or overtaken target is quarantined until its transfer has ended, and no longer;
6. a row may leave iff VALID, not held and childless there; HBM is closed under prefixes;
7. pins are those of turns, wakes and transfers, and no others;
8. when nothing runs, nothing is pinned, open, filling, quarantined or coming;
9. what is known of branches, of what is dirty and of what is left in slots of NVMe fits the block table, and the
   catalogue is owed nothing: it has been told of every block that is VALID in NVMe, and of no other.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvstore.rows import NO_ROW
from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.hints import Hint
    from kvstore.pool import Pool
    from kvstore.roster import Roster
    from kvstore.store import Store
    from kvstore.transfers import Transfer
    from kvstore.turns import Turn
    from kvstore.wakes import Wake


def check(store: Store, roster: Roster, hints: Iterable[Hint]) -> None:
    """Raise AssertionError, saying what is wrong, unless every law holds."""
    live = list(store.blocks.rows)
    store.blocks.rows.check()
    for pool in store.blocks.pools:
        pool.check(live)
        _check_targets(store, pool, live)
    for transfer in store.traffic.transfers:
        _check_source(store, transfer)
    _check_prefix_closed(store, live)
    _check_counts(store)
    _check_nvme(store)
    roster.check()
    for turn in roster.admitted.values():
        _check_table(store, turn)
    hints = list(hints)
    wakes = [turn.wake for turn in roster.waking.values() if turn.wake is not None] + [hint.wake for hint in hints]
    _check_owners(store, roster, wakes, live)
    _check_pins(store, roster, wakes, live)
    if not roster.turns and not hints and not len(store.traffic.transfers):
        _check_idle(store)


def _check_counts(store: Store) -> None:
    coming = sum(len(t.source_slots) for t in store.traffic.transfers if t.frees_hbm and not t.late)
    assert store.traffic.coming == coming, f"{store.traffic.coming} slots are said to be coming, {coming} are"
    idle = store.blocks.cleaner.rows()
    assert all(map(store.blocks.hbm.is_valid, idle)), "the cleaner knows rows that are not in HBM"


def _check_nvme(store: Store) -> None:
    """Law 9; that the catalogue was told the right things is for whoever keeps one to compare (Planner.on_nvme)."""
    blocks = store.blocks
    blocks.tips.check()
    blocks.dirty.check()
    assert blocks.ledger.owes_nothing, "the catalogue has not been told everything"
    if blocks.has_tier(Tier.NVME):
        assert blocks.pools[Tier.NVME].is_free(blocks.ledger.left_in), "a slot in use counts as left over"
        held = [row for row in blocks.rows if blocks.rows.disk[row] == 0 and blocks.pools[Tier.NVME].is_valid(row)]
        assert all(blocks.rows.key(row) in blocks.revoked for row in held), "NVMe keeps what no branch lets lie there"


def _check_owners(store: Store, roster: Roster, wakes: list[Wake], live: list[int]) -> None:
    """Law 3: every OPEN slot has one owner."""
    waiting = {turn.tail for turn in roster.queue if turn.tail is not None}
    tails = {*store.tails, *waiting, *(wake.tail for wake in wakes if wake.tail is not None)}
    private = [t for t in store.traffic.transfers if t.owner is not None]
    for pool in store.blocks.pools:
        tier = pool.tier
        owned = [slot for tail in tails for slot in tail.slots_in(tier)]
        if tier is Tier.HBM:
            owned += [slot for turn in roster.admitted.values() for slot in turn.open.values()]
            owned += [slot for wake in wakes for slot in wake.reserve]
            owned += [slot for t in private if t.source is tier for slot in t.source_slots]  # a tail on its way down
        assert len(owned) == pool.num_open, f"{tier.name}: {pool.num_open} slots OPEN, {len(owned)} owned"
        filling = [slot for t in private if t.target is tier and not t.late for slot in t.target_slots]
        known = [*pool.known_slots(live), *owned, *filling]
        assert len(set(known)) == len(known), f"{tier.name}: an owned slot has a second use"


def _check_pins(store: Store, roster: Roster, wakes: list[Wake], live: list[int]) -> None:
    """Law 7: every pin is that of a turn, a wake or a transfer."""
    expected = Counter((Tier.HBM, turn.tip) for turn in roster.admitted.values() if turn.tip != NO_ROW)
    expected.update(pin for wake in wakes for pin in wake.pins())
    for transfer in store.traffic.transfers:
        if transfer.owner is None:
            last = transfer.rows[-1]
            expected.update([(transfer.source, last)] if not transfer.has_ended else [])
            expected.update([(transfer.target, last)] if not transfer.late else [])
    for pool in store.blocks.pools:
        for row in live:
            pins, wanted = pool.num_pins(row), expected[pool.tier, row]
            assert pins == wanted, f"{pool.tier.name}: row {row} has {pins} pins, not {wanted}"


def _check_table(store: Store, turn: Turn) -> None:
    """Law 4: the block table of a granted turn is its chain's slots and its OPEN ones."""
    row, in_rows = turn.tip, 0
    while row != NO_ROW:
        assert store.blocks.hbm.is_valid(row), f"turn {turn.id} attends to row {row}, which is not VALID"
        in_rows += store.blocks.rows.depth[row] not in turn.open
        row = store.blocks.rows.parent[row]
    total = in_rows + len(turn.open)
    assert total == turn.num_blocks, f"turn {turn.id} has {total} of {turn.num_blocks} blocks"


def _check_idle(store: Store) -> None:
    """Law 8: there is no turn, no hint and no transfer."""
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
