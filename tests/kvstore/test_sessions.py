"""Sessions: which branch a turn continues, what completing it replaces, who is forgotten."""

from __future__ import annotations

from array import array
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore import chain
from kvstore.errors import SessionEmpty, SessionTaken, SessionUnknown
from kvstore.former import Former, Gone
from kvstore.history import History, Seam, text_digests
from kvstore.sessions import SessionBook
from kvstore.terms import SILENT, Change, Persist, Terms, Wishes

if TYPE_CHECKING:
    from kvstore.session import Branch, OpenTurn

TENANT = "acme"
FIRST = (1, 10, 11, 12)  # a first prompt; its answer's message begins at its end
TITLE = (1, 10, 90, 91, 92)


def ids(*tokens: int) -> array[int]:
    return array("I", tokens)


def history(*tokens: int, first_answer: int = len(FIRST), digests: tuple[bytes, ...] = ()) -> History:
    text = "".join(chr(0x100 + token) for token in tokens)
    return History(ids(*tokens), text, (Seam(len(text), len(tokens)),), first_answer, (), digests)


def run(
    book: SessionBook,
    session_id: str,
    prompt: tuple[int, ...],
    answer: tuple[int, ...],
    now: float,
    first_answer: int = len(FIRST),
    digests: tuple[bytes, ...] = (),
    wishes: Wishes = SILENT,
) -> OpenTurn:
    """A turn from its arrival to its end."""
    turn = book.begin(TENANT, session_id, ids(*prompt), now, wishes=wishes)
    told = history(*prompt, *answer, first_answer=first_answer, digests=digests)
    book.record(turn, told, now + 0.5, keys(*prompt, *answer))
    return turn


def keys(*tokens: int) -> bytes:
    """Packed keys of blocks of two tokens, the last token left out as everywhere."""
    return chain.pack(chain.extend(None, ids(*tokens[:-1]), 2, chain.namespace(b"m", TENANT, None)))


def branch_tokens(book: SessionBook, session_id: str) -> dict[int, list[int]]:
    session = book.get(TENANT, session_id)
    assert session is not None
    return {index: list(told(branch).token_ids) for index, branch in session.branches.items()}


def told(branch: Branch) -> History:
    assert isinstance(branch.history, History)
    return branch.history


def test_a_first_turn_makes_a_session_with_one_branch() -> None:
    book = SessionBook()
    turn = book.begin(TENANT, "s", ids(*FIRST), 1.0, parent_id="p")
    assert not turn.match.is_known_session
    assert (turn.match.branch, turn.match.history_tokens, turn.number) == (None, 0, 1)
    book.record(turn, history(*FIRST, 20, 21), 2.0)
    assert branch_tokens(book, "s") == {0: [*FIRST, 20, 21]}
    assert turn.session.parent_id == "p"
    assert (turn.session.last_active, turn.session.turns) == (2.0, 1)


def test_appending_continues_the_branch_and_supersedes_nothing() -> None:
    book = SessionBook()
    run(book, "s", FIRST, (20, 21), 1.0)
    turn = book.begin(TENANT, "s", ids(*FIRST, 20, 21, 30), 2.0)
    assert (turn.match.shared_tokens, turn.match.history_tokens, turn.branch.index, turn.number) == (6, 6, 0, 2)
    recorded = book.record(turn, history(*FIRST, 20, 21, 30, 40), 3.0)
    assert recorded.superseded_tokens == 0


def test_regenerating_the_first_answer_continues_the_branch_and_supersedes_the_answer() -> None:
    book = SessionBook()
    run(book, "s", FIRST, (20, 21), 1.0)
    turn = book.begin(TENANT, "s", ids(*FIRST), 2.0)
    assert (turn.branch.index, turn.match.shared_tokens) == (0, len(FIRST))
    recorded = book.record(turn, history(*FIRST, 25), 3.0)
    assert recorded.superseded_tokens == 2
    assert list(recorded.previous_ids[recorded.kept_tokens :]) == [20, 21]


