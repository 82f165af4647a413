"""Markers in text that comes in pieces: what might yet become one is held back."""

from __future__ import annotations

from collections.abc import Iterable


def could_begin(text: str, markers: Iterable[str]) -> bool:
    """The whole of `text` is a proper beginning of one of `markers`."""
    return any(len(text) < len(marker) and marker.startswith(text) for marker in markers)


def suspect(text: str, markers: Iterable[str]) -> int:
    """Length of the longest end of `text` that is a proper beginning of one of `markers`."""
    markers = tuple(markers)
    longest = max(map(len, markers), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        if could_begin(text[-length:], markers):
            return length
    return 0


def first_of(text: str, markers: Iterable[str]) -> tuple[int, str] | None:
    """Where the first marker in `text` begins, and which it is; the longer of two at one place."""
    found = [(text.find(marker), -len(marker), marker) for marker in markers]
    places = sorted(each for each in found if each[0] >= 0)
    return (places[0][0], places[0][2]) if places else None
