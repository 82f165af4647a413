"""The budgets that would hold so many sessions of so many tokens: sizes.py's arithmetic, the other way round.

DRAM holds every session, HBM those that run: what sleeps must have room while others take theirs, and what is awake
keeps its copy below, so that it can fall asleep without a copy. HBM is left as it is where the longest turn fits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.sizes import MIB, MIN_SLOTS
from app.units import format_bytes

if TYPE_CHECKING:
    from app.sizes import Memory, Sizes


@dataclass(frozen=True, slots=True)
class Wanted:
    """What would hold `sessions` of `tokens`; `problem` says why that cannot be had here, or is empty."""

    sessions: int
    tokens: int
    hbm_bytes: int
    dram_bytes: int
    problem: str = ""

    @property
    def flags(self) -> str:
        """To copy into `dormouse serve`."""
        return f"--hbm-bytes {self.hbm_bytes // MIB}MiB --dram-bytes {self.dram_bytes // MIB}MiB"


@dataclass(frozen=True, slots=True)
class Room:
    """What budgets may take: `memory` on the device, `host` beside it; on a CPU they are one."""

    memory: Memory
    host: Memory
    on_cpu: bool
    model_context: int


def wanted(sessions: int, tokens: int, sizes: Sizes, room: Room) -> Wanted:
    """Budgets in whole MiB for `sessions` of `tokens` each. `room` is what is free without the caches of `sizes`."""
    blocks = -(-tokens // sizes.block_tokens)
    hbm_slots = max(sizes.hbm_slots, blocks + 1, MIN_SLOTS)
    hbm_bytes = _whole_mib(hbm_slots * sizes.slot_bytes)
    dram_bytes = _whole_mib(sessions * blocks * sizes.slot_bytes)
    problem = _problem(tokens, blocks, hbm_bytes, dram_bytes, sizes, room)
    return Wanted(sessions, tokens, hbm_bytes, dram_bytes, problem)


def _problem(tokens: int, blocks: int, hbm_bytes: int, dram_bytes: int, sizes: Sizes, room: Room) -> str:
    if tokens > room.model_context:
        return f"the model knows {room.model_context:,} tokens, and these sessions have {tokens:,}"
    if hbm_bytes > room.memory.available_bytes:
        return f"one session needs {format_bytes(hbm_bytes)} of HBM, and {_free(room.memory)} are free"
    left = room.host.available_bytes - sizes.ring_bytes - (hbm_bytes if room.on_cpu else 0)
    if dram_bytes > left:
        fitting = max(0, left) // (blocks * sizes.slot_bytes)
        return f"DRAM would need {format_bytes(dram_bytes)}, and {_free(room.host)} are free: {fitting} sessions fit"
    return ""


def _free(memory: Memory) -> str:
    return format_bytes(memory.available_bytes)


def _whole_mib(size: int) -> int:
    return -(-size // MIB) * MIB
