"""What `auto` budgets become on this machine, and whether model and cache fit at all.

    memory limit     what this process may use: the tightest cgroup limit above it, or RAM
    available        what of it is free now

CUDA: HBM takes 90% of the device memory that is free after weights and a probe step, DRAM 25% of the limit. CPU: 5% and
10%, so that a default shows every tier, though both are RAM there. NVMe: 20 GiB, or 10% of the free disk where that is
less; what sleeps there already counts as free, so that a budget does not shrink as it fills. The rest of this module is
arithmetic on those numbers, so that every refusal can be tested without a machine that small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from app import cgroup
from app.units import format_bytes
from kvstore.codec import HEADER_BYTES
from kvstore.errors import SettingInvalid

if TYPE_CHECKING:
    from app.settings import Settings
    from kvstore.types import KVLayout

CPU_HBM_SHARE = 0.05
CUDA_HBM_SHARE = 0.90
CPU_DRAM_SHARE = 0.10
CUDA_DRAM_SHARE = 0.25
NVME_BYTES = 20 * 1024**3
NVME_FREE_SHARE = 0.10
RATED_WRITES_A_DAY = 0.3
"""Times a drive's size: a consumer drive of 1 TB is rated for about 600 TB in five years."""
MIB = 1024**2
MIN_SLOTS = 2
"""One block to read from and one to write to."""

SHOWN_SESSION_TOKENS = 4096
"""Budgets are printed in sessions of this many tokens."""