def test_a_regenerated_answer_keeps_what_it_shares_with_the_one_before() -> None:
    book = SessionBook()
    run(book, "s", FIRST, (20, 21), 1.0)
    turn = book.begin(TENANT, "s", ids(*FIRST), 2.0)
    assert book.record(turn, history(*FIRST, 20, 29), 3.0).superseded_tokens == 1


def test_a_prompt_that_tells_the_whole_conversation_goes_on_with_it_though_its_tokens_moved() -> None:
    book = SessionBook()
    told, more = b"t" * 16, b"m" * 16
    run(book, "a", FIRST, (20, 21), 1.0, digests=(told,))
    moved = ids(1, 50, 51, 52, 20, 21, 60)
    other = book.begin(TENANT, "a", moved, 2.0, digests=(more,))
    assert (other.branch.index, other.number) == (1, 1)
    book.abandon(other)
    turn = book.begin(TENANT, "a", moved, 3.0, digests=(told, more))
    assert (turn.branch.index, turn.number, turn.match.shared_tokens) == (0, 2, 1)
    assert turn.match.history_tokens == len(FIRST) + 2


def test_a_prompt_that_leaves_before_the_first_answer_begins_a_new_branch() -> None:
    book = SessionBook()
    run(book, "s", FIRST, (20, 21), 1.0)
    turn = run(book, "s", TITLE, (95,), 2.0, first_answer=len(TITLE))
    assert turn.match.is_known_session
    assert (turn.match.branch, turn.match.shared_tokens, turn.match.history_tokens) == (None, 0, 0)
    assert branch_tokens(book, "s") == {0: [*FIRST, 20, 21], 1: [*TITLE, 95]}


def test_titles_and_sub_agents_under_one_id_do_not_disturb_its_conversation() -> None:
    book = SessionBook()
    chat: tuple[int, ...] = FIRST
    agent: tuple[int, ...] = (1, 70, 71)
    for turn in range(3):
        chat_turn = book.begin(TENANT, "s", ids(*chat), turn)
        agent_turn = book.begin(TENANT, "s", ids(*agent), turn)
        title_turn = book.begin(TENANT, "s", ids(*TITLE, turn), turn)
        assert chat_turn.match.shared_tokens == chat_turn.match.history_tokens
        assert agent_turn.match.shared_tokens == agent_turn.match.history_tokens
        for each, prompt in ((title_turn, (*TITLE, turn)), (agent_turn, agent), (chat_turn, chat)):
            first = {chat: len(FIRST), agent: 3}.get(prompt, len(TITLE))
            superseded = book.record(each, history(*prompt, 50 + turn, first_answer=first), turn + 0.5)
            assert superseded.superseded_tokens == 0 or each is title_turn
        chat, agent = (*chat, 50 + turn, 60), (*agent, 50 + turn, 61)


def test_of_several_branches_the_longest_prefix_wins() -> None:
    book = SessionBook()
    run(book, "s", FIRST, (20, 21), 1.0)
    first = book.begin(TENANT, "s", ids(*FIRST, 20, 21, 30), 2.0)
    second = book.begin(TENANT, "s", ids(*FIRST, 20, 21, 31), 2.0)  # the branch is busy: a new one
    assert first.branch.index == 0
    assert second.match.branch is None
    book.record(first, history(*FIRST, 20, 21, 30, 40), 3.0)
    book.record(second, history(*FIRST, 20, 21, 31, 41), 4.0)
    assert book.match(TENANT, "s", ids(*FIRST, 20, 21, 30, 40, 50)).branch is first.branch
    assert book.match(TENANT, "s", ids(*FIRST, 20, 21, 31, 41, 50)).branch is second.branch
    # what both share goes to the branch that was active last
    assert book.match(TENANT, "s", ids(*FIRST, 20, 21)).branch is second.branch


def test_a_turn_that_is_abandoned_leaves_no_trace() -> None:
    book = SessionBook()
    book.abandon(book.begin(TENANT, "s", ids(*FIRST), 1.0))
    assert book.get(TENANT, "s") is None
    assert len(book) == 0
    run(book, "s", FIRST, (20,), 2.0)
    book.abandon(book.begin(TENANT, "s", ids(*TITLE), 3.0))
    book.abandon(book.begin(TENANT, "s", ids(*FIRST, 20, 30), 3.0))
    assert branch_tokens(book, "s") == {0: [*FIRST, 20]}
    assert not book.match(TENANT, "s", ids(*FIRST, 20)).branch.is_busy  # type: ignore[union-attr]


