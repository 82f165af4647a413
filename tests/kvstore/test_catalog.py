"""The catalog: what comes back after a restart, what never reaches a file, what a disk may do."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import textwrap
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path

import pytest

from kvstore import chain
from kvstore.block_journal import note_swept
from kvstore.catalog import FILE_NAME, Catalog
from kvstore.catalog_file import FORMAT, FolderRow
from kvstore.catalog_pending import Pending
from kvstore.catalog_reading import ReadFault
from kvstore.catalog_rows import BlockRow, SessionRow
from kvstore.errors import SettingInvalid
from kvstore.events import TierHealth
from kvstore.history import History, Reply, Told
from kvstore.reuse import MissReason
from kvstore.terms import USUAL, Persist, Terms
from kvstore.types import BlockKey
from tests.kvstore.shelf import MODEL, WAIT_SECONDS, Shelf, bytes_of, history, keys_of, pairs, session, unread

ROOT = Path(__file__).parent.parent.parent
ODD = "lone \ud800, nul \0, dormouse \U0001f42d, e\u0301"
TOLD = history("what was said", [911, 42, 40_000, 7, 3, 18_003, 5, 77, 1204])


def block(slot: int, token_ids: list[int], index: int) -> BlockRow:
    keys = keys_of(token_ids)
    return BlockRow(slot, keys[index], keys[index - 1] if index else None, index)


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "little"))


# --- restart ------------------------------------------------------------------------------


def test_a_session_comes_back_whole_and_its_history_when_it_is_asked_for(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    terms = Terms(-3, 60.0, True, 1e6, Persist.DISK)
    plain = history(ODD, [0, 1, 2**32 - 1, 7, 8, 9], digests=(b"a" * 16, b"b" * 16))
    reply = Reply("resp_b", 1.5, "resp_a", '["\\u00e9"]', 6, b"i" * 16, ("tools",))
    told = replace(plain, told=Told(3, b"t" * 16, 2**33, b"p" * 16, 17), replies=(reply,))
    # A field that is added to histories and not to the catalog would be at its default here.
    assert [each.name for each in fields(History) if getattr(told, each.name) in (0, (), None)] == []
    made = session(4, f"id {ODD}", told, terms=terms, at=450.0, tenant=f"tenant\0{ODD}")
    made.parent_id, made.group = ODD, "group"
    made.branches[0].expected_return = 700.0
    shelf.journal.keep(made, made.branches.values())
    shelf.close()

    again = Shelf(tmp_path, wall=1_000_100.0)
    (found,) = again.restored.sessions
    (branch,) = found.branches.values()
    assert (found.tenant, found.id, found.serial) == (made.tenant, made.id, 4)
    assert (found.parent_id, found.group, found.terms, found.turns) == (ODD, "group", terms, 1)
    assert (found.next_branch, found.is_busy, again.restored.next_serial) == (1, False, 5)
    assert (branch.terms, branch.turns, branch.keys, branch.tip) == (
        terms,
        1,
        made.branches[0].keys,
        keys_of([*told.token_ids])[-1],
    )
    # A hundred seconds went by on the wall while nobody served.
    assert (found.created, found.last_active, branch.last_active) == pytest.approx((350.0, 350.0, 350.0))
    assert branch.expected_return == pytest.approx(600.0)
    assert (branch.num_tokens, branch.kv_tokens, branch.history.digests) == (6, 5, told.digests)
    assert unread(branch).num_tokens == 6
    assert again.read(branch) == told
    again.close()


def test_the_files_are_their_owners_alone(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    shelf.journal.keep(made := session(0, "s", TOLD), made.branches.values())
    shelf.settle()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {FILE_NAME: 0o600, f"{FILE_NAME}-wal": 0o600, f"{FILE_NAME}-shm": 0o600}
    shelf.close()


def test_the_latest_turn_is_what_comes_back(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    made = session(0, "s", TOLD)
    shelf.journal.keep(made, made.branches.values())
    shelf.settle()
    longer = history("what was said and more", [*TOLD.token_ids, 10, 11, 12, 13])
    made.branches[0].history, made.branches[0].turns = longer, 2
    shelf.journal.keep(made, made.branches.values())
    shelf.close()
    again = Shelf(tmp_path)
    (branch,) = again.sessions["", "s"].branches.values()
    assert (branch.turns, again.read(branch)) == (2, longer)
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
        assert connection.execute("SELECT count(*) FROM histories").fetchone() == (1,)
    again.close()


def test_forks_share_one_history_until_the_last_of_them_goes(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    forks = [session(number, f"fork-{number}", TOLD) for number in range(20)]
    for fork in forks:
        shelf.journal.keep(fork, fork.branches.values())
    shelf.settle()
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
        assert connection.execute("SELECT count(*) FROM histories").fetchone() == (1,)
    shelf.journal.drop(pairs(*forks[:19]))
    shelf.settle()
    assert shelf.holds(*bytes_of(TOLD))
    shelf.journal.drop(pairs(forks[19]))
    shelf.settle()
    assert not shelf.holds(*bytes_of(TOLD), b"fork-")
    shelf.close()


def test_an_unread_history_may_be_forked_and_its_first_owner_go_in_the_same_breath(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    made = session(0, "s", TOLD)
    shelf.journal.keep(made, made.branches.values())
    shelf.close()
    again = Shelf(tmp_path)
    source = again.sessions["", "s"]
    fork = replace(source, id="t", serial=1, branches={0: replace(source.branches[0])})
    heir = session(2, "s", history("the id again", [5, 6, 7]))
    again.journal.keep(fork, fork.branches.values())
    source.is_forgotten = True
    again.journal.drop(pairs(source))
    again.journal.keep(heir, heir.branches.values())
    again.close()
    third = Shelf(tmp_path)
    assert {name: third.read(each.branches[0]) for (_, name), each in third.sessions.items()} == {
        "t": TOLD,
        "s": heir.branches[0].history,
    }
    third.close()


def test_more_sessions_than_may_be_are_dropped_from_the_oldest(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    for number in (3, 1, 2, 0):
        made = session(number, f"s{number}", TOLD, at=400.0 + number)
        shelf.journal.keep(made, made.branches.values())
    shelf.close()
    again = Shelf(tmp_path, max_sessions=2)
    assert {name for _, name in again.sessions} == {"s2", "s3"}
    again.close()
    third = Shelf(tmp_path)
    assert len(third.sessions) == 2
    third.close()


# --- what may not be there ----------------------------------------------------------------


@pytest.mark.parametrize("persist", [Persist.MEMORY, Persist.NONE])
def test_what_is_not_to_be_on_disk_never_is(tmp_path: Path, persist: Persist) -> None:
    shelf = Shelf(tmp_path)
    secret = session(0, "secret-id", TOLD, terms=Terms(persist=persist))
    shelf.journal.keep(secret, secret.branches.values())
    shelf.settle()
    assert not shelf.holds(*bytes_of(TOLD), b"secret-id")
    beside = session(1, "both", history("may be kept", [9, 9, 9]))
    beside.branches[1] = replace(secret.branches[0], index=1)
    shelf.journal.keep(beside, beside.branches.values())
    shelf.settle()
    assert not shelf.holds(*bytes_of(TOLD))
    assert shelf.holds(b"may be kept")
    shelf.close()
    again = Shelf(tmp_path)
    assert [*again.sessions["", "both"].branches] == [0]
    again.close()


def test_a_branch_that_turns_private_leaves_the_disk(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    made = session(0, "private-id", TOLD)
    shelf.journal.keep(made, made.branches.values())
    shelf.settle()
    assert shelf.holds(*bytes_of(TOLD))
    made.branches[0].terms = Terms(persist=Persist.MEMORY)
    shelf.journal.keep(made, made.branches.values())
    shelf.settle()
    assert not shelf.holds(*bytes_of(TOLD), b"private-id")
    shelf.close()


def test_of_many_deleted_sessions_no_byte_is_left_and_the_others_are_as_they_were(tmp_path: Path) -> None:
    rng = random.Random(4)
    shelf = Shelf(tmp_path)
    made = []
    for serial in range(60):  # from a line to many pages
        length = rng.choice((3, 40, 400, 4000))
        ids = [rng.randrange(2**32) for _ in range(length)]
        made.append(session(serial, f"name-{serial:03}", history(f"<{serial:03}>" + "text" * length, ids)))
        shelf.journal.keep(made[-1], made[-1].branches.values())
        if serial % 7 == 0:
            shelf.settle()
    gone, kept = made[::2], made[1::2]
    for each in gone:
        each.is_forgotten = True
        shelf.journal.drop(pairs(each))
    shelf.settle()
    for each in gone:
        told = each.branches[0].history
        assert isinstance(told, History)
        needles = (told.token_ids[:3].tobytes(), told.token_ids[-3:].tobytes(), f"<{each.serial:03}>".encode())
        assert not shelf.holds(*needles, each.id.encode())
    shelf.close()
    again = Shelf(tmp_path)
    assert {each.id: again.read(each.branches[0]) for each in again.restored.sessions} == {
        each.id: each.branches[0].history for each in kept
    }
    again.close()


def test_what_expired_while_nobody_served_is_gone_with_its_bytes(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    made = session(0, "s", TOLD, terms=Terms(expire_seconds=50.0), at=500.0)
    stays = history("stays", [4, 4, 4])
    made.branches[1] = replace(made.branches[0], index=1, history=stays, keys=b"", terms=USUAL)
    only = session(1, "only", TOLD, terms=Terms(expire_seconds=50.0), at=500.0)
    for each in (made, only):
        shelf.journal.keep(each, each.branches.values())
    shelf.blocks.record([block(7, [*TOLD.token_ids], 0), block(3, [*TOLD.token_ids], 1)])
    shelf.close()
    in_time = Shelf(tmp_path, wall=1_000_049.0)
    assert in_time.restored.unclaimed == []
    in_time.close()
    late = Shelf(tmp_path, wall=1_000_050.0)
    assert {name: [*each.branches] for (_, name), each in late.sessions.items()} == {"s": [1]}
    assert not late.holds(*bytes_of(TOLD), b"only")
    assert sorted(late.restored.unclaimed) == [3, 7]
    late.close()


def test_a_wall_clock_that_was_set_back_makes_nothing_older_and_loses_nothing(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    made = session(0, "s", TOLD, terms=Terms(expire_seconds=50.0), at=490.0)
    shelf.journal.keep(made, made.branches.values())
    shelf.close()
    again = Shelf(tmp_path, wall=5.0)
    (found,) = again.restored.sessions
    assert (found.created, found.last_active, found.branches[0].last_active) == (500.0, 500.0, 500.0)
    again.close()


# --- blocks -------------------------------------------------------------------------------


def test_blocks_come_back_with_when_their_latest_branch_was_active(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    long, short = [*range(1, 18)], [*range(1, 10)]  # the second ends inside the first
    early = session(0, "early", history("long", long), at=100.0)
    late = session(1, "late", history("short", short), at=300.0)
    for each in (early, late):
        shelf.journal.keep(each, each.branches.values())
    shelf.blocks.record([block(slot, long, index) for slot, index in ((5, 0), (2, 1), (9, 2))])
    shelf.close()
    again = Shelf(tmp_path)
    rows = {slot: (key, parent, first, last) for key, parent, first, slot, last in again.restored.blocks.rows()}
    keys = keys_of(long)
    assert rows == {5: (keys[0], None, 0, 300.0), 2: (keys[1], keys[0], 1, 300.0), 9: (keys[2], keys[1], 2, 100.0)}
    written = {name: each.branches[0].written_blocks for (_, name), each in again.sessions.items()}
    assert written == {"early": 3, "late": 2}  # of four and of two
    again.close()


def test_only_what_is_there_from_the_first_block_on_counts_as_written(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    ids = [*range(1, 18)]
    made = session(0, "s", history("x", ids))
    shelf.journal.keep(made, made.branches.values())
    shelf.blocks.record([block(0, ids, 0), block(1, ids, 3)])
    shelf.close()
    again = Shelf(tmp_path)
    assert again.sessions["", "s"].branches[0].written_blocks == 1
    again.close()


def test_a_slot_holds_what_was_recorded_last_and_nothing_once_it_was_forgotten(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    shelf.blocks.record([BlockRow(0, key(1), None, 0), BlockRow(1, key(2), key(1), 1), BlockRow(2, key(3), None, 0)])
    shelf.settle()
    shelf.blocks.forget([0, 1])
    shelf.blocks.record([BlockRow(1, key(9), None, 0)])
    shelf.close()
    again = Shelf(tmp_path)
    assert {slot: key for key, _, _, slot, _ in again.restored.blocks.rows()} == {1: key(9), 2: key(3)}
    assert sorted(again.restored.unclaimed) == [1, 2]  # no session has them
    again.catalog.put(lambda pending: pending.clear(again.folder.number, 1))
    again.close()
    third = Shelf(tmp_path)
    assert third.restored.unclaimed == [2]
    third.close()


def test_a_block_in_two_slots_is_one_and_the_other_slot_is_to_be_erased(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    made = session(0, "s", TOLD)
    shelf.journal.keep(made, made.branches.values())
    shelf.blocks.record([block(0, [*TOLD.token_ids], 0), block(4, [*TOLD.token_ids], 0)])
    shelf.close()
    again = Shelf(tmp_path)
    assert again.restored.unclaimed == [4]
    again.close()


# --- other models -------------------------------------------------------------------------


def test_sessions_of_another_model_stay_as_they_are_and_go_only_when_their_id_is_deleted(tmp_path: Path) -> None:
    first = Shelf(tmp_path)
    for serial, name in enumerate(("shared", "kept")):
        made = session(serial, name, TOLD if name == "shared" else history("stays", [7, 7, 7]))
        first.journal.keep(made, made.branches.values())
    first.blocks.record([block(slot, [*TOLD.token_ids], slot) for slot in (0, 1)])
    first.close()

    second = Shelf(tmp_path, model=b"n" * 16)
    assert (second.restored.sessions, len(second.restored.blocks), second.restored.next_serial) == ([], 0, 2)
    assert set(second.restored.others) == {("", "shared", 0), ("", "kept", 1)}
    made = session(2, "shared", history("in other tokens", [3, 1, 4]))
    second.journal.keep(made, made.branches.values())
    second.settle()
    assert second.holds(*bytes_of(TOLD))
    second.journal.drop(pairs(made))
    second.journal.drop_ids("", "shared")
    second.settle()
    assert not second.holds(*bytes_of(TOLD), b"shared")
    second.close()

    third = Shelf(tmp_path)
    assert set(third.sessions) == {("", "kept")}
    assert sorted(third.restored.unclaimed) == [0, 1]
    third.close()


def test_a_folder_says_that_it_wants_a_sweep_and_which_slots(tmp_path: Path) -> None:
    first = Shelf(tmp_path)
    made = session(0, "s", TOLD)
    first.journal.keep(made, made.branches.values())
    first.blocks.record([block(slot, [*TOLD.token_ids], slot) for slot in (0, 1)])
    first.close()
    second = Shelf(tmp_path, model=b"n" * 16)
    second.journal.drop_ids("", None)
    second.close()
    catalog = Catalog.open(tmp_path / FILE_NAME, 0.0)
    (folder,) = [each for each in catalog.folders() if each.model_key == MODEL]
    assert folder.wants_sweep
    slots = catalog.unclaimed(folder)
    assert sorted(slots) == [0, 1]
    catalog.swept(folder, slots)
    (folder,) = [each for each in catalog.folders() if each.model_key == MODEL]
    assert (folder.wants_sweep, catalog.unclaimed(folder)) == (0, [])
    catalog.close(WAIT_SECONDS)


# --- files that are not what they were ----------------------------------------------------


def filled(root: Path) -> None:
    shelf = Shelf(root)
    for serial in range(30):
        made = session(serial, f"s{serial}", history(f"text {serial}", [serial, *range(400)]))
        shelf.journal.keep(made, made.branches.values())
    shelf.close()


def other_version(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {FORMAT + 1}")


def another_program(path: Path) -> None:
    path.unlink()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE photos (name TEXT)")


def garbage(path: Path) -> None:
    path.write_bytes(random.Random(1).randbytes(50_000))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def header_gone(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(100))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (other_version, MissReason.STORE_FORMAT),
        (another_program, MissReason.CATALOG_LOST),
        (garbage, MissReason.CATALOG_LOST),
        (cut, MissReason.CATALOG_LOST),
        (header_gone, MissReason.CATALOG_LOST),
    ],
)
def test_a_file_that_cannot_be_used_is_set_aside_and_another_begun(
    tmp_path: Path, spoil: object, reason: MissReason
) -> None:
    filled(tmp_path)
    assert callable(spoil)
    spoil(tmp_path / FILE_NAME)
    before = (tmp_path / FILE_NAME).read_bytes()
    shelf = Shelf(tmp_path)
    assert shelf.catalog.loss is not None
    assert shelf.catalog.loss.reason is reason
    kept_as = shelf.catalog.loss.kept_as
    assert kept_as is not None
    assert kept_as.stat().st_size == len(before)
    assert (shelf.restored.sessions, shelf.restored.next_serial) == ([], 0)
    made = session(0, "new", TOLD)
    shelf.journal.keep(made, made.branches.values())
    shelf.close()
    again = Shelf(tmp_path)
    assert again.catalog.loss is None
    assert set(again.sessions) == {("", "new")}
    again.close()


def test_an_empty_directory_has_lost_nothing_but_one_with_slabs_has(tmp_path: Path) -> None:
    fresh = Shelf(tmp_path)
    assert fresh.catalog.loss is None
    fresh.close()
    (tmp_path / FILE_NAME).unlink()
    slab = tmp_path / "tiny-6d6d6d6d6d6d" / "slabs" / "0000.kv"
    slab.parent.mkdir(parents=True)
    slab.touch()
    robbed = Shelf(tmp_path)
    assert robbed.catalog.loss is not None
    assert (robbed.catalog.loss.reason, robbed.catalog.loss.kept_as) == (MissReason.CATALOG_LOST, None)
    robbed.close()


def test_blocks_read_from_headers_are_kept_for_one_life_without_anybody_who_claims_them(tmp_path: Path) -> None:
    in_slots = [block(3, [*TOLD.token_ids], 0), block(4, [*TOLD.token_ids], 1)]
    shelf = Shelf(tmp_path, in_slots=in_slots)
    assert (sorted(shelf.restored.blocks.slots), shelf.restored.unclaimed) == ([3, 4], [])
    shelf.close()
    again = Shelf(tmp_path, in_slots=[block(9, [*TOLD.token_ids], 0)])  # not asked for: the catalog has them all
    assert sorted(again.restored.blocks.slots) == sorted(again.restored.unclaimed) == [3, 4]
    again.close()


def test_what_a_crash_left_in_the_log_of_a_deleted_session_goes_at_the_next_start(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    made = session(0, "s", TOLD)
    shelf.journal.keep(made, made.branches.values())
    shelf.settle()
    crashed = tmp_path / "copy"
    shutil.copytree(tmp_path, crashed)
    with closing(sqlite3.connect(crashed / FILE_NAME)) as connection:
        connection.execute("PRAGMA secure_delete = ON")
        for table in ("sessions", "branches", "histories"):
            connection.execute(f"DELETE FROM {table}")
        connection.commit()
        shutil.copytree(crashed, tmp_path / "dead")
    shelf.close()
    assert any(needle in path.read_bytes() for path in (tmp_path / "dead").iterdir() for needle in bytes_of(TOLD))
    again = Shelf(tmp_path / "dead")
    assert not again.holds(*bytes_of(TOLD))
    again.close()


@pytest.mark.parametrize("seed", range(12))
def test_flipped_bytes_lose_sessions_or_histories_but_never_change_one(tmp_path: Path, seed: int) -> None:
    filled(tmp_path)
    rng = random.Random(seed)
    path = tmp_path / FILE_NAME
    content = bytearray(path.read_bytes())
    for _ in range(1 + seed * 4):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    shelf = Shelf(tmp_path)
    for found in shelf.restored.sessions:
        for branch in found.branches.values():
            told = shelf.read(branch)
            if isinstance(told, History):
                serial = told.token_ids[0]
                assert replace(told, digests=()) == history(f"text {serial}", [serial, *range(400)], digests=())
    shelf.close()


def test_a_history_that_is_not_there_is_lost(tmp_path: Path) -> None:
    filled(tmp_path)
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
        connection.execute("DELETE FROM histories")
        connection.commit()
    shelf = Shelf(tmp_path)
    assert shelf.read(shelf.restored.sessions[0].branches[0]) is ReadFault.LOST
    shelf.close()


# --- what a disk may do while it runs -----------------------------------------------------


def test_a_directory_that_is_deleted_and_comes_back_is_written_anew(tmp_path: Path) -> None:
    root = tmp_path / "nvme"
    root.mkdir()
    shelf = Shelf(root)
    made = [session(serial, f"s{serial}", TOLD) for serial in range(3)]
    shelf.journal.keep(made[0], made[0].branches.values())
    shelf.settle()
    shutil.rmtree(root)
    shelf.journal.keep(made[1], made[1].branches.values())
    assert not shelf.catalog.wait(0.3)
    health = shelf.catalog.health
    assert health.state is not TierHealth.OK
    assert "No such file" in health.reason
    assert health.faults > 0
    assert health.pending > 0
    root.mkdir()
    shelf.settle()
    assert shelf.losses == 1
    for each in made:  # as whoever is told of the loss does
        shelf.journal.keep(each, each.branches.values())
    shelf.settle()
    assert (shelf.catalog.health.state, shelf.catalog.health.pending) == (TierHealth.OK, 0)
    shelf.close()
    again = Shelf(root)
    assert {name for _, name in again.sessions} == {"s0", "s1", "s2"}
    again.close()


def test_a_file_that_is_damaged_while_it_runs_is_set_aside_and_written_anew(tmp_path: Path) -> None:
    filled(tmp_path)
    shelf = Shelf(tmp_path)
    path = tmp_path / FILE_NAME
    made = session(90, "new", TOLD)
    shelf.journal.keep(made, made.branches.values())
    shelf.settle()
    with path.open("r+b") as file:  # every page, as a disk that forgot all
        file.write(b"\xff" * path.stat().st_size)
    path.with_name(f"{FILE_NAME}-wal").write_bytes(b"")
    shelf.journal.drop(pairs(*shelf.restored.sessions))
    shelf.journal.keep(other := session(91, "other", TOLD), other.branches.values())
    shelf.settle()
    assert shelf.losses >= 1
    assert list(tmp_path.glob(f"{FILE_NAME}.*"))
    shelf.close()
    again = Shelf(tmp_path)
    assert ("", "other") in again.sessions
    again.close()


def test_a_full_disk_is_told_and_what_it_refused_is_written_when_there_is_room(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    shelf.settle()
    # A limit of the size of files: SQLite meets it as a disk that is full.
    import resource

    big = history("x" * 400_000, [*range(1000)])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        made = session(0, "s", big)
        shelf.journal.keep(made, made.branches.values())
        assert not shelf.catalog.wait(0.3)
        health = shelf.catalog.health
        assert health.state is not TierHealth.OK
        assert health.reason
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    shelf.settle()
    assert shelf.catalog.health.state is TierHealth.OK
    assert shelf.losses == 0
    shelf.close()
    again = Shelf(tmp_path)
    assert again.read(again.sessions["", "s"].branches[0]) == big
    again.close()


def test_a_catalog_that_cannot_be_had_stops_the_start_and_names_the_flag(tmp_path: Path) -> None:
    with pytest.raises(SettingInvalid, match="--nvme-dir"):
        Catalog.open(tmp_path / "not there" / FILE_NAME, 0.0)


KEEPS_UNTIL_KILLED = """
import sys
from pathlib import Path
from tests.kvstore.shelf import Shelf, history, pairs, session

