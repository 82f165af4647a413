"""How families of models write calls of tools; each syntax is read as it comes.

A reader is begun behind one of its syntax's `openings` and takes text until the calls are over:

    feed -> Reading      deltas, and what is left of the text once they are over
    a reader that finds no call where one should be gives its text back: it was content after all
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from models.deltas import CallArguments, CallBegins, Delta
from models.json_scan import CallObject, ValueScanner
from models.markers import could_begin

NewCall = Callable[[str], tuple[int, str]]
"""A tool's name -> number and id of the call that now begins."""


@dataclass(slots=True)
class Reading:
    """What one feed came to. `rest` is None while the calls go on; `returned` was no call."""

    deltas: list[Delta] = field(default_factory=list)
    rest: str | None = None
    returned: str = ""


class CallReader(Protocol):
    """Reads calls from behind an opening."""

    def feed(self, text: str) -> Reading:
        """Take more text."""

    def finish(self) -> str:
        """No more comes; what was read and is no call."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """One family's. `specials` are special tokens that must be seen; ids of calls look as the family wants them."""

    name: str
    openings: tuple[str, ...]
    reader: Callable[[str, NewCall], CallReader]
    specials: tuple[str, ...] = ()
    starts_bare: str = ""
    """A call may also stand at the very beginning of an answer, without an opening, if this begins it."""
    short_ids: bool = False


class ObjectCalls:
    """Calls as objects: `{"name": ..., "arguments": {...}}`, one or more, up to one of the `ends`."""

    def __init__(self, opening: str, new_call: NewCall, ends: tuple[str, ...], between: str) -> None:
        self._opening = opening
        self._new_call = new_call
        self._ends = ends
        self._between = between
        self._object: CallObject | None = None
        self._index: int | None = None
        self._pending = ""
        self._consumed = ""  # since the last call, in case that it was no call
        self._found = False

    def feed(self, text: str) -> Reading:
        """As CallReader's."""
        reading = Reading()
        text, self._pending = self._pending + text, ""
        place = 0
        while place < len(text):
            if self._object is not None:
                place = self._within(text, place, reading)
                continue
            end = next((end for end in self._ends if text.startswith(end, place)), None)
            if end is not None:
                return self._over(reading, text[place + len(end) :], end)
            if could_begin(text[place:], self._ends):
                self._pending = text[place:]
                break
            if text[place] == "{":
                self._object, self._index = CallObject(), None
            elif text[place] in self._between:
                self._consumed += text[place]
                place += 1
            else:
                return self._over(reading, text[place:], "")
        return reading

    def _within(self, text: str, place: int, reading: Reading) -> int:
        assert self._object is not None
        arguments = ""
        while place < len(text) and not self._object.is_complete:
            arguments += self._object.take(text[place])
            place += 1
        if self._index is None and self._object.name is not None:
            self._index, call_id = self._new_call(self._object.name)
            self._found = True
            reading.deltas.append(CallBegins(self._index, call_id, self._object.name))
        if self._index is not None and arguments:
            reading.deltas.append(CallArguments(self._index, arguments))
        if self._object.is_complete:
            self._consumed = "" if self._index is not None else self._consumed + self._object.raw
            self._object = None
        return place

    def _over(self, reading: Reading, rest: str, end: str) -> Reading:
        reading.rest = rest
        if not self._found:
            reading.returned = self._opening + self._consumed + end
        return reading

    def finish(self) -> str:
        """As CallReader's."""
        if self._found:
            return ""
        return self._opening + self._consumed + ("" if self._object is None else self._object.raw) + self._pending