def test_a_session_of_two_first_turns_stays_while_one_of_them_runs() -> None:
    book = SessionBook()
    one, other = book.begin(TENANT, "s", ids(*FIRST), 1.0), book.begin(TENANT, "s", ids(*FIRST), 1.0)
    book.abandon(one)
    assert book.record(other, history(*FIRST, 20), 2.0).is_known
    assert branch_tokens(book, "s") == {1: [*FIRST, 20]}


def test_a_session_forgotten_during_its_turn_is_not_recorded() -> None:
    book = SessionBook()
    turn = book.begin(TENANT, "s", ids(*FIRST), 1.0)
    assert book.forget(TENANT, "s") is turn.session
    newcomer = book.begin(TENANT, "s", ids(*FIRST), 2.0)
    assert not book.record(turn, history(*FIRST, 20, digests=(b"d",)), 3.0).is_known
    assert book.find(TENANT, [b"d"]) is None
    book.abandon(newcomer)
    assert len(book) == 0


def test_the_least_recent_idle_branch_is_forgotten_first() -> None:
    book = SessionBook(max_branches=3)
    for branch in range(3):
        run(book, "s", (1, 100 + branch), (5,), float(branch), first_answer=2)
    run(book, "s", (1, 100, 5, 6), (7,), 5.0, first_answer=2)  # branch 0 is fresh again
    turn = book.begin(TENANT, "s", ids(1, 200), 6.0)
    assert [branch.index for _, branch in turn.forgotten] == [1]
    assert sorted(turn.session.branches) == [0, 2, 3]


def test_busy_branches_are_kept_beyond_the_limit_and_trimmed_later() -> None:
    book = SessionBook(max_branches=2)
    turns = [book.begin(TENANT, "s", ids(1, 100 + n), float(n)) for n in range(4)]
    assert len(turns[0].session.branches) == 4
    for n, turn in enumerate(turns):
        book.record(turn, history(1, 100 + n, 5, first_answer=2), 10.0 + n)
    last = book.begin(TENANT, "s", ids(1, 300), 20.0)
    assert len(last.session.branches) == 2


def test_what_was_busy_beyond_the_bounds_is_trimmed_when_turns_end() -> None:
    book = SessionBook(max_sessions=2, max_branches=2)
    turns = [book.begin(TENANT, name, ids(1, 100 + n), float(n)) for n, name in enumerate("abccc")]
    assert len(book) == 3
    gone = []
    for n, turn in enumerate(turns):
        book.record(turn, history(1, 100 + n, 5, first_answer=2), 10.0 + n)
        gone += [(session.id, branch.index) for session, branch in book.trim(turn.session)]
    assert gone == [("a", 0), ("c", 0)], "a went when b's turn had ended, c's first branch when its last one had"
    assert (len(book), book.num_branches) == (2, 3)


def test_the_session_whose_turn_has_just_ended_stays_while_others_are_busy() -> None:
    book = SessionBook(max_sessions=1)
    first, second = (book.begin(TENANT, name, ids(1, 2), 0.0) for name in "ab")
    book.record(first, history(1, 2, 5, first_answer=2), 1.0)
    assert book.trim(first.session) == ()
    book.record(second, history(1, 2, 5, first_answer=2), 2.0)
    assert [session.id for session, _ in book.trim(second.session)] == ["a"]


def test_the_least_recent_idle_session_makes_room_for_a_new_one() -> None:
    book = SessionBook(max_sessions=2)
    run(book, "a", FIRST, (20,), 1.0, digests=(b"a",))
    run(book, "b", FIRST, (20,), 2.0)
    running = book.begin(TENANT, "a", ids(*FIRST, 20, 30), 3.0)
    newcomer = book.begin(TENANT, "c", ids(*FIRST), 4.0)
    assert [(session.id, branch.index) for session, branch in newcomer.forgotten] == [("b", 0)]
    assert {book.get(TENANT, name) is None for name in "ac"} == {False}
    book.abandon(running)