shelf = Shelf(Path(sys.argv[1]))
serial = shelf.restored.next_serial
before = []
while True:
    told = history(f"text {serial} " + "x" * (serial % 5 * 5000), [serial, *range(serial % 3 * 300)])
    before.append(session(serial, f"s{serial}", told))
    shelf.journal.keep(before[-1], before[-1].branches.values())
    if serial % 4 == 3:
        shelf.settle()
        print("kept", serial, flush=True)
    if serial % 16 == 15:
        gone = before.pop(0)
        gone.is_forgotten = True
        shelf.journal.drop(pairs(gone))
        shelf.settle()
        print("gone", gone.serial, flush=True)
    serial += 1
"""


def test_a_process_that_is_killed_loses_nothing_that_was_committed(tmp_path: Path) -> None:
    rng = random.Random(8)
    kept: set[int] = set()
    gone: set[int] = set()
    for _ in range(5):
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(KEEPS_UNTIL_KILLED), str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert child.stdout is not None
        for _ in range(rng.randrange(3, 40)):
            what, serial = child.stdout.readline().split()
            (kept if what == "kept" else gone).add(int(serial))
        child.send_signal(signal.SIGKILL)
        for line in child.communicate()[0].splitlines():
            what, serial = line.split()
            (kept if what == "kept" else gone).add(int(serial))
        shelf = Shelf(tmp_path)
        assert shelf.catalog.loss is None
        found = {each.serial: each for each in shelf.restored.sessions}
        assert kept - gone <= set(found)
        assert not gone & set(found)
        for number, each in found.items():
            told = shelf.read(each.branches[0])
            assert isinstance(told, History)
            assert (told.token_ids[0], told.text.split()[:2]) == (number, ["text", str(number)])
        shelf.close()


# --- a hundred thousand -------------------------------------------------------------------


def test_a_hundred_thousand_sessions_are_listed_without_their_histories(tmp_path: Path) -> None:
    Shelf(tmp_path).close()
    count = 100_000
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:  # by hand: what is tested is reading them
        digest = b"h" * 16
        connection.execute("INSERT INTO histories VALUES (1, ?, 0, x'', x'', x'', x'', x'', x'')", (digest,))
        connection.executemany(
            "INSERT INTO sessions VALUES (?, 1, x'', ?, NULL, NULL, 1.0, 2.0, 1, 1, 0, 0.0, 0, NULL, 'disk')",
            ((serial, f"s{serial}".encode()) for serial in range(count)),
        )
        connection.executemany(
            "INSERT INTO branches VALUES (NULL, ?, 0, 2.0, NULL, 1, 0, 0.0, 0, NULL, 600, ?, ?, ?)",
            ((serial, digest, b"d" * 48, b"k" * 288) for serial in range(count)),
        )
        connection.commit()
    shelf = Shelf(tmp_path, max_sessions=count)
    assert len(shelf.restored.sessions) == count
    branch = shelf.restored.sessions[-1].branches[0]
    assert (branch.num_tokens, len(branch.block_keys), len(branch.history.digests)) == (600, 18, 3)
    shelf.close()


# --- what is pending ----------------------------------------------------------------------


def row(serial: int) -> SessionRow:
    return SessionRow(serial, "", f"s{serial}", None, None, 0.0, 0.0, 1, 1, USUAL)


def test_a_sweep_counts_for_what_had_gone_when_it_began_and_no_more(tmp_path: Path) -> None:
    first = Shelf(tmp_path)
    for serial, name in enumerate(("a", "b")):
        made = session(serial, name, TOLD)
        first.journal.keep(made, made.branches.values())
    first.close()
    second = Shelf(tmp_path, model=b"n" * 16)

    def other() -> FolderRow:
        second.settle()
        return next(each for each in second.catalog.folders() if each.model_key == MODEL)

    second.journal.drop_ids("", "a")
    seen = other()
    second.journal.drop_ids("", "b")
    second.settle()
    note_swept(second.catalog, seen, ())
    assert other().wants_sweep == 2  # b went after it had looked
    note_swept(second.catalog, other(), ())
    assert other().wants_sweep == 0
    second.close()


def test_sessions_that_come_and_go_while_the_disk_is_away_leave_nothing_pending() -> None:
    pending = Pending(next_serial=10)
    for serial in range(10, 5000):
        pending.keep_session(row(serial))
        pending.drop_branch(serial, 0)
        pending.drop_session(serial)
    assert len(pending) == 0
    pending.drop_session(3)  # the file has it
    assert pending.take().sessions == {3: None}


def test_a_batch_that_comes_back_fills_in_where_nothing_newer_was_said() -> None:
    pending = Pending()
    pending.keep_session(row(0))
    pending.keep_session(row(1))
    taken = pending.take()
    newer = replace_row(row(1))
    pending.keep_session(newer)
    pending.give_back(taken)
    assert pending.take().sessions == {1: newer, 0: row(0)}


def replace_row(old: SessionRow) -> SessionRow:
    return old._replace(turns=old.turns + 1)


def test_what_was_written_once_is_dropped_from_the_file() -> None:
    pending = Pending()
    pending.keep_session(row(5))
    pending.take()
    pending.drop_session(5)
    batch = pending.take()
    assert batch.sessions == {5: None}
    assert batch.removes


def test_keys_of_a_session_are_those_of_its_blocks() -> None:
    assert chain.pack(keys_of([*TOLD.token_ids])) == session(0, "s", TOLD).branches[0].keys