class HeadedCalls:
    """Calls as a header that names the tool, and then the arguments' object.

    `name_of` reads the header (None: it names nothing); `again` opens a further call, `skipped` may stand between.
    """

    def __init__(
        self,
        opening: str,
        new_call: NewCall,
        name_of: Callable[[str], str | None],
        ends: tuple[str, ...],
        skipped: tuple[str, ...],
    ) -> None:
        self._opening = opening
        self._new_call = new_call
        self._name_of = name_of
        self._ends = ends
        self._skipped = skipped
        self._header = ""
        self._scanner: ValueScanner | None = None
        self._index = 0
        self._found = False
        self._pending = ""

    def feed(self, text: str) -> Reading:
        """As CallReader's."""
        reading = Reading()
        text, self._pending = self._pending + text, ""
        place = 0
        while place < len(text):
            if self._scanner is not None:
                place = self._arguments(text, place, reading)
                continue
            if not self._header.strip():
                known = next((one for one in (*self._ends, *self._skipped) if text.startswith(one, place)), None)
                if known is not None:
                    place += len(known)
                    if known in self._ends:
                        return self._over(reading, text[place:], known)
                    continue
                if could_begin(text[place:], (*self._ends, *self._skipped)):
                    self._pending = text[place:]
                    break
                if self._found and not self._skipped and not text[place].isspace():
                    return self._over(reading, text[place:], "")
            if text[place] == "{":
                name = self._name_of(self._header)
                if name is None:
                    return self._over(reading, text[place:], "")
                self._index, call_id = self._new_call(name)
                self._found, self._header, self._scanner = True, "", ValueScanner()
                reading.deltas.append(CallBegins(self._index, call_id, name))
                continue
            self._header += text[place]
            place += 1
        return reading

    def _arguments(self, text: str, start: int, reading: Reading) -> int:
        assert self._scanner is not None
        place, is_over = start, False
        while place < len(text) and not is_over:
            is_over = self._scanner.take(text[place])
            place += 1
        reading.deltas.append(CallArguments(self._index, text[start:place]))
        if is_over:
            self._scanner = None
        return place

    def _over(self, reading: Reading, rest: str, end: str) -> Reading:
        reading.rest = rest
        if not self._found:
            reading.returned = self._opening + self._header + end
        elif self._header.strip():
            reading.returned = self._header
        return reading

    def finish(self) -> str:
        """As CallReader's."""
        return "" if self._found else self._opening + self._header + self._pending


def _hermes(opening: str, new_call: NewCall) -> CallReader:
    return ObjectCalls(opening, new_call, ("</tool_call>",), " \t\r\n")


def _llama(opening: str, new_call: NewCall) -> CallReader:
    return ObjectCalls(opening, new_call, ("<|eom_id|>", "<|eot_id|>"), " \t\r\n;,")


MISTRAL_CALLS = "[TOOL_CALLS]"
_MISTRAL_NAME = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\][\w]*)?(?:\[ARGS\])?\s*")


class _MistralCalls:
    """A list of objects, or (from its eleventh tokenizer on) a name and then the arguments: the first letter tells."""

    def __init__(self, opening: str, new_call: NewCall) -> None:
        self._opening = opening
        self._new_call = new_call
        self._reader: CallReader | None = None
        self._blank = ""

    def feed(self, text: str) -> Reading:
        """As CallReader's."""
        if self._reader is None:
            text = self._blank + text
            if not text.strip():
                self._blank = text
                return Reading()
            if text.lstrip()[0] in "[{":
                self._reader = ObjectCalls(self._opening, self._new_call, ("</s>",), " \t\r\n,[]")
            else:
                self._reader = HeadedCalls(self._opening, self._new_call, _mistral_name, ("</s>",), ())
        return self._reader.feed(text)

    def finish(self) -> str:
        """As CallReader's."""
        return self._opening + self._blank if self._reader is None else self._reader.finish()


def _mistral_name(header: str) -> str | None:
    found = _MISTRAL_NAME.fullmatch(header)
    return None if found is None else found[1]


DEEPSEEK_CALLS = "<\uff5ctool\u2581calls\u2581begin\uff5c>"
_CALL, _SEP = "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581sep\uff5c>"
_CALL_END, _CALLS_END = "<\uff5ctool\u2581call\u2581end\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"


def _deepseek(opening: str, new_call: NewCall) -> CallReader:
    return HeadedCalls(opening, new_call, _deepseek_name, (_CALLS_END,), (_CALL, _CALL_END, "\n", "```"))


def _deepseek_name(header: str) -> str | None:
    """V3 and R1: `function<sep>NAME`, then a fence; V3.1: `NAME<sep>`."""
    kind, sep, name = header.replace("```json", "").partition(_SEP)
    chosen = (name.strip() or kind.strip()) if sep else ""
    return chosen or None


HERMES = CallSyntax("hermes", ("<tool_call>",), _hermes, ("<tool_call>", "</tool_call>"))
LLAMA = CallSyntax("llama3", ("<|python_tag|>",), _llama, ("<|python_tag|>",), starts_bare="{")
MISTRAL = CallSyntax("mistral", (MISTRAL_CALLS,), _MistralCalls, (MISTRAL_CALLS, "[ARGS]", "[CALL_ID]"), short_ids=True)
DEEPSEEK = CallSyntax("deepseek", (DEEPSEEK_CALLS,), _deepseek, (DEEPSEEK_CALLS, _CALL, _SEP, _CALL_END, _CALLS_END))
