"""`dormouse top`: a running server's state in the terminal, as /admin shows it in a browser.

Everything comes from `/admin/api/state`: the verdict and the ten numbers of a window as the server words them, the
tiers by what their slots hold, and the last turns.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import Any

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from app.admin import numbers
from app.chat_client import connect
from app.configuration import CLIENT_KEY_VARIABLE

WINDOWS = ("15m", "1h", "24h")
TURNS_SHOWN = 8
BAR = 30
"""Characters of a tier's bar."""

NO_LOSS = ("new_session", "new_branch", "cache_disabled")
"""Reasons of turns that had no history to lose."""

TIER_NAMES = {"hbm": "HBM", "dram": "DRAM", "nvme": "NVMe"}
LEVELS = {"working": "green", "asleep": "blue", "change": "yellow", "broken": "red"}
TONES = {"good": "green", "warm": "yellow", "bad": "red"}

State = Mapping[str, Any]


class TopFailed(Exception):
    """The server cannot be watched; the text is for who asked."""


def top(url: str, key: str | None, window: str, seconds: float, *, once: bool, as_json: bool) -> int:
    """Show the state every `seconds` until Ctrl-C, or once; the exit status is 1 where it cannot be had."""
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    with connect(url, key) as http:
        try:
            if as_json:
                _print_states(http, seconds, once=once)
            elif once:
                # A pipe has no width of its own, and a table cut to 80 columns would be of no use to grep.
                width = None if sys.stdout.isatty() else 120
                Console(highlight=False, width=width).print(screen(state_of(http), window))
            else:
                _watch(http, window, seconds)
        except TopFailed as exc:
            errors.print(f"dormouse: {exc}", markup=False)
            return 1
        except KeyboardInterrupt:
            return 0
    return 0


def state_of(http: httpx.Client) -> State:
    """The server's state now.

    Raises:
        TopFailed: no server, no key, or no Dormouse.
    """
    try:
        reply = http.get("/admin/api/state")
    except httpx.ConnectError as exc:
        raise TopFailed(f"no server answers at {http.base_url}; start one with `dormouse serve`") from exc
    except httpx.HTTPError as exc:
        raise TopFailed(f"the server went away: {exc}") from exc
    if reply.status_code in (401, 403):
        raise TopFailed(f"/admin asks for its key: put the admin key into {CLIENT_KEY_VARIABLE}")
    try:
        state: State = reply.raise_for_status().json()
        state["tiers"]
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as exc:
        raise TopFailed(f"{http.base_url} does not answer as Dormouse would: {exc!r}") from exc
    return state


def _print_states(http: httpx.Client, seconds: float, *, once: bool) -> None:
    while True:
        print(json.dumps(state_of(http)), flush=True)
        if once:
            return
        time.sleep(seconds)


def _watch(http: httpx.Client, window: str, seconds: float) -> None:
    console = Console(highlight=False)
    with Live(screen(state_of(http), window), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(seconds)
            try:
                shown = screen(state_of(http), window)
            except TopFailed as exc:
                shown = Text(f"{exc}; still looking", style="red")  # it may come back: a restart takes seconds
            live.update(shown, refresh=True)


# --- what is shown --------------------------------------------------------------------------


def screen(state: State, window: str) -> RenderableType:
    """All of it; what a server does not tell is left out."""
    parts: list[RenderableType] = [_title(state), Text()]
    if verdict := state.get("verdict"):
        parts += [Text(verdict["sentence"], style=f"bold {LEVELS.get(verdict['level'], '')}".strip()), Text()]
    parts += [_numbers(state, window), Text(), _tiers(state), Text(), _turns(state)]
    if lost := _misses(state):
        parts += [Text(), lost]
    if turns := state.get("last_turns"):
        parts += [Text(), _last_turns(turns[:TURNS_SHOWN])]
    return Group(*parts)


def _title(state: State) -> Text:
    disk = state.get("nvme") or {}
    health = disk.get("health", {})
    title = Text.assemble(
        (f"{state['model']}", "bold"), f"  dormouse {state['version']}, up {numbers.duration(state['uptime_seconds'])}"
    )
    if state.get("is_draining"):
        title.append("  shutting down", style="yellow")
    if reasons := health.get("reasons"):
        title.append(f"  disk: {reasons[0]}", style="red")
    return title


def _numbers(state: State, window: str) -> Table:
    """The page's tiles; of a server that has none, the share of history reused since its start."""
    table = _table("", f"last {window}", "")
    tiles = state.get("tiles", {}).get(window)
    if tiles is None:
        tokens = state["tokens"]
        reused = sum(tokens[tier] for tier in TIER_NAMES)
        had = reused + tokens["recomputed"]
        tiles = [
            {
                "label": "History reused",
                "value": f"{numbers.percent(reused, had)}%",
                "detail": f"{numbers.count(reused)} of {numbers.count(had)} tokens, since the start",
            }
        ]
    for tile in tiles:
        table.add_row(
            Text(tile["label"]), Text(tile["value"], style=TONES.get(tile.get("tone"), "")), Text(tile["detail"])
        )
    return table


def _tiers(state: State) -> Table:
    table = _table("tier", "held", "", "of", "sessions' tokens", "")
    for counts in state["tiers"]:
        used = counts["capacity"] - counts["free"]
        health = counts.get("health", "ok")
        table.add_row(
            Text(TIER_NAMES[counts["tier"]]),
            Text(numbers.size(used * state["block_bytes"])),
            bar(used, counts["capacity"]),
            Text(numbers.size(counts["capacity"] * state["block_bytes"])),
            Text(numbers.count(used * state["block_tokens"])),
            Text("" if health == "ok" else health, style="red"),
        )
    return table


def bar(part: int, whole: int) -> Text:
    """How much of `whole` is `part`."""
    filled = round(BAR * part / whole) if whole else 0
    return Text.assemble(("█" * filled, "cyan"), ("░" * (BAR - filled), "dim"), f" {numbers.percent(part, whole)}%")


def _turns(state: State) -> Text:
    turns, ended = state["turns"], state["turns_ended"]
    now = f"{turns['granted']} running, {turns['waiting'] + state['waiting_for_their_key']} waiting"
    now += f", {turns['suspended']} suspended; {numbers.count(state['sessions'])} sessions"
    told = ", ".join(f"{numbers.count(count)} {outcome.replace('_', ' ')}" for outcome, count in ended.items() if count)
    return Text(f"turns  {now}; ended since the start: {told or 'none'}")


def _misses(state: State) -> Text | None:
    found = {reason: count for reason, count in state["misses"].items() if count and reason not in NO_LOSS}
    if not found:
        return None
    worst = sorted(found.items(), key=lambda each: -each[1])
    return Text("computed again  " + ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in worst))


def _last_turns(turns: list[Mapping[str, Any]]) -> Table:
    table = _table("session", "turn", "prompt", "reused", "computed again", "from", "first token", "why")
    for turn in turns:
        first = turn["first_token_ms"]
        table.add_row(
            Text(turn["session"], overflow="ellipsis", no_wrap=True),
            Text(str(turn["turn"])),
            Text(numbers.count(turn["prompt_tokens"])),
            Text(numbers.count(sum(turn["reused"].values()))),
            Text(numbers.count(turn["recomputed"])),
            Text(TIER_NAMES.get(turn["woke_from"], "")),
            Text("" if first is None else f"{first:.0f} ms"),
            Text((turn["miss"] or "").replace("_", " ")),
        )
    return table


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in headings:
        table.add_column(heading, max_width=40 if heading == "session" else None)
    return table