def test_tenants_do_not_see_each_other() -> None:
    book = SessionBook()
    run(book, "s", FIRST, (20,), 1.0, digests=(b"d",))
    assert book.get("other", "s") is None
    assert book.histories("other", "s") == []
    assert book.find("other", [b"d"]) is None
    assert not book.match("other", "s", ids(*FIRST, 20)).is_known_session
    assert book.page("other").sessions == ()


def test_the_longest_known_text_finds_the_session_that_has_it() -> None:
    book = SessionBook()
    text = "hello|answer|more|answer two|"
    short, middle, long = text_digests(text, [13, 18, len(text)])
    assert text_digests(text[:18], [13, 18]) == (short, middle)
    run(book, "early", FIRST, (20,), 1.0, digests=(short,))
    run(book, "late", FIRST, (20,), 2.0, digests=(short, long))
    for digests, expected in (((short, middle, long), "late"), ((short, middle), "late"), ((middle,), None)):
        found = book.find(TENANT, digests)
        assert (found.id if found else None) == expected


def test_among_equal_texts_the_parents_come_first_then_the_groups_then_the_latest() -> None:
    book = SessionBook()
    for moment, (name, group) in enumerate((("parent", None), ("mate", "g"), ("latest", None))):
        turn = book.begin(TENANT, name, ids(*FIRST), float(moment), group=group)
        book.record(turn, history(*FIRST, 20, digests=(b"d",)), float(moment))
    found = [
        book.find(TENANT, [b"d"], parent_id="parent", group="g"),
        book.find(TENANT, [b"d"], group="g"),
        book.find(TENANT, [b"d"]),
    ]
    assert [session.id for session in found if session] == ["parent", "mate", "latest"]
    busy = book.begin(TENANT, "latest", ids(*FIRST, 20, 30), 9.0)
    assert book.find(TENANT, [b"d"]) is book.get(TENANT, "mate")
    book.record(busy, history(*FIRST, 20, 30, 40, digests=(b"e",)), 10.0)
    assert book.find(TENANT, [b"d"]) is book.get(TENANT, "mate")


def test_pages_go_from_the_newest_to_the_oldest_and_end() -> None:
    book = SessionBook()
    for number in range(7):
        run(book, f"s{number}", FIRST, (20,), float(number))
    book.forget(TENANT, "s4")
    seen: list[str] = []
    before: int | None = None
    while True:
        page = book.page(TENANT, before=before, limit=2)
        seen += [session.id for session in page.sessions]
        before = page.before
        if before is None:
            break
    assert seen == ["s6", "s5", "s3", "s2", "s1", "s0"]


def test_a_tenant_may_be_forgotten_as_a_whole() -> None:
    book = SessionBook()
    for name in "abc":
        run(book, name, FIRST, (20,), 1.0, digests=(b"d",))
    assert [session.id for session in book.forget_all(TENANT)] == ["a", "b", "c"]
    assert book.find(TENANT, [b"d"]) is None
    assert book.page(TENANT).sessions == ()
    assert repr(book) == "<SessionBook 0/100000 sessions | 0 branches, 0 busy>"


def test_a_prompt_may_be_spliced_from_a_branch_that_is_busy() -> None:
    book = SessionBook()
    run(book, "s", FIRST, (20, 21), 1.0)
    book.begin(TENANT, "s", ids(*FIRST, 20, 21, 30), 2.0)
    assert [list(each.token_ids) for each in book.histories(TENANT, "s")] == [[*FIRST, 20, 21]]


# --- what the store is told ---------------------------------------------------------------


def test_recording_tells_the_store_where_the_branch_was_and_is_and_what_it_left() -> None:
    book = SessionBook()
    run(book, "s", FIRST, (20, 21, 22), 1.0)
    turn = book.begin(TENANT, "s", ids(*FIRST), 2.0)
    recorded = book.record(turn, history(*FIRST, 29, 28), 3.0, keys(*FIRST, 29, 28))
    old, new = chain.unpack(keys(*FIRST, 20, 21, 22)), chain.unpack(keys(*FIRST, 29, 28))
    assert (recorded.old_tip, recorded.tip) == (old[-1], new[-1])
    assert recorded.superseded == old[2:]
    assert turn.branch.block_keys == new


