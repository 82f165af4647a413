"""Special tokens belong to the template: what looks like one in a message stays ordinary text.

Messages are marked before rendering: a special token's text inside them is put between two
noncharacters, and the encoder then spells it out in ordinary tokens. (transformers'
`sanitize_control_tokens` does the same but only together with tokenizing, and it also takes
apart the non-special added tokens, such as `<think>`, that a model's own answers are full of.)
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"  # noncharacters: Unicode forbids them in interchanged text
_UNWANTED = re.compile("[\ufdd0-\ufdd3\ud800-\udfff]")
"""Our own marks, which must not be forged, and lone surrogates, which no tokenizer takes."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Ids of a text, and for each the offset in characters where its part of the text ends (ascending)."""

    ids: list[int]
    ends: list[int]

    def within(self, text_length: int) -> int:
        """How many tokens lie wholly within the first `text_length` characters."""
        return bisect_right(self.ends, text_length)


class ControlTokens:
    """Encodes texts in which a tokenizer's special tokens are the template's own, and marks those that are not."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._contents = {token_id: token.content for token_id, token in added.items() if token.special}
        longest_first = sorted(self._contents.values(), key=len, reverse=True)
        alternatives = "|".join(map(re.escape, longest_first)) or "(?!)"  # (?!) matches nothing
        self._special = re.compile(alternatives)
        self._marked = re.compile(f"{_OPEN}(.*?){_CLOSE}|[{_OPEN}{_CLOSE}]", re.DOTALL)

    def mark(self, text: str) -> str:
        """`text` with every special token in it marked as ordinary text."""
        return self._special.sub(f"{_OPEN}\\g<0>{_CLOSE}", _UNWANTED.sub(_replacement, text))

    def unmark(self, text: str) -> str:
        """A marked text without its marks."""
        return text.replace(_OPEN, "").replace(_CLOSE, "")

    def last(self, text: str) -> int | None:
        """Where the last special token that stands unmarked in a marked text begins, if only white space follows."""
        found = None
        for each in self._special.finditer(text):
            if text[each.end() : each.end() + 1] != _CLOSE:
                found = each
        return found.start() if found is not None and not text[found.end() :].strip() else None

    def mark_all(self, value: object) -> object:
        """`mark` applied to every string within lists and dicts, keys excepted."""
        if isinstance(value, str):
            return self.mark(value)
        if isinstance(value, dict):
            return {key: self.mark_all(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark_all(each) for each in value]
        return value

    def content(self, token_id: int) -> str | None:
        """The text of a special token; None for any other id."""
        return self._contents.get(token_id)

    def opens(self, text: str) -> bool:
        """`text` begins with a special token."""
        return self._special.match(text) is not None

    def encode(self, text: str) -> Tokens:
        """Ids of a marked text; adds no special tokens, since templates write their own."""
        ids: list[int] = []
        ends: list[int] = []
        for start, piece in self._pieces(text):
            encoding = self._tokenizer.encode(piece, add_special_tokens=False)
            ids += encoding.ids
            ends += [start + end for _, end in encoding.offsets]
        return Tokens(ids, ends)

    def _pieces(self, text: str) -> Iterator[tuple[int, str]]:
        """Parts of a marked text with their offsets, cut so that no marked special token is whole in one."""
        start = 0
        for found in self._marked.finditer(text):
            if found.start() > start:
                yield start, text[start : found.start()]
            # A template may take the two marks apart (`split`); a lone one is dropped.
            if found[1] is not None:
                yield from self._spelled(found.start(1), found[1])
            start = found.end()
        if start < len(text):
            yield start, text[start:]

    def _spelled(self, start: int, text: str) -> Iterator[tuple[int, str]]:
        """Cut inside each special token of `text`, after its first character."""
        while (found := self._special.search(text)) is not None:
            cut = found.start() + 1
            yield start, text[:cut]
            start, text = start + cut, text[cut:]
        if text:
            yield start, text


def _replacement(found: re.Match[str]) -> str:
    return "\ufffd" if found[0] >= "\ud800" and found[0] <= "\udfff" else ""
