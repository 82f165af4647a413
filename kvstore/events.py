"""Frozen inputs and outputs of the planner.

`Planner.handle(event, now) -> list[Action]`. Times are seconds of a monotonic clock that
only the manager reads. Slots are integers of the tier they belong to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

from kvstore.types import Tier

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstore.types import BlockKey, StopReason, TransferId, TurnId, WakeId


class TransferEnd(Enum):
    """Why a transfer ended; anything but DONE is a miss, never an error of a turn."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    CORRUPT = "corrupt"  # block `good` of the run did not verify: its source is dropped
    STALE = "stale"  # the slot of block `good` holds another block, or none: its source is dropped, and is no fault
    OTHER_MODEL = "other_model"  # as STALE, a block of another model
    OTHER_FORMAT = "other_format"  # as STALE, written by another version
    SLOT_BROKEN = "slot_broken"  # the lower tier's slot of block `good` cannot be used (EIO): it is retired


class TierHealth(StrEnum):
    OK = "ok"
    SUSPECT = "suspect"  # nothing new is put there
    OFF = "off"  # nothing is read from it either


class WritePolicy(StrEnum):
    """When blocks are copied to NVMe, beyond what pressure, a drain or a wish to sleep there asks for."""

    EVERY_TURN = "every-turn"
    ON_IDLE = "on-idle"
    ON_PRESSURE = "on-pressure"
    AUTO = "auto"  # every turn while the bytes of the last day are fewer than the drive is rated for, else on pressure


class Miss(Enum):
    """Why a block that was stored could not be used. The value is what the client is told (reuse.MissReason)."""

    LOAD_FAILED = "load_failed"
    LOAD_TIMEOUT = "load_timeout"
    CORRUPT = "corrupt"
    STALE = "evicted"  # its slot holds another block by now, which to whoever asks is the same
    OTHER_MODEL = "model_changed"
    OTHER_FORMAT = "store_format"
    RECOMPUTE_CHEAPER = "recompute_cheaper"


class WakeStatus(Enum):
    AWAKE = "awake"
    WAKING = "waking"
    NO_ROOM = "no_room"  # declined, as are the rest
    NOT_STORED = "not_stored"
    RECOMPUTE_CHEAPER = "recompute_cheaper"
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
    to_nvme: bool = False  # may its blocks lie on NVMe already while it is suspended, and before it is settled?
    tenant: str = ""  # who shares what there is with others; no key is another tenant's, too


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
    """A step returned: these OPEN slots were filled, in block order per turn; these turns stopped.

    It took `seconds` to compute K/V for `prefill_tokens` of prompts and `decode_tokens` more; 0 when not known.
    """

    fills: tuple[Fill, ...]
    stopped: tuple[TurnStopped, ...] = ()
    seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0


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
class TurnSettled:
    """Whatever branch `turn` left has been recorded, or never will be; sent once for each turn that ended by itself.

    Until then its blocks may lie on NVMe if it said so: its end may admit others, who need the room at once.
    """

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
    """Move the chain of `keys` down to `target` as far as nobody else needs it above; a copy there is kept or made.

    What may not lie on NVMe, or does not get there, stays in DRAM.
    """

    keys: tuple[BlockKey, ...]
    target: Tier = Tier.DRAM


@dataclass(frozen=True, slots=True)
class TransferDone:
    """The transfer has ended: nothing reads its sources or writes its targets any more.

    Blocks [0, `good`) of its run are sound. `reason` says why the rest is not; with CORRUPT, STALE and its kin, or
    SLOT_BROKEN it is block `good` that is to blame.
    """

    transfer: TransferId
    good: int
    reason: TransferEnd = TransferEnd.DONE


