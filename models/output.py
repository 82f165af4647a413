"""The text of an answer -> what it consists of, while it comes.

    [reasoning] content [calls content]...

No part of a marker is ever given out. Line breaks that only set a thought or a call apart are dropped, as the
templates that put them back expect. What opens no call after all comes out as the content it is.
"""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from models.deltas import CallBegins, Content, Delta, Reasoning, Said
from models.markers import first_of, suspect

if TYPE_CHECKING:
    from models.call_syntax import CallReader, CallSyntax

_ID_LETTERS = string.ascii_letters + string.digits


class OutputParser(Protocol):
    """Reads one answer."""

    @property
    def is_reasoning(self) -> bool:
        """What comes now is a thought."""

    def feed(self, text: str) -> list[Delta]:
        """Take more of the text; what it adds."""

    def finish(self) -> list[Delta]:
        """No more text comes; what was held back."""


@dataclass(frozen=True, slots=True)
class ThoughtMarkers:
    """What a thought stands between."""

    opening: str
    closing: str


class PlainParser:
    """All of it is content."""

    is_reasoning = False

    def feed(self, text: str) -> list[Delta]:
        """As OutputParser's."""
        return [Content(text)] if text else []

    def finish(self) -> list[Delta]:
        """As OutputParser's."""
        return []


class CallNumbers:
    """Numbers an answer's calls and gives them ids."""

    def __init__(self, short_ids: bool = False) -> None:
        self._count = 0
        self._short_ids = short_ids

    def __call__(self, _name: str) -> tuple[int, str]:
        self._count += 1
        letters = "".join(secrets.choice(_ID_LETTERS) for _ in range(9 if self._short_ids else 24))
        return self._count - 1, letters if self._short_ids else f"call_{letters}"


class MarkedParser:
    """Thoughts and calls between markers.

    `is_thinking`: the prompt has opened a thought already. Without a `syntax` there are no calls.
    """

    def __init__(
        self, thoughts: ThoughtMarkers | None, syntax: CallSyntax | None, *, is_thinking: bool = False
    ) -> None:
        self._thoughts = thoughts
        self._syntax = syntax
        self._numbers = CallNumbers(syntax is not None and syntax.short_ids)
        self._reader: CallReader | None = None
        self._text = ""  # not read yet
        self._blank = ""  # white space that is content only if more content follows
        self._drops_breaks = is_thinking  # at the start of a thought, and behind one
        self._has_begun = False
        self.is_reasoning = is_thinking

    def feed(self, text: str) -> list[Delta]:
        """As OutputParser's."""
        self._text += text
        deltas: list[Delta] = []
        while self._text and self._step(deltas):
            pass
        return _merged(deltas)

    def finish(self) -> list[Delta]:
        """As OutputParser's."""
        deltas: list[Delta] = []
        if self._reader is not None:
            # What it still holds was part of a call, or else it was content.
            self._say(self._reader.finish(), deltas)
            self._reader = None
        self._say(self._text, deltas)
        self._text = ""
        if self._blank and not self.is_reasoning:
            deltas.append(Content(self._blank))
        self._blank = ""
        return _merged(deltas)

    def _step(self, deltas: list[Delta]) -> bool:
        """Read some of the text; False where more must come first."""
        if self._reader is not None:
            return self._read_calls(deltas)
        if self.is_reasoning:
            assert self._thoughts is not None
            return self._until((self._thoughts.closing,), deltas)
        if not self._has_begun and self._begins_bare():
            return False if not self._text.strip() else self._open_bare()
        return self._until(self._openings, deltas)

    @property
    def _openings(self) -> tuple[str, ...]:
        # A thought comes first or not at all: later its marker is a word like another.
        thought = (self._thoughts.opening,) if self._thoughts is not None and not self._has_begun else ()
        return (*thought, *(self._syntax.openings if self._syntax is not None else ()))

    def _begins_bare(self) -> bool:
        if self._syntax is None or not self._syntax.starts_bare:
            return False
        text = self._text.lstrip()
        return not text or text.startswith(self._syntax.starts_bare)

    def _open_bare(self) -> bool:
        assert self._syntax is not None
        self._has_begun = True
        self._reader = self._syntax.reader("", self._numbers)
        return True

    def _until(self, markers: tuple[str, ...], deltas: list[Delta]) -> bool:
        """Give out text up to a marker and pass it; what may be the beginning of one is held back."""
        found = first_of(self._text, markers)
        if found is not None:
            place, marker = found
            had_begun = self._has_begun
            self._say(self._text[:place], deltas)
            if self._has_begun and not had_begun:
                self._text = self._text[place:]
                return True  # behind a first word fewer markers are one
            self._text = self._text[place + len(marker) :]
            self._pass(marker)
            return True
        held = suspect(self._text, markers)
        shown = len(self._text) - held
        self._say(self._text[:shown], deltas)
        self._text = self._text[shown:]
        return False

    def _pass(self, marker: str) -> None:
        self._blank = ""
        if self._thoughts is not None and marker == (
            self._thoughts.closing if self.is_reasoning else self._thoughts.opening
        ):
            self.is_reasoning = not self.is_reasoning
            self._drops_breaks = True
            self._has_begun = True
            return
        assert self._syntax is not None
        self._has_begun = True
        self._reader = self._syntax.reader(marker, self._numbers)

    def _read_calls(self, deltas: list[Delta]) -> bool:
        assert self._reader is not None
        reading = self._reader.feed(self._text)
        deltas += reading.deltas
        self._text = ""
        if reading.rest is None:
            return False
        self._reader = None
        self._say(reading.returned, deltas)
        self._text = reading.rest
        return bool(self._text)

    def _say(self, text: str, deltas: list[Delta]) -> None:
        if self._drops_breaks:
            text = text.lstrip("\r\n")
        if not text:
            return
        self._drops_breaks = False
        self._has_begun = self._has_begun or bool(text.strip())
        text = self._blank + text
        waits = self._syntax is not None or self.is_reasoning or (self._thoughts is not None and not self._has_begun)
        kept = text.rstrip() if waits else text
        self._blank = text[len(kept) :]
        if kept:
            deltas.append(Reasoning(kept) if self.is_reasoning else Content(kept))


def parsed(parser: OutputParser, text: str) -> Said:
    """A whole text read at once."""
    said = Said()
    for delta in (*parser.feed(text), *parser.finish()):
        said.add(delta)
    return said


def _merged(deltas: list[Delta]) -> list[Delta]:
    """Neighbouring texts of one kind as one."""
    merged: list[Delta] = []
    for delta in deltas:
        last = merged[-1] if merged else None
        if isinstance(delta, Content) and isinstance(last, Content):
            merged[-1] = Content(last.text + delta.text)
        elif isinstance(delta, Reasoning) and isinstance(last, Reasoning):
            merged[-1] = Reasoning(last.text + delta.text)
        else:
            merged.append(delta)
    return merged


def has_call(deltas: list[Delta]) -> bool:
    """A call begins among them."""
    return any(isinstance(delta, CallBegins) for delta in deltas)
