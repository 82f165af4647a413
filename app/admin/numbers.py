"""Numbers as people read them."""

from __future__ import annotations

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def count(value: float) -> str:
    """`12`, `1,234`, `56.7k`, `8.9M`."""
    if value < 10_000:
        return f"{value:,.0f}"
    for limit, divisor, unit in ((1e6, 1e3, "k"), (1e9, 1e6, "M")):
        if value < 0.9995 * limit:
            return f"{value / divisor:.3g}{unit}"
    return f"{value / 1e9:.3g}G"


def size(value: float) -> str:
    """Bytes in the unit that leaves at most four digits."""
    for unit in UNITS[:-1]:
        if value < 1000:
            return f"{value:.3g} {unit}" if unit != "B" else f"{value:.0f} B"
        value /= 1024
    return f"{value:.3g} {UNITS[-1]}"


def duration(seconds: float) -> str:
    """`0 s`, `59 s`, `12 min`, `2 h 41 min`, `5 d`; what is past is nothing."""
    whole = max(0, int(seconds))
    if 3600 <= whole < 36_000 and whole % 3600 >= 60:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    for limit, divisor, unit in ((60, 1, "s"), (3600, 60, "min"), (172_800, 3600, "h")):
        if whole < limit:
            return f"{whole // divisor} {unit}"
    return f"{whole // 86_400} d"


def seconds_text(seconds: float) -> str:
    """A latency: `0.8 ms`, `81 ms`, `1.64 s`, `25 s`."""
    if seconds < 0.9995:
        milliseconds = seconds * 1000
        return f"{milliseconds:.1f} ms" if milliseconds < 9.95 else f"{milliseconds:.0f} ms"
    return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.0f} s"


def percent(part: float, whole: float) -> int:
    """Rounded, but never to all or nothing where it is neither."""
    if whole <= 0 or part <= 0:
        return 0
    return 100 if part >= whole else min(99, max(1, round(100 * part / whole)))