def test_a_history_without_a_whole_block_has_no_tip() -> None:
    book = SessionBook()
    turn = book.begin(TENANT, "s", ids(1), 1.0)
    recorded = book.record(turn, history(1, 2, first_answer=1), 2.0, keys(1, 2))
    assert (recorded.tip, recorded.old_tip, recorded.superseded) == (None, None, ())


# --- terms and expiry ---------------------------------------------------------------------


def test_a_turn_that_is_silent_leaves_the_terms_of_its_branch_as_they_were() -> None:
    book = SessionBook()
    asked = Wishes(priority=-1, keep_seconds=60.0, expire_seconds=100.0, persist=Persist.MEMORY)
    turn = run(book, "s", FIRST, (20,), 1.0, wishes=asked)
    follow_up = run(book, "s", (*FIRST, 20, 30), (40,), 2.0)
    assert follow_up.branch is turn.branch
    assert turn.branch.terms == follow_up.terms == Terms(-1, 60.0, False, 100.0, Persist.MEMORY)


def test_a_turn_that_does_not_complete_changes_no_terms() -> None:
    book = SessionBook()
    turn = run(book, "s", FIRST, (20,), 1.0)
    failed = book.begin(TENANT, "s", ids(*FIRST, 20, 30), 2.0, wishes=Wishes(expire_seconds=1.0))
    assert failed.terms.expire_seconds == 1.0
    book.abandon(failed)
    assert turn.branch.terms == Terms()
    assert book.next_expiry() is None


def test_a_branch_expires_after_its_last_activity_and_takes_its_session_along() -> None:
    book = SessionBook()
    turn = run(book, "s", FIRST, (20,), 1.0, digests=(b"d",), wishes=Wishes(expire_seconds=10.0))
    assert book.next_expiry() == 11.5
    run(book, "s", (*FIRST, 20, 30), (40,), 5.0, digests=(b"e",))
    assert book.next_expiry() == 15.5
    assert book.expire(15.4) == []
    assert book.expire(15.5) == [(turn.session, turn.branch)]
    assert book.get(TENANT, "s") is None
    assert book.find(TENANT, [b"d", b"e"]) is None
    assert book.former(TENANT, "s") == Former(Gone.EXPIRED, 0)
    assert (book.next_expiry(), len(book)) == (None, 0)


def test_a_branch_expires_alone_where_others_live_on() -> None:
    book = SessionBook()
    run(book, "s", FIRST, (20,), 1.0, wishes=Wishes(expire_seconds=10.0))
    run(book, "s", TITLE, (95,), 2.0, first_answer=len(TITLE))
    assert [branch.index for _, branch in book.expire(20.0)] == [0]
    assert branch_tokens(book, "s") == {1: [*TITLE, 95]}
    assert book.former(TENANT, "s") is None


@pytest.mark.parametrize("completes", [True, False])
def test_a_branch_does_not_expire_while_its_turn_runs(completes: bool) -> None:
    book = SessionBook()
    run(book, "s", FIRST, (20,), 1.0, wishes=Wishes(expire_seconds=10.0))
    turn = book.begin(TENANT, "s", ids(*FIRST, 20, 30), 9.0)
    assert book.expire(50.0) == []
    assert book.next_expiry() is None
    if completes:
        book.record(turn, history(*FIRST, 20, 30, 40), 60.0)
        assert book.next_expiry() == 70.0
    else:
        book.abandon(turn)
        assert book.next_expiry() == 19.0  # it was active when the turn began
        assert book.expire(60.0) == [(turn.session, turn.branch)]


