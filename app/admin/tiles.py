"""The ten numbers of a window, as the page and the terminal show them: a value, and what it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from app.admin.counting import RECOMPUTED, TIERS
from app.admin.numbers import count, duration, percent, seconds_text, size

if TYPE_CHECKING:
    from app.admin.windows import Spread, Window

NONE = "\N{EN DASH}"
"""Where nothing was counted that a number could be of."""

TIER_NAMES = {"hbm": "HBM", "dram": "DRAM", "nvme": "NVMe"}

FULL_SHARE = 0.05
"""A tier with less of it free is full: what comes makes something go."""

Tone = Literal["plain", "good", "warm", "bad"]


@dataclass(frozen=True, slots=True)
class Tile:
    """`key` is for programs; the rest is text."""

    key: str
    label: str
    value: str
    detail: str
    tone: Tone = "plain"


@dataclass(frozen=True, slots=True)
class Now:
    """What a window does not know: the state of this moment. Bytes and tokens; rates are of a day."""

    kept: int = 0
    kept_by_tier: tuple[int, int, int] = (0, 0, 0)
    kept_tokens: int = 0
    hbm_tokens: int = 0
    running: int = 0
    waiting: int = 0
    nvme_bytes_last_day: int = 0
    nvme_rated_bytes_per_day: int = 0
    has_nvme: bool = False
    free_blocks_below: int = 0
    """Of the lowest tier that there is, which has `blocks_below`."""
    blocks_below: int = 0
    window_hours: float = 1.0
    """As long as the window has been counting."""
    worst_client: str = ""


def tiles(window: Window, now: Now) -> list[Tile]:
    """In the order in which they are shown."""
    return [
        _reused(window),
        _saved(window),
        _kept(now),
        _first_tokens(window),
        _wakes(window),
        _lost_by_us(window),
        _lost_by_clients(window, now),
        _prefetches(window),
        _written(now),
        _headroom(window, now),
    ]


def _reused(window: Window) -> Tile:
    reused = sum(window.reused.values())
    had = reused + window.recomputed
    if not had:
        return Tile("reused", "History reused", NONE, "no turn had a history")
    share = percent(reused, had)
    tone: Tone = "good" if share >= 90 else "plain" if share >= 60 else "warm"
    return Tile("reused", "History reused", f"{share}%", f"{count(reused)} of {count(had)} tokens", tone)


def _saved(window: Window) -> Tile:
    value = duration(window.saved_seconds) if window.saved_seconds > 0 else NONE
    return Tile("saved", "Prefill saved", value, "estimate, waking time taken off")


def _kept(now: Now) -> Tile:
    places = " \N{MIDDLE DOT} ".join(
        f"{count(sessions)} {TIER_NAMES[tier]}" for tier, sessions in zip(TIERS, now.kept_by_tier, strict=True)
    )
    times = f" \N{MIDDLE DOT} {_times(now.kept_tokens / now.hbm_tokens)} HBM" if now.hbm_tokens else ""
    return Tile("kept", "Sessions kept", count(now.kept), f"{places}{times}")


def _times(ratio: float) -> str:
    return f"{ratio:.1f}\N{MULTIPLICATION SIGN}" if ratio < 10 else f"{ratio:.0f}\N{MULTIPLICATION SIGN}"


def _first_tokens(window: Window) -> Tile:
    awake, again = window.first_token["hbm"], window.first_token[RECOMPUTED]
    value = _p50(awake) if awake.count or not window.woken_first_token.count else _p50(window.woken_first_token)
    detail = f"woken {_p50(window.woken_first_token)} \N{MIDDLE DOT} recomputed {_p50(again)}"
    label = "First token, awake" if awake.count or not window.woken_first_token.count else "First token, woken"
    return Tile("first_token", label, value, detail)


def _p50(spread: Spread) -> str:
    return NONE if spread.p50 is None else seconds_text(spread.p50)


def _wakes(window: Window) -> Tile:
    wakes = window.wakes
    if wakes.p50 is None or wakes.p95 is None or wakes.p99 is None:
        return Tile("wakes", "Wake, p50 / p95 / p99", NONE, "no turn had to wait for one")
    within = percent(window.wakes_within_goal or 0.0, 1.0)
    detail = f"{count(wakes.count)} wakes \N{MIDDLE DOT} {within}% within 100 ms"
    return Tile("wakes", "Wake, p50 / p95 / p99", in_one_unit(wakes.p50, wakes.p95, wakes.p99), detail)


def in_one_unit(*seconds: float) -> str:
    """Latencies side by side: `1.5 / 17 / 31 ms`."""
    factor, unit = (1, "s") if max(seconds) >= 1 else (1000, "ms")
    scaled = [each * factor for each in seconds]
    texts = [f"{each:.0f}" if each >= 9.95 else f"{each:.1f}" if each >= 0.95 else f"{each:.2g}" for each in scaled]
    return f"{' / '.join(texts)} {unit}"


def _lost_by_us(window: Window) -> Tile:
    by_us = {reason: tokens for reason, tokens in window.lost.items() if tokens and reason != "prompt_diverged"}
    worst = sorted(by_us.items(), key=lambda each: -each[1])[:2]
    detail = " \N{MIDDLE DOT} ".join(f"{count(tokens)} {reason.replace('_', ' ')}" for reason, tokens in worst)
    tone: Tone = "bad" if window.lost_by_us else "good"
    return Tile("lost_by_us", "Tokens lost by us", count(window.lost_by_us), detail or "nothing was", tone)


def _lost_by_clients(window: Window, now: Now) -> Tile:
    lost = window.lost_by_clients
    detail = "no prompt left its history" if not lost else f"diverged, most by {now.worst_client or 'unknown'}"
    return Tile("lost_by_clients", "Lost by clients", count(lost), detail, "warm" if lost else "good")


def _prefetches(window: Window) -> Tile:
    useful, late, wasted = (window.prefetches[each] for each in ("useful", "late", "wasted"))
    detail = f"{count(late)} late \N{MIDDLE DOT} {count(wasted)} wasted"
    return Tile("prefetches", "Useful prefetches", count(useful), detail)


def _written(now: Now) -> Tile:
    if not now.has_nvme:
        return Tile("written", "NVMe written a day", NONE, "nothing is kept on disk")
    rated = now.nvme_rated_bytes_per_day
    detail = f"{percent(now.nvme_bytes_last_day, rated)}% of {size(rated)} rated" if rated else "no rating is known"
    tone: Tone = "warm" if rated and now.nvme_bytes_last_day > 0.8 * rated else "plain"
    return Tile("written", "NVMe written a day", size(now.nvme_bytes_last_day), detail, tone)


def _headroom(window: Window, now: Now) -> Tile:
    detail = f"{count(now.running)} running \N{MIDDLE DOT} {count(now.waiting)} waiting \N{MIDDLE DOT} "
    detail += f"{count(window.refused)} refused"
    hours = hours_left(window, now)
    value = NONE if hours is None else "now" if hours == 0 else until(hours)
    tone: Tone = "bad" if window.refused else "warm" if hours is not None and hours < 1 else "plain"
    return Tile("headroom", "Until it forgets", value, detail, tone)


def until(hours: float) -> str:
    """`over a month` is as far as a guess is worth anything."""
    return "over a month" if hours > 24 * 30 else duration(hours * 3600)


def hours_left(window: Window, now: Now) -> float | None:
    """Until the lowest tier is full, at the window's pace; 0 where it forgets already, None where nothing grows."""
    if now.free_blocks_below < FULL_SHARE * now.blocks_below and (window.evicted or window.displaced):
        return 0.0
    if not window.published or not now.window_hours:
        return None
    return now.free_blocks_below / (window.published / now.window_hours)
