"""Answers that a client may go on from by their ids, without telling again what was said before (pure).

A branch keeps them beside its history and they go with it, so whatever ends a branch (a deletion, an expiry, the
bound on branches) ends them. Each has the messages that came since the one before it:

    reply 1    [question][answer]
    reply 2                      [question][answer]       previous: 1
    reply 2'                     [question][answer]       previous: 1, asked again and superseded by it: still there

The one before it is of the same branch. Where a turn went on from a reply of another branch, which may go any time,
its own has all messages from the first on.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import replace

from kvstore.history import DIGEST_BYTES, History, Reply, with_replies

MOST_ASIDE = 32
"""Replies of one branch that lead nowhere: superseded, or gone back behind. The oldest go first."""


def reply_digest(reply_id: str) -> bytes:
    """What a reply is looked up by, among the digests of its history."""
    return hashlib.blake2b(reply_id.encode(), digest_size=DIGEST_BYTES, person=b"dormouse-reply").digest()


def ids_digest(token_ids: array[int]) -> bytes:
    """Stands for exact tokens."""
    return hashlib.blake2b(token_ids.tobytes(), digest_size=DIGEST_BYTES).digest()


def find(history: History, reply_id: str) -> Reply | None:
    """The reply of that id."""
    return next((reply for reply in history.replies if reply.id == reply_id), None)


def chain_of(replies: Sequence[Reply], last: Reply) -> list[Reply]:
    """`last` and what it goes on from, oldest first."""
    known = {reply.id: reply for reply in replies}
    found = [last]
    while (previous := found[-1].previous) is not None:
        found.append(known[previous])
    return found[::-1]


def told(history: History, last: Reply) -> list[object]:
    """All messages up to the end of `last`, as they were given to `keep`."""
    return [message for reply in chain_of(history.replies, last) for message in json.loads(reply.messages)]


def keep(
    history: History, earlier: Sequence[Reply], before: Sequence[object], reply: Reply, new: Sequence[object]
) -> History:
    """`history` with its branch's `earlier` replies and one more, which said `new` after the messages `before`."""
    if any(one.id == reply.previous for one in earlier):
        added = replace(reply, messages=json.dumps(list(new)))
    else:
        added = replace(reply, messages=json.dumps([*before, *new]), previous=None)
    return carry(history, [*earlier, added])


def carry(history: History, replies: Sequence[Reply]) -> History:
    """`history` with these replies, the newest last, as far as they are kept."""
    if not replies:
        return history
    kept = trimmed(replies)
    return with_replies(history, kept, tuple(reply_digest(reply.id) for reply in kept))


def trimmed(replies: Sequence[Reply]) -> tuple[Reply, ...]:
    """Those that the newest goes on from, and the latest of the others whose own chain is whole."""
    main = {reply.id for reply in chain_of(replies, replies[-1])}
    aside = [reply for reply in replies if reply.id not in main]
    going = {reply.id for reply in aside[: max(0, len(aside) - MOST_ASIDE)]}
    kept: list[Reply] = []
    for reply in replies:
        if reply.id in going or reply.previous in going:
            going.add(reply.id)
        else:
            kept.append(reply)
    return tuple(kept)
