"""Sizes as people write them: `512MiB`, `1.5GiB`, `20GB`, or a plain number of bytes.

A bare `G` is refused rather than guessed at: tools disagree on whether it means 10^9 or 2^30, and a pool that is 7%
off is found out only under load.
"""

from __future__ import annotations

import re
from fractions import Fraction

UNITS = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgtp", start=1)},
}
_TOKENS = re.compile(r"(?P<number>\d+)(?P<kilo>[kK]?)")
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[a-zA-Z]*)")


def parse_bytes(text: str) -> int:
    """Bytes that `text` names, rounded down.

    Raises:
        ValueError: not a size; the message says how one is written.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write 512MiB, 1.5GiB, 20GB or a number of bytes")
    number, unit = match["number"], match["unit"].lower()
    if unit == "" and "." in number:
        raise ValueError(f"{text!r} is not a whole number of bytes; write a unit, as in {number}GiB")
    if unit and unit not in UNITS:
        hint = f"; write {number}{unit.upper()}B or {number}{unit.upper()}iB" if f"{unit}b" in UNITS else ""
        raise ValueError(f"{text!r} has the unknown unit {match['unit']!r}{hint}")
    return int(Fraction(number) * UNITS[unit or "b"])


def parse_tokens(text: str) -> int:
    """Tokens that `text` names: `8k` and `8K` are 8,192, as context lengths are told.

    Raises:
        ValueError: not a number of tokens.
    """
    match = _TOKENS.fullmatch(text.strip())
    if match is None or int(match["number"]) == 0:
        raise ValueError(f"{text!r} is not a number of tokens; write 8192 or 8k")
    return int(match["number"]) * (1024 if match["kilo"] else 1)


def format_bytes(size: int) -> str:
    """`size` in the largest binary unit that leaves at least one whole of it: `1.5 GiB`, `720 KiB`, `12 B`."""
    for power, letter in ((4, "T"), (3, "G"), (2, "M"), (1, "K")):
        unit = 1024**power
        if size >= unit:
            return f"{size / unit:.4g} {letter}iB"
    return f"{size} B"
