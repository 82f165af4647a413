"""What one conversation has said so far, in exact tokens and in text (pure)."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

DIGEST_BYTES = 16


class Seam(NamedTuple):
    """The first `num_tokens` ids of a conversation are the first `text_length` characters of its text."""

    text_length: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Told:
    """By what a client's retelling of a conversation in another spelling is known.

    Its first `num_messages`, the answer among them, mean `digest`. The template wrote their prompt in
    `prompt_length` characters, of which `prompt_digest` is taken; the answer begins at `answer_start` of the
    history's text.
    """

    num_messages: int
    digest: bytes
    prompt_length: int
    prompt_digest: bytes
    answer_start: int


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer that a client may go on from by its `id`: see replies.py.

    `messages` is the JSON of those since `previous`, the answer included. `made` is Unix seconds. After it the history
    had `num_tokens`, which are known by `ids_digest`; `asked` is what else went into its prompt.
    """

    id: str
    made: float
    previous: str | None = None
    messages: str = "[]"
    num_tokens: int = 0
    ids_digest: bytes = b""
    asked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class History:
    """A conversation as far as a completed turn took it, its answer included.

    `text` is the rendered prompt and the answer as the client saw it; `seams`, in order, are where
    ids and text part cleanly; `message_ends` tells where each message's content ends, in both.
    The first assistant message begins at token `first_answer`. `digests` are of the conversation up
    to the end of each answer: a later request without an id is known by them. `told` is there where
    a client may spell it otherwise. `replies` are those of its branch, the newest last, and `digests` are of them, too.
    """

    token_ids: array[int]
    text: str
    seams: tuple[Seam, ...]
    first_answer: int
    message_ends: tuple[Seam, ...] = ()
    digests: tuple[bytes, ...] = ()
    told: Told | None = None
    replies: tuple[Reply, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens of prompts and answers, all of them."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Unread:
    """A history that lies in the catalog and not in memory: what may be asked of it without reading it.

    The catalog knows it by `digest`, which is of everything in it: no other can be taken for it, whatever becomes
    of the file. Whoever forks the branch shares it, as a history is shared.
    """

    digest: bytes
    num_tokens: int
    digests: tuple[bytes, ...] = ()


NOTHING = History(array("I"), "", (), 0)
"""What a branch has before its first turn completes."""


def with_replies(history: History, replies: tuple[Reply, ...], digests: tuple[bytes, ...]) -> History:
    """A history that had none, with these; they are found by `digests`."""
    assert not history.replies
    return replace(history, replies=replies, digests=(*history.digests, *digests))


def text_digests(text: str, ends: Sequence[int]) -> tuple[bytes, ...]:
    """Running digests of `text` up to each of the ascending offsets `ends`; 16 bytes each."""
    running = hashlib.blake2b(digest_size=DIGEST_BYTES, person=b"dormouse-text")
    digests, start = [], 0
    for end in ends:
        running.update(text[start:end].encode("utf-8", "surrogatepass"))
        digests.append(running.digest())
        start = end
    return tuple(digests)
