"""Frozen inputs and outputs of the planner.

`Planner.handle(event, now) -> list[Action]`. Times are seconds of a monotonic clock that
only the manager reads. Slots are integers of the tier they belong to.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.types import BlockKey, StopReason, TurnId


class Miss(Enum):
    """Why a block that was stored could not be used."""

    LOAD_FAILED = "load_failed"
    LOAD_TIMEOUT = "load_timeout"
    CORRUPT = "corrupt"


class WakeStatus(Enum):
    AWAKE = "awake"
    WAKING = "waking"
    NO_ROOM = "no_room"  # declined, as are the rest
    NOT_STORED = "not_stored"
    CANCELLED = "cancelled"


# --- events ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TurnArrived:
    """A turn wants to run.

    `keys` are the keys of the full blocks of tokens[:n-1], in order (so at most
    floor((n-1)/block_tokens)); empty when `cache` is false. `prompt_tokens` is n;
    `output_tokens` the most it may generate.
    """

    turn: TurnId
    keys: tuple[BlockKey, ...]
    prompt_tokens: int
    output_tokens: int
    priority: int = 0
    cache: bool = True


@dataclass(frozen=True, slots=True)
class Fill:
    """OPEN slot number `index` of `turn`'s block table now holds the block of `key`."""

    turn: TurnId
    index: int
    key: BlockKey


@dataclass(frozen=True, slots=True)
class TurnStopped:
    """The engine left `turn` alone; `tokens` is prompt + output so far."""

    turn: TurnId
    reason: StopReason
    tokens: int


@dataclass(frozen=True, slots=True)
class StepEnded:
    """A step returned: these OPEN slots were filled, in block order per turn; these turns stopped."""

    fills: tuple[Fill, ...]
    stopped: tuple[TurnStopped, ...] = ()


@dataclass(frozen=True, slots=True)
class GrowWanted:
    """`turn` wants `slots` more OPEN slots; a turn has at most one such wish."""

    turn: TurnId
    slots: int


@dataclass(frozen=True, slots=True)
class TurnCancelled:
    """The client went away. A queued turn is forgotten at once; a granted one when StepEnded says it stopped."""

    turn: TurnId


@dataclass(frozen=True, slots=True)
class BranchRecorded:
    """A completed turn left its branch at `tip` (None: nothing storable), where before it was at `old_tip`.

    `superseded` are keys only the branch's replaced tail had. `keep_seconds` and `pinned` ask that
    the branch stay, softly; `final` lets it go first.
    """

    tip: BlockKey | None
    old_tip: BlockKey | None = None
    superseded: tuple[BlockKey, ...] = ()
    keep_seconds: float = 0.0
    pinned: bool = False
    final: bool = False


@dataclass(frozen=True, slots=True)
class FlushWanted:
    """Drop every VALID block that no turn or transfer needs (tests and admin)."""


Event = TurnArrived | StepEnded | GrowWanted | TurnCancelled | FlushWanted

# --- actions --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GrantTurn:
    """Run `turn`: `slots` is its block table (cached prefix first, then OPEN slots).

    `cached_tokens` tokens of the prompt (a multiple of block_tokens) need no computing.
    `resumed` tells a suspended turn from a new one.
    """

    turn: TurnId
    slots: tuple[int, ...]
    cached_tokens: int
    resumed: bool


@dataclass(frozen=True, slots=True)
class GrantSlots:
    """Append `slots` to the block table of `turn`.

    At least one, perhaps fewer than GrowWanted asked for; the wish is settled either way.
    """

    turn: TurnId
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SuspendTurn:
    """Stop `turn` at the next step boundary; it is queued again once StepEnded says so."""

    turn: TurnId


@dataclass(frozen=True, slots=True)
class RefuseGrowth:
    """`turn` holds all that this store could ever give it: end it with LENGTH. The wish is settled."""

    turn: TurnId


class Refusal:
    """Why a turn was refused; constants, so that the shell can map them to errors."""

    QUEUE_FULL = "queue_full"
    NEVER_FITS = "never_fits"


@dataclass(frozen=True, slots=True)
class RefuseTurn:
    """`turn` will not run; `reason` is one of Refusal's."""

    turn: TurnId
    reason: str


Action = GrantTurn | GrantSlots | SuspendTurn | RefuseGrowth | RefuseTurn
