"""Sessions across restarts: keeper, book and catalog together, against what the book was."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from array import array
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from app.keeper import Keeper, Written, written
from kvstore.catalog_reading import ReadFault
from kvstore.catalog_rows import BlockRow
from kvstore.errors import SessionEmpty, SessionTaken, SessionUnknown
from kvstore.former import Former, Gone
from kvstore.history import History, Seam, Told, Unread, text_digests
from kvstore.sessions import SessionBook
from kvstore.terms import SILENT, Change, Persist, Wishes
from tests.app.recording import RecordingStore
from tests.kvstore.shelf import MODEL, SPACE, Shelf

if TYPE_CHECKING:
    from kvstore.session import OpenTurn, Session

BLOCK = 4
WALL = 1_000_000.0
FIRST = (901, 42, 40_000, 7)


class Server:
    """One life: book, store, keeper and catalog on a directory."""

    def __init__(self, root: Path, *, model: bytes = MODEL, wall: float = WALL, max_sessions: int = 100) -> None:
        self.shelf = Shelf(root, model=model, wall=wall, max_sessions=max_sessions)
        self.store = RecordingStore()
        self.book = SessionBook(max_sessions=max_sessions, max_branches=4)
        self.keeper = Keeper(self.book, self.store, lambda: self.shelf.monotonic, self.shelf.journal)
        self.keeper.restore(self.shelf.restored)

    def pass_time(self, seconds: float) -> None:
        self.shelf.monotonic += seconds
        self.shelf.wall += seconds

    def stop(self) -> None:
        self.keeper.close()
        self.shelf.close()

    def begin(self, name: str, token_ids: tuple[int, ...], wishes: Wishes = SILENT) -> OpenTurn:
        return self.keeper.begin("", name, array("I", token_ids), wishes=wishes)

    def end(self, turn: OpenTurn, token_ids: tuple[int, ...], text: str) -> None:
        ids = array("I", token_ids)
        if turn.terms.persist is Persist.NONE:
            self.keeper.abandon(turn, self.written(ids))
            return
        ends = (Seam(len(text), len(ids)),)
        digests = text_digests(text, [len(text)])
        retold = Told(len(text), digests[0], len(text), digests[0], len(ids)) if len(text) % 2 else None
        told = History(ids, text, ends, min(len(FIRST), len(ids)), ends, digests, retold)
        self.keeper.record(turn, told, self.written(ids))

    def run(self, name: str, token_ids: tuple[int, ...], text: str = "", wishes: Wishes = SILENT) -> OpenTurn:
        turn = self.begin(name, token_ids[:-1], wishes)
        self.end(turn, token_ids, text)
        return turn

    @staticmethod
    def written(ids: array[int]) -> Written:
        return written(ids, BLOCK, SPACE, computed_tokens=len(ids) - 1, history_tokens=len(ids))

    def session(self, name: str) -> Session:
        session = self.book.get("", name)
        assert session is not None
        return session

    def on_disk(self) -> dict[str, object]:
        """What of the book is to come back, as plain values; times by the wall."""
        clocks = self.shelf.clocks
        found: dict[str, object] = {}
        for session in self.book.recent(0, len(self.book)):
            branches = {
                branch.index: (
                    branch.turns,
                    branch.terms,
                    branch.keys,
                    clocks.unix(branch.last_active),
                    None if branch.expected_return is None else clocks.unix(branch.expected_return),
                    self.shelf.read(branch),
                )
                for branch in session.branches.values()
                if branch.turns and branch.terms.persist is Persist.DISK
            }
            if branches:
                found[session.id] = (
                    *(session.serial, session.parent_id, session.group, session.terms, session.turns),
                    clocks.unix(session.created),
                    branches,
                )
        return found


# --- what comes back ----------------------------------------------------------------------


async def test_a_turn_after_a_restart_continues_its_branch(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.run("s", (*FIRST, 20, 21, 22, 23, 24), "hello")
    server.stop()
    again = Server(tmp_path)
    (branch,) = again.session("s").branches.values()
    assert isinstance(branch.history, Unread)
    assert again.book.histories("", "s") == []
    assert again.book.match("", "s", array("I", FIRST)).has_unread
    await again.keeper.recall("", "s")
    assert [told.text for told in again.book.histories("", "s")] == ["hello"]
    turn = again.begin("s", (*FIRST, 20, 21, 22, 23, 24, 30))
    assert (turn.branch, turn.number, turn.match.shared_tokens) == (branch, 2, 9)
    again.end(turn, (*FIRST, 20, 21, 22, 23, 24, 30, 31, 32, 33), "hello again")
    again.store.check_in_step_with(again.book)
    assert branch.written_blocks is None  # from now on it is a branch of this process
    again.stop()


async def test_a_session_is_found_by_its_text_before_anybody_has_read_it(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.run("s", (*FIRST, 20), "hello")
    server.stop()
    again = Server(tmp_path)
    found = again.book.find("", text_digests("hello", [5]))
    assert found is again.session("s")
    assert isinstance(found.branches[0].history, Unread)
    again.stop()


async def test_a_branch_that_was_not_read_is_forked_changed_and_listed_all_the_same(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.run("s", (*FIRST, 20, 21), "hello")
    server.stop()
    again = Server(tmp_path)
    again.keeper.fork("", "s", "t", None)
    again.keeper.change("", "t", Change(pinned=True, priority=4))
    assert [session.id for session in again.book.page("").sessions] == ["t", "s"]
    assert again.keeper.forget("", "s")
    again.store.check_in_step_with(again.book)
    again.stop()
    third = Server(tmp_path)
    await third.keeper.recall("", "t")
    (branch,) = third.session("t").branches.values()
    assert (branch.terms.pinned, branch.terms.priority) == (True, 4)
    assert [told.text for told in third.book.histories("", "t")] == ["hello"]
    assert third.book.get("", "s") is None
    third.stop()


async def test_a_fork_is_there_after_a_restart_though_nothing_happened_on_it(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.run("s", (*FIRST, 20, 21), "hello")
    server.keeper.fork("", "s", "t", None)
    server.stop()
    again = Server(tmp_path)
    await again.keeper.recall("", "t")
    assert [told.text for told in again.book.histories("", "t")] == ["hello"]
    assert again.session("t").parent_id == "s"
    again.stop()


async def test_a_branch_says_how_many_of_its_blocks_were_written_before_the_restart(tmp_path: Path) -> None:
    server = Server(tmp_path)
    turn = server.run("s", (*FIRST, *range(100, 109)))
    keys = turn.branch.block_keys
    assert len(keys) == 3
    server.shelf.blocks.record([BlockRow(5, keys[0], None, 0), BlockRow(1, keys[1], keys[0], 1)])
    server.stop()
    again = Server(tmp_path)
    assert again.session("s").branches[0].written_blocks == 2
    again.keeper.fork("", "s", "t", None)
    assert again.session("t").branches[0].written_blocks == 2
    again.stop()


async def test_what_expires_after_the_restart_does_so_by_its_last_turn(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.run("s", (*FIRST, 20), wishes=Wishes(expire_seconds=100.0))
    server.pass_time(30.0)
    server.stop()
    again = Server(tmp_path, wall=WALL + 90.0)
    assert again.book.next_expiry() == again.shelf.monotonic + 10.0
    again.pass_time(10.0)
    again.keeper.expire()
    again.shelf.settle()
    assert len(again.book) == 0
    assert again.store.closed
    assert not again.shelf.holds(array("I", FIRST).tobytes())
    again.stop()


async def test_a_turn_that_failed_puts_the_expiry_off_across_a_restart(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.run("s", (*FIRST, 20), wishes=Wishes(expire_seconds=100.0))
    server.pass_time(60.0)
    server.keeper.abandon(server.begin("s", (*FIRST, 20, 30)))
    server.stop()
    again = Server(tmp_path, wall=WALL + 150.0)
    assert again.book.get("", "s") is not None
    again.stop()


# --- what does not ------------------------------------------------------------------------


@pytest.mark.parametrize("completes", [True, False])
async def test_a_session_deleted_during_its_turn_leaves_nothing_on_disk(tmp_path: Path, completes: bool) -> None:
    server = Server(tmp_path)
    server.run("secret", (*FIRST, 20, 21), "the text")
    turn = server.begin("secret", (*FIRST, 20, 21, 30))
    server.keeper.forget("", "secret")
    if completes:
        server.end(turn, (*FIRST, 20, 21, 30, 31), "the text goes on")
    else:
        server.keeper.abandon(turn, None)
    server.shelf.settle()
    assert not server.shelf.holds(b"secret", b"the text", array("I", FIRST).tobytes())
    server.stop()


@pytest.mark.parametrize("persist", [Persist.MEMORY, Persist.NONE])
async def test_a_conversation_that_turns_private_leaves_the_disk_with_its_beginning(
    tmp_path: Path, persist: Persist
) -> None:
    server = Server(tmp_path)
    server.run("s", (*FIRST, 20, 21), "the text")
    server.shelf.settle()
    assert server.shelf.holds(b"the text")
    turn = server.begin("s", (*FIRST, 20, 21, 30), Wishes(persist=persist))
    server.end(turn, (*FIRST, 20, 21, 30, 31), "the text goes on")
    server.shelf.settle()
    assert not server.shelf.holds(b"the text", array("I", FIRST).tobytes())
    server.stop()


async def test_a_session_that_made_room_is_gone_after_the_restart_too(tmp_path: Path) -> None:
    server = Server(tmp_path, max_sessions=2)
    for name in ("a", "b", "c"):
        server.run(name, (*FIRST, 20))
        server.pass_time(1.0)
    server.stop()
    again = Server(tmp_path)
    assert [session.id for session in again.book.page("").sessions] == ["c", "b"]
    again.stop()


async def test_deleting_all_sessions_leaves_none_of_any_model(tmp_path: Path) -> None:
    server = Server(tmp_path)
    server.run("a", (*FIRST, 20), "first model")
    server.stop()
    other = Server(tmp_path, model=b"n" * 16)
    other.run("b", (*FIRST, 20), "second model")
    assert await other.keeper.forget_all("") == 1
    other.run("later", (*FIRST, 20), "after that")
    other.shelf.settle()
    assert not other.shelf.holds(b"first model", b"second model")
    other.stop()
    again = Server(tmp_path, model=b"n" * 16)
    assert [session.id for session in again.book.page("").sessions] == ["later"]
    again.stop()


# --- other models -------------------------------------------------------------------------


async def test_another_model_meets_the_id_as_one_that_changed_models_and_the_first_goes_on_later(
    tmp_path: Path,
) -> None:
    first = Server(tmp_path)
    first.run("s", (*FIRST, 20, 21), "in the first tokens")
    first.stop()
    second = Server(tmp_path, model=b"n" * 16)
    assert second.book.histories("", "s") == []
    turn = second.begin("s", FIRST)
    assert turn.former == Former(Gone.OTHER_MODEL, 0)
    second.end(turn, (*FIRST, 90), "in other tokens")
    second.stop()
    third = Server(tmp_path)
    await third.keeper.recall("", "s")
    assert [told.text for told in third.book.histories("", "s")] == ["in the first tokens"]
    third.stop()


async def test_an_id_of_another_model_can_be_deleted(tmp_path: Path) -> None:
    first = Server(tmp_path)
    first.run("s", (*FIRST, 20, 21), "in the first tokens")
    first.stop()
    second = Server(tmp_path, model=b"n" * 16)
    assert second.keeper.forget("", "s")
    assert not second.keeper.forget("", "s")
    second.shelf.settle()
    assert not second.shelf.holds(b"in the first tokens")
    assert second.book.former("", "s") == Former(Gone.DELETED, 0)
    second.stop()
    third = Server(tmp_path)
    assert len(third.book) == 0
    third.stop()


# --- histories that cannot be had ---------------------------------------------------------


class FailingJournal:
    """Reads end in `fault`; what is told is forgotten."""

    def __init__(self, fault: ReadFault) -> None:
        self.fault = fault

    def keep(self, session: Session, branches: object) -> None: ...

    def drop(self, gone: object) -> None: ...

    def drop_ids(self, tenant: str, session_id: str | None) -> None: ...

    async def read(self, unread: Unread) -> History | ReadFault:
        return self.fault

    async def flush(self, seconds: float) -> bool:
        return True


@pytest.mark.parametrize(
    ("fault", "left", "former"),
    [
        (ReadFault.UNREADABLE, 1, None),
        (ReadFault.LOST, 0, Former(Gone.LOST, 0)),
        (ReadFault.CORRUPT, 0, Former(Gone.CORRUPT, 0)),
    ],
)
async def test_a_history_that_cannot_be_read_stays_and_one_that_is_no_more_goes(
    tmp_path: Path, fault: ReadFault, left: int, former: Former | None
) -> None:
    server = Server(tmp_path)
    server.run("s", (*FIRST, 20, 21, 22), "hello")
    server.stop()
    again = Server(tmp_path)
    book, store = SessionBook(), RecordingStore()
    keeper = Keeper(book, store, lambda: 500.0, FailingJournal(fault))
    keeper.restore(again.shelf.restored)
    await keeper.recall("", "s")
    assert (len(book), book.former("", "s"), keeper.unreadable[fault]) == (left, former, 1)
    turn = keeper.begin("", "s", array("I", FIRST))
    assert (turn.match.branch, turn.match.has_unread) == (None, bool(left))
    keeper.abandon(turn)
    store.check_in_step_with(book)
    again.stop()


async def test_a_file_that_was_begun_anew_is_told_of_every_session_in_memory(tmp_path: Path) -> None:
    root = tmp_path / "nvme"
    root.mkdir()
    server = Server(root)
    for number in range(3):
        server.run(f"s{number}", (*FIRST, 20, number), f"text {number}")
    server.shelf.settle()
    shutil.rmtree(root)
    root.mkdir()
    server.run("s0", (*FIRST, 20, 0, 30, 31), "text 0 goes on")
    server.shelf.settle()
    assert server.shelf.losses == 1
    await server.keeper.tell_all()
    before = server.on_disk()
    server.stop()
    again = Server(root)
    assert again.on_disk() == before
    again.stop()


# --- everything in any order --------------------------------------------------------------

ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=12)  # surrogates and nulls among them
NAMES = st.sampled_from(["a", "b", "\ud800", "nul\0", "\U0001f42d"])
PERSIST = st.sampled_from([None, Persist.DISK, Persist.DISK, Persist.MEMORY, Persist.NONE])


class Lives(RuleBasedStateMachine):
    """Servers come and go on one directory, in order or not; whatever one knew is what the next one knows."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.loop = asyncio.Runner()
        self.lives = 0

    @initialize()
    def start(self) -> None:
        self.open(self.folder / "0", WALL)

    def open(self, root: Path, wall: float) -> None:
        root.mkdir(exist_ok=True)

        async def begin() -> Server:
            return Server(root, wall=wall, max_sessions=4)

        self.server = self.loop.run(begin())

    @rule(
        name=NAMES, more=st.lists(st.integers(0, 2), max_size=9), text=ANY_TEXT, persist=PERSIST, expires=st.booleans()
    )
    def turn(self, name: str, more: list[int], text: str, persist: Persist | None, expires: bool) -> None:
        async def run() -> None:
            await self.server.keeper.recall("", name)
            wishes = Wishes(persist=persist, expire_seconds=20.0 if expires else None, expected_idle_seconds=3.0)
            self.server.pass_time(1.0)
            self.server.run(name, (*FIRST, *more, 99), text, wishes)

        self.loop.run(run())

    @rule(name=NAMES, more=st.lists(st.integers(0, 2), max_size=4), is_deleted=st.booleans())
    def turn_without_end(self, name: str, more: list[int], is_deleted: bool) -> None:
        async def run() -> None:
            await self.server.keeper.recall("", name)
            self.server.pass_time(1.0)
            turn = self.server.begin(name, (*FIRST, *more))
            if is_deleted:
                self.server.keeper.forget("", name)
            self.server.keeper.abandon(turn)

        self.loop.run(run())

    @rule(name=NAMES, new=NAMES)
    def fork(self, name: str, new: str) -> None:
        async def run() -> None:
            with suppress(SessionUnknown, SessionTaken, SessionEmpty):
                self.server.keeper.fork("", name, new, None)

        self.loop.run(run())

    @rule(name=NAMES, priority=st.integers(-5, 5), pinned=st.booleans())
    def change(self, name: str, priority: int, pinned: bool) -> None:
        async def run() -> None:
            with suppress(SessionUnknown):
                self.server.keeper.change("", name, Change(priority=priority, pinned=pinned, keep_seconds=2.5))

        self.loop.run(run())

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        async def run() -> None:
            self.server.keeper.forget("", name)

        self.loop.run(run())

    @rule(seconds=st.integers(1, 30))
    def time_passes(self, seconds: int) -> None:
        async def run() -> None:
            self.server.pass_time(float(seconds))
            self.server.keeper.expire()

        self.loop.run(run())

    @rule(in_order=st.booleans())
    def restart(self, in_order: bool) -> None:
        server, root = self.server, self.server.shelf.root
        if not in_order:  # the files as they are at a moment when nothing is on its way to them
            server.shelf.settle()
            self.lives += 1
            root = Path(shutil.copytree(root, self.folder / str(self.lives)))
        before, serial = server.on_disk(), server.book.end_serial
        server.stop()
        self.open(root, server.shelf.wall)
        assert self.server.on_disk() == before
        assert self.server.book.end_serial <= serial
        self.server.store.check_in_step_with(self.server.book)

    def teardown(self) -> None:
        self.server.stop()
        self.loop.close()
        shutil.rmtree(self.folder)


TestLives = Lives.TestCase
TestLives.settings = settings(
    max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
