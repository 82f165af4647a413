"""Kinds of branches and what each is worth keeping (pure).

A frontier keeps one queue per kind, ordered by recency, and compares only their heads; so
choosing a victim costs a handful of comparisons, however many sessions sleep. For now
worth is least-recently-used within ranks of kinds; a learned return probability would
replace `worth` and nothing else.
"""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """What is known of a branch, as far as eviction cares. The value is also the order of leaving."""

    DUPLICATE = 0  # present in the tier above as well: leaving costs nothing
    SUPERSEDED = 1  # a tail that a later completed turn of its branch replaced
    FINAL = 2  # its client said that no turn follows
    NORMAL = 3
    KEPT = 4  # asked to stay a while (soft: it still goes before a turn has to wait)
    PINNED = 5  # asked to stay (soft as well)


KINDS = len(Kind)


def worth(kind: int, last: float) -> tuple[int, float]:
    """Sorts what may leave: the least comes first. `last` is in seconds of the planner's clock."""
    return kind, last


def inherited(parent: int, child: int) -> int:
    """The kind of a row whose last child left: shared history is not superseded or final for one branch's sake."""
    return child if child > parent else parent