def test_terms_of_a_session_are_changed_for_all_its_branches_and_those_to_come() -> None:
    book = SessionBook()
    first = run(book, "s", FIRST, (20,), 1.0, wishes=Wishes(keep_seconds=5.0))
    book.change(TENANT, "s", Change(priority=3, pinned=True, expire_seconds=10.0))
    assert first.branch.terms == Terms(3, 5.0, True, 10.0)
    assert book.next_expiry() == 11.5
    title = run(book, "s", TITLE, (95,), 2.0, first_answer=len(TITLE))
    assert title.branch.terms == Terms(3, 0.0, True, 10.0)
    book.change(TENANT, "s", Change(never_expires=True, pinned=False))
    assert {branch.terms.expire_seconds for branch in first.session.branches.values()} == {None}
    assert book.next_expiry() is None
    with pytest.raises(SessionUnknown):
        book.change(TENANT, "other", Change())


def test_a_change_made_while_a_turn_runs_holds_unless_its_request_said_otherwise() -> None:
    book = SessionBook()
    turn = book.begin(TENANT, "s", ids(*FIRST), 1.0, wishes=Wishes(keep_seconds=5.0))
    book.change(TENANT, "s", Change(priority=4, keep_seconds=50.0))
    book.record(turn, history(*FIRST, 20), 2.0)
    assert (turn.branch.terms.priority, turn.branch.terms.keep_seconds) == (4, 5.0)


def test_a_branch_remembers_when_its_client_means_to_return_until_the_next_turn() -> None:
    book = SessionBook()
    turn = run(book, "s", FIRST, (20,), 1.0, wishes=Wishes(expected_idle_seconds=8.0))
    assert turn.branch.expected_return == 9.5
    run(book, "s", (*FIRST, 20, 30), (40,), 10.0)
    assert turn.branch.expected_return is None


# --- forks --------------------------------------------------------------------------------


def test_a_fork_has_the_same_histories_and_goes_its_own_way() -> None:
    book = SessionBook()
    source = run(book, "s", FIRST, (20,), 1.0, wishes=Wishes(keep_seconds=7.0)).session
    run(book, "s", TITLE, (95,), 2.0, first_answer=len(TITLE))
    fork, forgotten = book.fork(TENANT, "s", "t", 5.0)
    assert forgotten == ()
    assert (fork.parent_id, fork.turns, fork.last_active, fork.created) == ("s", 2, 5.0, 5.0)
    for index, branch in fork.branches.items():
        original = source.branches[index]
        assert branch is not original
        assert branch.history is original.history  # shared, not copied
        assert (branch.keys, branch.terms, branch.turns) == (original.keys, original.terms, original.turns)
    run(book, "t", (*FIRST, 20, 30), (40,), 6.0)
    assert branch_tokens(book, "s")[0] == [*FIRST, 20]
    assert branch_tokens(book, "t")[0] == [*FIRST, 20, 30, 40]


def test_a_fork_of_one_branch_leaves_the_others_behind() -> None:
    book = SessionBook()
    run(book, "s", FIRST, (20,), 1.0)
    run(book, "s", TITLE, (95,), 2.0, first_answer=len(TITLE))
    fork, _ = book.fork(TENANT, "s", "t", 5.0, branch=1)
    assert branch_tokens(book, "t") == {1: [*TITLE, 95]}
    assert fork.next_branch == 2


def test_a_turn_in_flight_has_no_part_in_a_fork() -> None:
    book = SessionBook()
    run(book, "s", FIRST, (20,), 1.0)
    turn = book.begin(TENANT, "s", ids(*FIRST, 20, 30), 2.0)
    fork, _ = book.fork(TENANT, "s", "t", 3.0)
    assert not fork.is_busy
    book.record(turn, history(*FIRST, 20, 30, 40), 4.0)
    assert branch_tokens(book, "t") == {0: [*FIRST, 20]}


def test_forking_puts_no_expiry_off() -> None:
    book = SessionBook()
    run(book, "s", FIRST, (20,), 1.0, wishes=Wishes(expire_seconds=10.0))
    book.fork(TENANT, "s", "t", 9.0)
    assert {session.id for session, _ in book.expire(11.5)} == {"s", "t"}


