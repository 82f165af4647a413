"""Text -> token ids, with the ids that a branch already ran wherever its text comes again.

    [0, seam)    ids of the branch, spliced in
    [seam, end)  tokenized now

A template renders history as text, and tokenizing that text again need not give the ids the
model ran ("\\n" + "\\n" generated, "\\n\\n" encoded). A seam is safe where a special token stands
on either side of it, since nothing merges across one, or where tokenizing the last few ids again
together with the rest gives the same ids.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.sessions import History, Seam
from models.control_tokens import ControlTokens, Tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHECKED_TOKENS = 8
"""Ids tokenized again where no special token stands at a seam."""

TRIED_SEAMS = 8


@dataclass(frozen=True, slots=True)
class Spliced:
    """Ids of a text; the first `seam.num_tokens` come from `source` (None: all were tokenized now)."""

    ids: array[int]
    source: History | None
    seam: Seam
    rest: Tokens

    def tokens_within(self, text_lengths: Iterable[int]) -> list[int]:
        """For each length, how many tokens lie wholly within so many first characters, as far as is known."""
        known = [] if self.source is None else sorted({Seam(0, 0), *self.source.message_ends, *self.source.seams})
        lengths = [each.text_length for each in known]
        return [
            self.seam.num_tokens + self.rest.within(length - self.seam.text_length)
            if length >= self.seam.text_length
            else known[bisect_right(lengths, length) - 1].num_tokens
            for length in text_lengths
        ]


def splice(text: str, histories: Sequence[History], control: ControlTokens, tokenizer: Tokenizer) -> Spliced:
    """Ids of `text`, spliced at the furthest safe seam of any history."""
    seams = [
        (seam, history)
        for history in histories
        for shared in (common_text(history.text, text),)
        for seam in history.seams
        if 0 < seam.text_length <= shared
    ]
    seams.sort(key=lambda each: each[0].text_length, reverse=True)
    for seam, history in seams[:TRIED_SEAMS]:
        rest = _rest(text[seam.text_length :], history, seam, control, tokenizer)
        if rest is not None:
            return Spliced(history.token_ids[: seam.num_tokens] + array("I", rest.ids), history, seam, rest)
    whole = control.encode(text)
    return Spliced(array("I", whole.ids), None, Seam(0, 0), whole)


def common_text(left: str, right: str) -> int:
    """Length of the longest common prefix; compares slices, which runs in C."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _rest(rest: str, history: History, seam: Seam, control: ControlTokens, tokenizer: Tokenizer) -> Tokens | None:
    """Tokens of what follows a seam, or None where the seam is not safe."""
    if not rest or control.opens(rest):
        return control.encode(rest)
    last = control.content(history.token_ids[seam.num_tokens - 1])
    if last is not None:
        # From the special token on, else a tokenizer that adds a space to what begins a text would add one here.
        return _behind(last, [history.token_ids[seam.num_tokens - 1]], rest, control.encode)
    tail = list(history.token_ids[max(0, seam.num_tokens - CHECKED_TOKENS) : seam.num_tokens])
    tail_text: str = tokenizer.decode(tail, skip_special_tokens=False)
    if not tail_text or not history.text[: seam.text_length].endswith(tail_text):
        return None
    return _behind(tail_text, tail, rest, control.encode)


def _behind(prefix: str, prefix_ids: list[int], rest: str, encode: Callable[[str], Tokens]) -> Tokens | None:
    """Tokens of `rest` when it stands behind `prefix`, if that keeps its ids."""
    both = encode(prefix + rest)
    count = len(prefix_ids)
    if both.ids[:count] != prefix_ids or both.ends[count - 1] != len(prefix):
        return None
    return Tokens(both.ids[count:], [end - len(prefix) for end in both.ends[count:]])
