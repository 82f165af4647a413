"""Makes the traces in `bench/traces` from the ones that were published; bench/traces/README.md says which and why.

    python bench/make_traces.py conversation mooncake_conversation_trace.jsonl.gz bench/traces/conversation.jsonl.gz
    python bench/make_traces.py agentic agentic_claudecode.jsonl.gz bench/traces/agentic.jsonl.gz

Neither source has texts. The first has no sessions either: a request goes on with the chain whose last request it
repeats up to its last block. What it shares with others but does not go on from is a common beginning.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

MOONCAKE_BLOCK = 512
MOONCAKE_TICK_SECONDS = 3.0
"""Times there fall on ticks; within one they are spread."""

LEAST_GAP_SECONDS = 0.01
CONVERSATION_SECONDS = 1200.0
AGENTIC_SESSIONS = 64
AGENTIC_REQUESTS = 48
"""Of a session, at most."""

AGENTIC_SECONDS = 3600.0
"""Of a session, at most: what comes after longer breaks would only stretch the whole."""

AGENTIC_START_SECONDS = 900.0
"""Its sessions all begin at 0; here they begin one after the other within this."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request, as bench.trace reads it."""

    session: int
    at: float
    new: int
    out: int
    keep: int | None = None
    group: int = 0
    common: int = 0


def conversation(source: Path) -> list[Row]:
    """The first minutes of Mooncake's, with chains inferred."""
    jitter, rows = random.Random(0), []
    owners: dict[int, int] = {}  # block -> the chain that had it last
    tips: dict[int, tuple[int, int]] = {}  # chain -> blocks and tokens of its last request, answer included
    for number, each in enumerate(_lines(source)):
        at = each["timestamp"] / 1e3
        if at >= CONVERSATION_SECONDS:
            break
        at += jitter.random() * MOONCAKE_TICK_SECONDS
        ids, size, out = each["hash_ids"], each["input_length"], max(1, each["output_length"])
        known = next((count for count in range(len(ids), 0, -1) if ids[count - 1] in owners), 0)
        chain = owners[ids[known - 1]] if known else number
        blocks, tokens = tips.get(chain, (0, 0))
        if known and known >= blocks - 1 and size > tokens:
            rows.append(Row(chain, at, size - tokens, out))
        else:
            chain = number
            # 0 is no group; the first block's id names the texts that begin alike.
            common = min(known * MOONCAKE_BLOCK, size - 1)
            rows.append(Row(chain, at, size - common, out, group=ids[0] + 1 if common else 0, common=common))
        tips[chain] = (len(ids), size + out)
        owners.update(dict.fromkeys(ids, chain))
    return _from_the_start(rows)


def agentic(source: Path) -> list[Row]:
    """Some coding sessions' first requests."""
    starts, rows = random.Random(0), []
    groups: dict[tuple[int, int], int] = {}
    for number, session in enumerate(_lines(source)):
        if number == AGENTIC_SESSIONS:
            break
        start, before, answered = starts.random() * AGENTIC_START_SECONDS, 0, 0
        common = session["tool_tokens"] + session["system_tokens"]
        group = groups.setdefault((session["tool_tokens"], session["system_tokens"]), len(groups) + 1)
        requests = [each for each in session["requests"] if "in" in each and each["t"] < AGENTIC_SECONDS]
        for each in requests[:AGENTIC_REQUESTS]:
            at, size, out = start + each["t"], each["in"], max(1, each["out"])
            if not before:
                common = min(common, size - 1)
                rows.append(Row(number, at, size - common, out, group=group, common=common))
            elif size > before and each["hit_prev"] >= before * 0.98:
                rows.append(Row(number, at, max(1, size - before - answered), out))
            else:
                keep = min(each["hit_prev"], size - 1)
                rows.append(Row(number, at, size - keep, out, keep=keep))
            before, answered = size, out
    return _from_the_start(rows)


def _lines(source: Path) -> Any:
    with gzip.open(source, "rt") as lines:
        yield from map(json.loads, lines)


def _from_the_start(rows: list[Row]) -> list[Row]:
    """In order of time, sessions numbered as they begin; `rows` are in the order of the source."""
    numbers: dict[int, int] = {}
    last: dict[int, float] = {}
    for index, row in enumerate(rows):
        # Within a tick chance may have put a turn before the one that it goes on from.
        last[row.session] = max(row.at, last.get(row.session, 0.0) + LEAST_GAP_SECONDS)
        rows[index] = replace(row, at=last[row.session])
    rows.sort(key=lambda row: row.at)
    first = rows[0].at
    return [
        Row(
            numbers.setdefault(row.session, len(numbers)),
            round(row.at - first, 2),
            *(row.new, row.out, row.keep, row.group, row.common),
        )
        for row in rows
    ]


def write(rows: list[Row], target: Path) -> None:
    """One line a request, fields that say nothing left out; the same bytes for the same rows."""
    lines = []
    for row in rows:
        told = {name: value for name, value in asdict(row).items() if value or name not in ("keep", "group", "common")}
        lines.append(json.dumps(told, separators=(",", ":")))
    target.write_bytes(gzip.compress(("\n".join(lines) + "\n").encode(), 9, mtime=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("conversation", "agentic"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    rows = {"conversation": conversation, "agentic": agentic}[arguments.kind](arguments.source)
    write(rows, arguments.target)
    sessions = len({row.session for row in rows})
    print(f"{len(rows):,} requests of {sessions:,} sessions, {arguments.target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