RING_SLOTS = 8
"""Staging slots each way between HBM and a tier below DRAM: one run of blocks. They are no part of DRAM's budget."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one memory: all that may be used, and what is free now."""

    limit_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes of one file system: its size, what is free to us, and what our own folder there holds."""

    total_bytes: int
    free_bytes: int
    held_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Sizes:
    """The budgets in force; each is a whole number of slots."""

    hbm_slots: int
    dram_slots: int
    slot_bytes: int
    block_tokens: int
    max_context: int
    notes: tuple[str, ...] = ()
    nvme_slots: int = 0

    @property
    def hbm_bytes(self) -> int:
        return self.hbm_slots * self.slot_bytes

    @property
    def dram_bytes(self) -> int:
        return self.dram_slots * self.slot_bytes

    @property
    def nvme_bytes(self) -> int:
        return self.nvme_slots * (self.slot_bytes + HEADER_BYTES)

    @property
    def ring_bytes(self) -> int:
        """Of the staging slots, both ways."""
        return 2 * RING_SLOTS * self.slot_bytes

    @property
    def hbm_tokens(self) -> int:
        return self.hbm_slots * self.block_tokens

    @property
    def dram_tokens(self) -> int:
        return self.dram_slots * self.block_tokens

    def lines(self) -> list[str]:
        """For people, at start: the number each budget became, and what it holds."""
        dram = self._line("DRAM", self.dram_slots) + f", and {format_bytes(self.ring_bytes)} for staging"
        return [
            self._line("HBM", self.hbm_slots),
            dram if self.dram_slots else "DRAM 0 B: nothing sleeps there (--dram-bytes)",
            f"context {self.max_context:,} tokens",
            *self.notes,
        ]

    @property
    def nvme_line(self) -> str:
        """As `lines`, of the disk, whose budget is known only once its folder is open."""
        if not self.nvme_slots:
            return "NVMe 0 B: nothing outlives the process (--nvme-bytes)"
        return self._line("NVMe", self.nvme_slots)

    def _line(self, name: str, slots: int) -> str:
        sessions = slots * self.block_tokens / SHOWN_SESSION_TOKENS
        return (
            f"{name} {format_bytes(slots * self.slot_bytes)}: {slots:,} blocks of {self.block_tokens} tokens, "
            f"{sessions:.1f} sessions of 4K tokens"
        )


def host_memory() -> Memory:
    """RAM, or less where a cgroup says so."""
    machine = psutil.virtual_memory()
    group = cgroup.tightest()
    if group is None or group.limit_bytes >= machine.total:
        return Memory(machine.total, machine.available)
    return Memory(group.limit_bytes, min(machine.available, group.available_bytes))


def nvme_slots(settings: Settings, slot_bytes: int, disk: Disk) -> int:
    """Blocks of `slot_bytes` that the disk budget holds, headers included; 0 switches the tier off.

    Raises:
        SettingInvalid: the budget is not there, or holds no block; names --nvme-bytes.
    """
    asked = settings.nvme_bytes
    room = disk.free_bytes + disk.held_bytes
    budget = asked if isinstance(asked, int) else min(NVME_BYTES, int(room * NVME_FREE_SHARE))
    if isinstance(asked, int) and asked > room:
        raise SettingInvalid(
            "--nvme-bytes",
            f"{format_bytes(asked)} do not fit into the {format_bytes(room)} that are free in {settings.nvme_dir}; "
            f"give at most {room // MIB}MiB, or another --nvme-dir",
        )
    slots = budget // (slot_bytes + HEADER_BYTES)
    if isinstance(asked, int) and asked and not slots:
        least = -(-(slot_bytes + HEADER_BYTES) // MIB)
        raise SettingInvalid("--nvme-bytes", f"{format_bytes(asked)} holds no block; give {least}MiB or more, or 0")
    return slots


def rated_bytes_per_day(settings: Settings, disk: Disk) -> int:
    """What the drive may be written in a day."""
    asked = settings.nvme_rated_bytes_per_day
    return asked if isinstance(asked, int) else int(disk.total_bytes * RATED_WRITES_A_DAY)


def plan(
    settings: Settings,
    layout: KVLayout,
    memory: Memory,
    *,
    host: Memory,
    on_cpu: bool,
    weights_bytes: int,
    model_context: int,
) -> Sizes:
    """Budgets for one device and its host, held against what is free on them.

    `weights_bytes` are those still to be loaded: all of them in a call before loading, so that a misfit is refused in
    the first second, and 0 in a call after it. `memory` is the device's own, which for a CPU is `host`.

    Raises:
        SettingInvalid: model and caches do not fit, or HBM would hold too little; names the flags to change.
    """
    room = memory.available_bytes - weights_bytes
    if room <= 0:
        raise _too_heavy(settings, weights_bytes, memory)
    budget = _hbm_budget(settings, memory, room, on_cpu=on_cpu)
    if budget > room:
        raise SettingInvalid(
            "--hbm-bytes",
            f"{_said(settings.hbm_bytes, budget)} and the weights' {format_bytes(weights_bytes)} do not fit into the "
            f"{format_bytes(memory.available_bytes)} that are free; give at most {room // MIB}MiB",
        )
    slots = budget // layout.slot_bytes
    if slots < MIN_SLOTS:
        raise SettingInvalid(
            "--hbm-bytes",
            f"{_said(settings.hbm_bytes, budget)} holds {slots} blocks of {layout.block_tokens} tokens of this model "
            f"and {MIN_SLOTS} are the least; give {-(-MIN_SLOTS * layout.slot_bytes // MIB)}MiB or more",
        )
    dram_slots = _dram_slots(settings, layout, host, taken=weights_bytes + budget if on_cpu else 0, on_cpu=on_cpu)
    context, notes = _context(settings, slots * layout.block_tokens, model_context)
    return Sizes(slots, dram_slots, layout.slot_bytes, layout.block_tokens, context, notes)


def _hbm_budget(settings: Settings, memory: Memory, room: int, *, on_cpu: bool) -> int:
    if isinstance(settings.hbm_bytes, int):
        return settings.hbm_bytes
    return int(memory.limit_bytes * CPU_HBM_SHARE) if on_cpu else int(room * CUDA_HBM_SHARE)


def _dram_slots(settings: Settings, layout: KVLayout, host: Memory, *, taken: int, on_cpu: bool) -> int:
    """Slots of DRAM in what `host` has free besides `taken`, the weights and HBM of a CPU."""
    asked = settings.dram_bytes
    share = CPU_DRAM_SHARE if on_cpu else CUDA_DRAM_SHARE
    budget = asked if isinstance(asked, int) else int(host.limit_bytes * share)
    ring = 2 * RING_SLOTS * layout.slot_bytes
    room = host.available_bytes - taken - ring
    if budget and budget > room:
        besides = f", --hbm-bytes and the weights ({format_bytes(taken)})" if on_cpu else ""
        advice = f"give at most {room // MIB}MiB" if room >= MIB else "give 0"
        raise SettingInvalid(
            "--dram-bytes",
            f"{_said(asked, budget)}{besides} and {format_bytes(ring)} for staging do not fit into the "
            f"{format_bytes(host.available_bytes)} that are free; {advice}{', or lower --hbm-bytes' if on_cpu else ''}",
        )
    slots = budget // layout.slot_bytes
    if slots == 0 and isinstance(asked, int) and asked:
        least = -(-layout.slot_bytes // MIB)
        raise SettingInvalid("--dram-bytes", f"{format_bytes(asked)} holds no block; give {least}MiB or more, or 0")
    return slots


def _context(settings: Settings, hbm_tokens: int, model_context: int) -> tuple[int, tuple[str, ...]]:
    """The longest context, and a line that says so where HBM is what limits it."""
    asked = model_context if settings.max_context == "auto" else settings.max_context
    if asked > model_context:
        raise SettingInvalid("--max-context", f"{asked:,} is more than the {model_context:,} tokens the model knows")
    if asked <= hbm_tokens:
        return asked, ()
    note = f"--max-context is {hbm_tokens:,} instead of {asked:,}: HBM holds no more (--hbm-bytes)"
    return hbm_tokens, (note,)


def _too_heavy(settings: Settings, weights_bytes: int, memory: Memory) -> SettingInvalid:
    name = "--dtype" if settings.dtype == "fp32" else "--model"
    advice = "take bf16" if settings.dtype == "fp32" else "take a smaller model"
    return SettingInvalid(
        name,
        f"the weights need {format_bytes(weights_bytes)} and {format_bytes(memory.available_bytes)} are free; {advice}",
    )


def _said(asked: int | str, budget: int) -> str:
    return f"{'auto, ' if asked == 'auto' else ''}{format_bytes(budget)}"
