"""The budgets that would hold so many sessions of so many tokens: sizes.py's arithmetic, the other way round.

DRAM holds every session, HBM those that run: what sleeps must have room while others take theirs, and what is awake
keeps its copy below, so that it can fall asleep without a copy. HBM is left as it is where the longest turn fits. Where
memory is too small for that, DRAM is left as it is and NVMe holds every session.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.sizes import MIB, MIN_SLOTS
from app.units import format_bytes
from kvstore.codec import HEADER_BYTES

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
    nvme_bytes: int = 0  # 0: they need no disk

    @property
    def flags(self) -> str:
        """To copy into `dormouse serve`."""
        below = f" --nvme-bytes {self.nvme_bytes // MIB}MiB" if self.nvme_bytes else ""
        return f"--hbm-bytes {self.hbm_bytes // MIB}MiB --dram-bytes {self.dram_bytes // MIB}MiB{below}"


@dataclass(frozen=True, slots=True)
class Room:
    """What budgets may take: `memory` on the device, `host` beside it; on a CPU they are one. `disk_bytes` are free."""

    memory: Memory
    host: Memory
    on_cpu: bool
    model_context: int
    disk_bytes: int = 0


def wanted(sessions: int, tokens: int, sizes: Sizes, room: Room) -> Wanted:
    """Budgets in whole MiB for `sessions` of `tokens` each. `room` is what is free without the caches of `sizes`."""
    blocks = -(-tokens // sizes.block_tokens)
    hbm_slots = max(sizes.hbm_slots, blocks + 1, MIN_SLOTS)
    hbm_bytes = _whole_mib(hbm_slots * sizes.slot_bytes)
    dram_bytes = _whole_mib(sessions * blocks * sizes.slot_bytes)
    hopeless = _hopeless(tokens, hbm_bytes, room)
    left = room.host.available_bytes - sizes.ring_bytes - (hbm_bytes if room.on_cpu else 0)
    if hopeless or dram_bytes <= left:
        return Wanted(sessions, tokens, hbm_bytes, dram_bytes, hopeless)
    nvme_bytes = _whole_mib(sessions * blocks * (sizes.slot_bytes + HEADER_BYTES))
    if nvme_bytes <= room.disk_bytes:
        return Wanted(sessions, tokens, hbm_bytes, sizes.dram_bytes // MIB * MIB, nvme_bytes=nvme_bytes)
    fitting = max(0, left) // (blocks * sizes.slot_bytes)
    fitting = max(fitting, room.disk_bytes // (blocks * (sizes.slot_bytes + HEADER_BYTES)))
    problem = (
        f"DRAM would need {format_bytes(dram_bytes)}, and {_free(room.host)} are free; NVMe {format_bytes(nvme_bytes)} "
        f"of {format_bytes(room.disk_bytes)}: {fitting} sessions fit"
    )
    return Wanted(sessions, tokens, hbm_bytes, dram_bytes, problem)


def _hopeless(tokens: int, hbm_bytes: int, room: Room) -> str:
    """Why not one such session could run, or nothing."""
    if tokens > room.model_context:
        return f"the model knows {room.model_context:,} tokens, and these sessions have {tokens:,}"
    if hbm_bytes > room.memory.available_bytes:
        return f"one session needs {format_bytes(hbm_bytes)} of HBM, and {_free(room.memory)} are free"
    return ""


def _free(memory: Memory) -> str:
    return format_bytes(memory.available_bytes)


def _whole_mib(size: int) -> int:
    return -(-size // MIB) * MIB
