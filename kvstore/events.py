"""Frozen inputs and outputs of the planner.

`Planner.handle(event, now) -> list[Action]`. Times are seconds of a monotonic clock that
only the manager reads. Slots are integers of the tier they belong to.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.types import BlockKey, StopReason, Tier, TransferId, TurnId, WakeId


class TransferEnd(Enum):
    """Why a transfer ended; anything but DONE is a miss, never an error of a turn."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    CORRUPT = "corrupt"  # block `good` of the run did not verify: its source is dropped
    STALE = "stale"  # the slot of block `good` holds another block, or none: its source is dropped, and is no fault
    SLOT_BROKEN = "slot_broken"  # the lower tier's slot of block `good` cannot be used (EIO): it is retired


class TierHealth(Enum):
    OK = "ok"
    SUSPECT = "suspect"
    OFF = "off"


class Miss(Enum):
    """Why a block that was stored could not be used."""

    LOAD_FAILED = "load_failed"
    LOAD_TIMEOUT = "load_timeout"
    CORRUPT = "corrupt"
    STALE = "evicted"  # its slot holds another block by now, which to whoever asks is the same


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
    wake: WakeId | None = None  # the hint that announced it: past their divergence nothing more is loaded


@dataclass(frozen=True, slots=True)
class Fill:
    """OPEN slot number `index` of `turn`'s block table now holds the block of `key`."""

    turn: TurnId
    index: int
    key: BlockKey


@dataclass(frozen=True, slots=True)
class TurnStopped:
    """The engine left `turn` alone; `tokens` is prompt + output so far.

    K/V exist for tokens [0, `computed_tokens`). Only read when the reason is SUSPENDED: what is
    past the last full block can then be kept; 0 says that it is not known.
    """

    turn: TurnId
    reason: StopReason
    tokens: int
    computed_tokens: int = 0


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
class WakeHinted:
    """A turn that continues the chain of `keys` is expected: bring its blocks to `target`, HBM or DRAM.

    Where they are they are worth keeping for `hold_seconds`, softly: a turn that needs room gets it.
    """

    wake: WakeId
    keys: tuple[BlockKey, ...]
    target: Tier
    hold_seconds: float


@dataclass(frozen=True, slots=True)
class WakeCancelled:
    """The hint is withdrawn; an unknown or settled one changes nothing."""

    wake: WakeId


@dataclass(frozen=True, slots=True)
class SleepWanted:
    """Free the HBM slots of the chain of `keys` as far as nobody else needs them; a copy below is kept or made."""

    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class TransferDone:
    """The transfer has ended: nothing reads its sources or writes its targets any more.

    Blocks [0, `good`) of its run are sound. `reason` says why the rest is not; with CORRUPT or
    SLOT_BROKEN it is block `good` that is to blame.
    """

    transfer: TransferId
    good: int
    reason: TransferEnd = TransferEnd.DONE


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
class SessionClosed:
    """The branches at `tips` are forgotten: what no other branch shares leaves every tier as soon as it can."""

    tips: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class TierHealthChanged:
    """`tier` works, is doubtful (nothing new is put there), or is off (nothing is read from it either)."""

    tier: Tier
    health: TierHealth


@dataclass(frozen=True, slots=True)
class FlushWanted:
    """Drop every VALID block that no turn or transfer needs (tests and admin)."""


Event = (
    TurnArrived
    | StepEnded
    | GrowWanted
    | TurnCancelled
    | WakeHinted
    | WakeCancelled
    | SleepWanted
    | TransferDone
    | BranchRecorded
    | SessionClosed
    | TierHealthChanged
    | FlushWanted
)

# --- actions --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GrantTurn:
    """Run `turn`: `slots` is its block table (cached prefix first, then OPEN slots).

    `cached_tokens` tokens need no computing: a multiple of block_tokens, except for a resumed turn
    whose partial block was kept. `resumed` tells a suspended turn from a new one. `reused_blocks`
    counts the cached blocks by the deepest tier they were read from since a turn last used them,
    HBM first. `miss` says why blocks that were somewhere could not be used, if any. `wake_seconds`
    passed between the admission and this grant. `woken_from_queue`: loads for it began while it waited
    for admission, or when it was admitted after such a wait.
    """

    turn: TurnId
    slots: tuple[int, ...]
    cached_tokens: int
    resumed: bool
    reused_blocks: tuple[int, int, int] = (0, 0, 0)
    miss: Miss | None = None
    wake_seconds: float = 0.0
    woken_from_queue: bool = False


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


@dataclass(frozen=True, slots=True)
class StartTransfer:
    """Copy a run of blocks, in this order, from `source_slots` to `target_slots`; answer with TransferDone.

    All slots are reserved until then. `keys` has None for a turn's private block. Between HBM and
    NVMe each block passes through its slot of `ring_slots`, which is empty otherwise. What has not
    ended by `deadline` is not waited for. Copies down may yield to whoever computes, until HurryTransfer.

    The parent of every block but the first is the block before it; that of the first is `parent`, None where a
    chain begins. `first_block` is how many blocks its chain has before it. Both say nothing of private blocks.
    """

    transfer: TransferId
    source: Tier
    target: Tier
    source_slots: tuple[int, ...]
    target_slots: tuple[int, ...]
    keys: tuple[BlockKey | None, ...]
    deadline: float
    ring_slots: tuple[int, ...] = ()
    parent: BlockKey | None = None
    first_block: int = 0


@dataclass(frozen=True, slots=True)
class CancelTransfer:
    """Nobody waits for `transfer` any more: end it early if that is possible. TransferDone is still owed."""

    transfer: TransferId


@dataclass(frozen=True, slots=True)
class HurryTransfer:
    """Somebody waits for what `transfer`, a copy down, will free: it may no longer yield to anybody."""

    transfer: TransferId


@dataclass(frozen=True, slots=True)
class AnswerWake:
    """What became of the hint `wake`, as known now: WAKING is followed by one more answer.

    `tokens` are ready (AWAKE) or on their way (WAKING); `origin` is the deepest tier they come from.
    """

    wake: WakeId
    status: WakeStatus
    tokens: int
    origin: Tier


Action = (
    GrantTurn
    | GrantSlots
    | SuspendTurn
    | RefuseGrowth
    | RefuseTurn
    | StartTransfer
    | CancelTransfer
    | HurryTransfer
    | AnswerWake
)
