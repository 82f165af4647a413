"""The vocabulary of the store: tiers, block keys, layouts, and what a turn and a step look like from here.

Everything in this module is a value. Nothing here does IO, keeps time or knows about
HTTP, asyncio or torch.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import NewType, Protocol

TurnId = NewType("TurnId", int)
"""One request being answered; never reused within a process."""

WakeId = NewType("WakeId", int)
"""One hint that a session will be needed; never reused within a process."""

TransferId = NewType("TransferId", int)
"""One run of blocks on its way between two tiers; never reused within a process."""

HbmSlot = NewType("HbmSlot", int)
"""Index of one block-sized slot in the device arena."""

BlockKey = NewType("BlockKey", bytes)
"""16-byte chained digest of a block's tokens and everything before them (see chain.py)."""

Namespace = NewType("Namespace", bytes)
"""16-byte digest of (model_key, tenant, cache_salt): nothing is shared across namespaces."""

SLOT_ALIGNMENT = 4096
"""Bytes: O_DIRECT's strictest common alignment, and one page."""


class Tier(IntEnum):
    """Where bytes live, fastest first. Transfers run between neighbours only."""

    HBM = 0
    DRAM = 1
    NVME = 2


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Shape of one layer's K (and, identically, V): [kv_heads, block_tokens, head_dim]."""

    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How one block's K and V of all layers lie in one contiguous slot, in every tier.

    Layer `l` holds K then V, each `[kv_heads, block_tokens, head_dim]`, from element
    `layer_offset(l)` on. Offsets are multiples of the layer's row (`block_tokens *
    head_dim`) and a slot is a multiple of every row and of 4,096 bytes, so a row index can
    address any head of any block of an arena. Layers need not look alike.
    """

    layers: tuple[LayerKV, ...]
    block_tokens: int
    dtype: str
    itemsize: int

    def layer_offset(self, layer: int) -> int:
        """First element of `layer` within a slot."""
        offset = 0
        for index, shape in enumerate(self.layers):
            row = self.block_tokens * shape.head_dim
            offset = math.ceil(offset / row) * row
            if index == layer:
                return offset
            offset += 2 * shape.kv_heads * row
        raise IndexError(layer)

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of all layers for one token, without padding."""
        return sum(2 * s.kv_heads * s.head_dim for s in self.layers) * self.itemsize

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot: the block's payload rounded up to rows and 4,096 bytes."""
        last = len(self.layers) - 1
        shape = self.layers[last]
        end = self.layer_offset(last) + 2 * shape.kv_heads * self.block_tokens * shape.head_dim
        rows = {self.block_tokens * s.head_dim * self.itemsize for s in self.layers}
        unit = math.lcm(SLOT_ALIGNMENT, *rows)
        return math.ceil(end * self.itemsize / unit) * unit

    def blocks_for(self, tokens: int) -> int:
        """Blocks needed to hold `tokens` tokens, the last one partial or not."""
        return -(-tokens // self.block_tokens)


class StopReason(Enum):
    """Why a turn left the engine."""

    STOP = "stop"  # end-of-sequence token or stop string
    LENGTH = "length"  # max tokens or max context
    CANCELLED = "cancelled"  # the client went away
    SUSPENDED = "suspended"  # slots were needed elsewhere; it comes back
    FAILED = "failed"  # the step that computed it raised


@dataclass(frozen=True, slots=True)
class TurnSpec:
    """What a turn asks of the store.

    `token_ids` is the whole prompt. `cache` false neither reads nor keeps. `payload` is
    handed to the engine untouched (sampling parameters and the like). `namespace` decides
    which blocks may be shared. Lower `priority` is sooner. `wake` is the hint that announced it:
    past the place where the prompt diverges from what was hinted, nothing more is loaded. `to_nvme`
    false: while it is suspended, none of its blocks lies on NVMe. `tenant` is who shares the store and the engine with
    others; `namespace` must be of no other tenant.
    """

    token_ids: array[int]
    max_new_tokens: int
    namespace: Namespace
    payload: object
    priority: int = 0
    cache: bool = True
    wake: WakeId | None = None
    to_nvme: bool = False
    tenant: str = ""


@dataclass(slots=True)
class TurnProgress:
    """What one step did for one turn.

    K/V exist for tokens [0, `computed_tokens`) of prompt + output. `text` is the newly
    visible text (never broken UTF-8, never part of a stop string). `stopped` is None while
    the turn goes on; once set, the engine no longer touches the turn's slots, `stop_string` is
    the one that ended the answer, if one did, and `kept_tokens` says how many output ids are
    history: those whose text the client saw whole, and the end-of-sequence id. `notes` are the
    engine's remarks on output tokens whose text is out, and `prompt_notes` on the prompt's, one a
    token and only where the payload asked for them; the store hands them on untouched.
    """

    turn: TurnId
    computed_tokens: int
    new_token_ids: list[int] = field(default_factory=list)
    text: str = ""
    stopped: StopReason | None = None
    stop_string: str | None = None
    kept_tokens: int = 0
    error: str | None = None
    notes: list[object] = field(default_factory=list)
    prompt_notes: list[object] = field(default_factory=list)


@dataclass(slots=True)
class StepReport:
    """One callback per engine step carries all tokens and fills of that step."""

    progress: list[TurnProgress]
    seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0


class TurnEngine(Protocol):
    """What the manager needs of an engine. Every call returns at once and is thread-safe."""

    def start(self, turn: TurnId, spec: TurnSpec, cached_tokens: int, slots: Sequence[int]) -> None:
        """Begin computing at token `cached_tokens`; `slots` is the block table in order."""

    def extend(self, turn: TurnId, slots: Sequence[int]) -> None:
        """Append slots to the turn's block table."""

    def resume(self, turn: TurnId, cached_tokens: int, slots: Sequence[int]) -> None:
        """Continue a suspended turn with a new block table."""

    def stop(self, turn: TurnId, reason: StopReason) -> None:
        """Leave `turn` out from the next step on; a report then says it stopped.

        For a turn that has already stopped this does nothing and reports nothing.
        """