def test_a_fork_that_cannot_be_is_refused_and_leaves_nothing() -> None:
    book = SessionBook()
    with pytest.raises(SessionUnknown):
        book.fork(TENANT, "s", "t", 1.0)
    turn = book.begin(TENANT, "s", ids(*FIRST), 1.0)
    with pytest.raises(SessionEmpty):
        book.fork(TENANT, "s", "t", 1.0)
    with pytest.raises(SessionTaken):
        book.fork(TENANT, "s", "s", 1.0)
    with pytest.raises(SessionUnknown):
        book.fork(TENANT, "s", "t", 1.0, branch=7)
    book.abandon(turn)
    assert len(book) == 0


def test_a_fork_makes_room_by_forgetting_the_least_recent_other() -> None:
    book = SessionBook(max_sessions=2)
    run(book, "a", FIRST, (20,), 1.0)
    run(book, "b", FIRST, (20,), 2.0)
    _, forgotten = book.fork(TENANT, "b", "c", 3.0)
    assert [session.id for session, _ in forgotten] == ["a"]
    assert book.former(TENANT, "a") == Former(Gone.EVICTED, 0)


# --- ids that were ------------------------------------------------------------------------


def test_an_id_that_was_a_session_is_remembered_until_it_is_one_again() -> None:
    book = SessionBook()
    run(book, "s", FIRST, (20,), 1.0)
    book.forget(TENANT, "s")
    assert book.former(TENANT, "s") == Former(Gone.DELETED, 0)
    assert book.former("other", "s") is None
    turn = book.begin(TENANT, "s", ids(*FIRST), 2.0)
    assert turn.former == Former(Gone.DELETED, 0)
    assert book.former(TENANT, "s") is None
    book.abandon(turn)  # no trace, so the id is what it was before
    assert book.former(TENANT, "s") == Former(Gone.DELETED, 0)


def test_an_id_whose_only_turn_was_abandoned_never_was_a_session() -> None:
    book = SessionBook()
    book.abandon(book.begin(TENANT, "s", ids(*FIRST), 1.0))
    assert book.former(TENANT, "s") is None


def test_no_more_former_ids_are_kept_than_sessions() -> None:
    book = SessionBook(max_sessions=2)
    for number in range(5):
        run(book, f"s{number}", FIRST, (20,), float(number))
    assert [book.former(TENANT, f"s{number}") is None for number in range(5)] == [True, False, False, True, True]


def test_a_discarded_turn_takes_its_branch_along() -> None:
    book = SessionBook()
    run(book, "s", FIRST, (20,), 1.0)
    run(book, "s", TITLE, (95,), 2.0, first_answer=len(TITLE))
    book.discard(book.begin(TENANT, "s", ids(*FIRST, 20, 30), 3.0))
    assert branch_tokens(book, "s") == {1: [*TITLE, 95]}
    book.discard(book.begin(TENANT, "s", ids(*TITLE, 95, 30), 4.0))
    assert book.get(TENANT, "s") is None


def test_a_list_goes_on_behind_a_session_that_was_deleted_meanwhile() -> None:
    book = SessionBook()
    for number in range(4):
        run(book, f"s{number}", FIRST, (20,), float(number))
    book.forget(TENANT, "s2")
    assert [session.id for session in book.page(TENANT, before=book.serial(TENANT, "s2")).sessions] == ["s1", "s0"]
    assert book.serial(TENANT, "never") is None


def test_a_tenant_may_be_forgotten_in_portions_without_what_came_later() -> None:
    book = SessionBook()
    for number in range(5):
        run(book, f"s{number}", FIRST, (20,), float(number))
    until = book.end_serial
    run(book, "late", FIRST, (20,), 9.0)
    portions = [len(book.forget_all(TENANT, before=until, limit=2)) for _ in range(4)]
    assert portions == [2, 2, 1, 0]
    assert [session.id for session in book.page(TENANT).sessions] == ["late"]


def test_the_most_recently_active_come_first_whoever_they_belong_to() -> None:
    book = SessionBook()
    for moment, (tenant, name) in enumerate((("x", "a"), ("y", "b"), ("x", "c"))):
        turn = book.begin(tenant, name, ids(*FIRST), float(moment))
        book.record(turn, history(*FIRST, 20), float(moment))
    assert [session.id for session in book.recent()] == ["c", "b", "a"]
    assert [session.id for session in book.recent(1, 1)] == ["b"]


