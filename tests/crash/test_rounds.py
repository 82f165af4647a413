"""Killed twenty times on one directory, at random and where it hurts: what was committed is there, each word is right.

A round takes about 1.3 s on two cores, most of it Python's start and the load up to the planned point. `seed` is random
outside CI, and a failure names it, with the round's plan: `python -m tests.crash.rounds PLACE SEED ROUNDS` tells the
chain again.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

from tests.crash.rounds import Chain

if TYPE_CHECKING:
    from pathlib import Path

ROUNDS = 20


def test_sessions_go_on_as_if_nothing_had_been_killed(tmp_path: Path) -> None:
    seed = 4 if os.environ.get("CI") == "true" else random.randrange(10**6)
    chain = Chain(tmp_path, seed)
    for _ in range(ROUNDS):
        chain.round()
    chain.last()
    seen = chain.seen
    print(seen)
    # Each has had two or three tries: what none of them reached is not tested any more.
    for point in ("anywhere", "write", "read", "commit", "drain"):
        assert seen.reached[point] > 0, f"{point}, seed {seed}: {seen}"
    assert seen.turns > ROUNDS, seen
    assert seen.found > 0, seen
    assert seen.sound > 0, seen
    assert seen.under_way > 0, seen
