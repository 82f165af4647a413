"""JSON as it comes, character by character: where a value ends, and the call inside an object."""

from __future__ import annotations

import json


class ValueScanner:
    """Follows one JSON object or array from its first bracket to its last; strings may hold brackets."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    @property
    def is_inside_string(self) -> bool:
        """The last character taken was part of a string, its closing quote excepted."""
        return self._in_string

    @property
    def depth(self) -> int:
        """Brackets open."""
        return self._depth

    def take(self, character: str) -> bool:
        """Take one more; True where it closed the outermost bracket."""
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._in_string = False
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth <= 0
        return False


class CallObject:
    """The object in which a model names a call: `{"name": ..., "arguments": {...}}`, keys in any order.

    `take` returns the part of the arguments that has become known; it holds them back until the name is. Where they
    are a string that holds JSON, as some models write them, that JSON is the arguments.
    """

    NAMES = ("name", "function")
    ARGUMENTS = ("arguments", "parameters")

    def __init__(self) -> None:
        self.raw = ""
        self.name: str | None = None
        self.is_complete = False
        self._scanner = ValueScanner()
        self._key: str | None = None
        self._string_start: int | None = None
        self._value_start: int | None = None
        self._held = ""
        self._has_arguments = False

    def take(self, character: str) -> str:
        """Take one more character of the object, the first being its bracket."""
        was_inside = self._scanner.is_inside_string
        before = self._scanner.depth
        place = len(self.raw)
        self.raw += character
        self.is_complete = self._scanner.take(character)
        depth = self._scanner.depth
        known = ""
        if before == 1 and depth == 1:
            self._at_top(character, place, was_inside)
        elif before == 1 and depth == 2 and self._wants_arguments and character == "{":
            self._value_start = place
            known = character
        elif self._value_start is not None:
            known = character
            if depth == 1:
                self._value_start, self._key = None, None
                self._has_arguments = True
        elif depth == 1:
            self._key = None  # some other object has ended
        if self.is_complete:
            known += "" if self._has_arguments else "{}"
        return self._release(known)

    @property
    def _wants_arguments(self) -> bool:
        return self._key in self.ARGUMENTS and not self._has_arguments

    def _at_top(self, character: str, place: int, was_inside: bool) -> None:
        is_inside = self._scanner.is_inside_string
        if is_inside and not was_inside:
            self._string_start = place
        elif was_inside and not is_inside and self._string_start is not None:
            value = self._string(self.raw[self._string_start : place + 1])
            self._string_start = None
            if self._key is None:
                self._key = value
            elif self._key in self.NAMES and self.name is None:
                self.name = value
            elif self._wants_arguments:
                self._held += value
                self._has_arguments = True
        elif character == "," and not is_inside:
            self._key = None

    @staticmethod
    def _string(spelled: str) -> str:
        try:
            value = json.loads(spelled, strict=False)
        except ValueError:
            return spelled[1:-1]
        return str(value)

    def _release(self, known: str) -> str:
        self._held += known
        if self.name is None:
            return ""
        released, self._held = self._held, ""
        return released