@dataclass(frozen=True, slots=True)
class BranchRecorded:
    """A completed turn left its branch at `tip` (None: nothing storable), where before it was at `old_tip`.

    `superseded` are keys only the branch's replaced tail had. `keep_seconds` and `pinned` ask that
    the branch stay, softly; `final` lets it go first. Unless `to_nvme`, no block that only such
    branches have is ever copied to NVMe, and none stays there.
    """

    tip: BlockKey | None
    old_tip: BlockKey | None = None
    superseded: tuple[BlockKey, ...] = ()
    keep_seconds: float = 0.0
    pinned: bool = False
    final: bool = False
    to_nvme: bool = True
    after_tool_call: bool = False  # the turn ended with one: what it waits for is a program
    expected_idle_seconds: float | None = None  # as its client said


@dataclass(frozen=True, slots=True)
class BranchesFound:
    """Branches that an earlier process left, each as it was last recorded; all at once, since there may be 100,000."""

    branches: Sequence[BranchRecorded]


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """The branches at `tips` are forgotten: what no other branch shares leaves every tier as soon as it can.

    `chains` are all keys of those branches, as far as the shell has them. Only with them is it found what
    an earlier process left on NVMe of a branch whose tip was never written, and what was evicted from there.
    """

    tips: tuple[BlockKey, ...]
    chains: tuple[tuple[BlockKey, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class TierHealthChanged:
    """`tier` works, is doubtful (nothing new is put there), or is off (nothing is read from it either)."""

    tier: Tier
    health: TierHealth


@dataclass(frozen=True, slots=True)
class FlushWanted:
    """Drop every VALID block that no turn or transfer needs (tests and admin)."""


FoundBlock = tuple["BlockKey", "BlockKey | None", int, int, float]
"""key, key of the block before it, its index in its chain, slot, when it was last used by the planner's clock."""


@dataclass(frozen=True, slots=True)
class BlocksFound:
    """An earlier process left these on NVMe; in any order, before any other event.

    What is of no use, because the block before it is not there, its slot has two blocks or its block two
    slots, is answered with ForgetBlocks. `owners` says whose chains begin with which block.
    """

    blocks: Sequence[FoundBlock]
    owners: Mapping[BlockKey, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SlotsErased:
    """The bytes of these slots of NVMe are gone, as ForgetBlocks with `erase` wanted: they may be used again."""

    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FlushDown:
    """The process is about to end: until `deadline` copy to NVMe whatever should be there and is not.

    What becomes such meanwhile is copied too. `Snapshot.sinking_blocks` says how many are still on their way.
    """

    deadline: float


Event = (
    TurnArrived
    | StepEnded
    | GrowWanted
    | TurnCancelled
    | TurnSettled
    | WakeHinted
    | WakeCancelled
    | SleepWanted
    | TransferDone
    | BranchRecorded
    | BranchesFound
    | SessionClosed
    | TierHealthChanged
    | FlushWanted
    | BlocksFound
    | SlotsErased
    | FlushDown
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


@dataclass(frozen=True, slots=True)
class RecordedBlock:
    """One block on NVMe: `parent` is the key of the block before it in its chain, `first_block` its index there."""

    key: BlockKey
    parent: BlockKey | None
    first_block: int
    slot: int


@dataclass(frozen=True, slots=True)
class RecordBlocks:
    """These are on NVMe, whole."""

    blocks: tuple[RecordedBlock, ...]


@dataclass(frozen=True, slots=True)
class ForgetBlocks:
    """Nothing in these slots of NVMe is of use any more, if ever anything was.

    With `erase` their bytes must go, and no slot is used again before SlotsErased; the session they are from
    was deleted, expired, or is to be kept in memory only.
    """

    slots: tuple[int, ...]
    erase: bool


@dataclass(frozen=True, slots=True)
class ProbeTier:
    """Find out whether `tier` works again; answer with TierHealthChanged."""

    tier: Tier


@dataclass(frozen=True, slots=True)
class WritePolicyChanged:
    """From now on `policy` decides what is written to NVMe; `bytes_last_day` were written in the last 24 hours."""

    policy: WritePolicy
    bytes_last_day: int


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
    | RecordBlocks
    | ForgetBlocks
    | ProbeTier
    | WritePolicyChanged
)