class Bookkeeping(RuleBasedStateMachine):
    """Turns begin and end in any order; the book's bounds and indexes hold throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.book = SessionBook(max_sessions=3, max_branches=2)
        self.open: list[tuple[OpenTurn, tuple[int, ...]]] = []
        self.now = 0.0
        self.bound = self.listed = 3

    @rule(name=st.sampled_from("abcd"), prompt=st.lists(st.integers(1, 3), min_size=1, max_size=5))
    def arrive(self, name: str, prompt: list[int]) -> None:
        self.now += 1
        wishes = Wishes(expire_seconds=float(prompt[0])) if len(prompt) == 1 else SILENT
        self.open.append((self.book.begin(TENANT, name, ids(*prompt), self.now, wishes=wishes), tuple(prompt)))

    @rule(place=st.integers(0, 9), answer=st.integers(1, 3))
    def complete(self, place: int, answer: int) -> None:
        if self.open:
            self.now += 1
            turn, prompt = self.open.pop(place % len(self.open))
            digests = text_digests("".join(map(str, prompt)), range(1, len(prompt) + 1))
            self.book.record(turn, history(*prompt, answer, first_answer=len(prompt), digests=digests), self.now)

    @rule(place=st.integers(0, 9))
    def fail(self, place: int) -> None:
        if self.open:
            self.book.abandon(self.open.pop(place % len(self.open))[0])

    @rule(name=st.sampled_from("abcd"))
    def delete(self, name: str) -> None:
        self.book.forget(TENANT, name)

    @rule(place=st.integers(0, 9))
    def discard(self, place: int) -> None:
        if self.open:
            self.book.discard(self.open.pop(place % len(self.open))[0])

    @rule(name=st.sampled_from("abcd"), new=st.sampled_from("abcd"))
    def fork(self, name: str, new: str) -> None:
        with suppress(SessionUnknown, SessionTaken, SessionEmpty):
            self.book.fork(TENANT, name, new, self.now)

    @rule(seconds=st.integers(0, 4))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        self.book.expire(self.now)

    @invariant()
    def nothing_idle_outlives_its_expiry(self) -> None:
        due = self.book.next_expiry()
        branches = [each for session in self.book.page(TENANT).sessions for each in session.branches.values()]
        idle = [each.expires_at for each in branches if each.expires_at is not None and not each.is_busy]
        assert due is None or due <= min(idle, default=due)
        assert due is not None or not idle

    @invariant()
    def busy_branches_are_those_of_open_turns(self) -> None:
        listed = self.book.page(TENANT).sessions
        busy = {id(branch) for session in listed for branch in session.branches.values() if branch.is_busy}
        running = {id(turn.branch) for turn, _ in self.open if not turn.session.is_forgotten}
        assert busy == running
        assert len(running) == len([turn for turn, _ in self.open if not turn.session.is_forgotten])

    @invariant()
    def bounds_hold_but_for_what_is_busy(self) -> None:
        listed = self.book.page(TENANT).sessions
        assert len(listed) == len(self.book)
        # Looked after when sessions are made: ending a turn forgets nobody.
        self.bound = max(3, self.bound if len(listed) <= self.listed else 0)
        self.bound = max(self.bound, len([session for session in listed if session.is_busy]) + 1)
        self.listed = len(listed)
        assert len(listed) <= self.bound
        assert self.book.num_branches == sum(len(session.branches) for session in listed)
        for session in listed:
            assert session.branches
            branches: list[Branch] = list(session.branches.values())
            assert all(branch.turns or branch.is_busy for branch in branches)

    @invariant()
    def every_text_that_is_found_belongs_to_a_session_that_is_known(self) -> None:
        for session in self.book.page(TENANT).sessions:
            for branch in session.branches.values():
                found = self.book.find(TENANT, branch.history.digests)
                assert found is None or self.book.get(TENANT, found.id) is found


TestBookkeeping = Bookkeeping.TestCase
TestBookkeeping.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
