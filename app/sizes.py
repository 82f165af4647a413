"""What `auto` budgets become on this machine, and whether model and cache fit at all.

    memory limit     what this process may use: the tightest cgroup limit above it, or RAM
    available        what of it is free now

CUDA: HBM takes 90% of the device memory that is free after weights and a probe step. CPU: 5% of the limit. The rest of
this module is arithmetic on those numbers, so that every refusal can be tested without a machine that small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from app import cgroup
from app.units import format_bytes
from kvstore.errors import SettingInvalid

if TYPE_CHECKING:
    from app.settings import Settings
    from kvstore.types import KVLayout

CPU_HBM_SHARE = 0.05
CUDA_HBM_SHARE = 0.90
MIB = 1024**2
MIN_SLOTS = 2
"""One block to read from and one to write to."""

SHOWN_SESSION_TOKENS = 4096
"""Budgets are printed in sessions of this many tokens."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one memory: all that may be used, and what is free now."""

    limit_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """The budgets in force; `hbm_bytes` is a whole number of slots."""

    hbm_slots: int
    slot_bytes: int
    block_tokens: int
    max_context: int
    notes: tuple[str, ...] = ()

    @property
    def hbm_bytes(self) -> int:
        return self.hbm_slots * self.slot_bytes

    @property
    def hbm_tokens(self) -> int:
        return self.hbm_slots * self.block_tokens

    def lines(self) -> list[str]:
        """For people, at start: the number each budget became, and what it holds."""
        sessions = self.hbm_tokens / SHOWN_SESSION_TOKENS
        return [
            f"HBM {format_bytes(self.hbm_bytes)}: {self.hbm_slots:,} blocks of {self.block_tokens} tokens, "
            f"{sessions:.1f} sessions of 4K tokens",
            f"context {self.max_context:,} tokens",
            *self.notes,
        ]


def host_memory() -> Memory:
    """RAM, or less where a cgroup says so."""
    machine = psutil.virtual_memory()
    group = cgroup.tightest()
    if group is None or group.limit_bytes >= machine.total:
        return Memory(machine.total, machine.available)
    return Memory(group.limit_bytes, min(machine.available, group.available_bytes))


def plan(
    settings: Settings, layout: KVLayout, memory: Memory, *, on_cpu: bool, weights_bytes: int, model_context: int
) -> Sizes:
    """Budgets for one device, held against what is free on it.

    `weights_bytes` are those still to be loaded: all of them in a call before loading, so that a misfit is refused in
    the first second, and 0 in a call after it. `memory` is the device's own, which for a CPU is the host's.

    Raises:
        SettingInvalid: model and cache do not fit, or the cache would hold too little; names the flag to change.
    """
    room = memory.available_bytes - weights_bytes
    if room <= 0:
        raise _too_heavy(settings, weights_bytes, memory)
    budget = _hbm_budget(settings, memory, room, on_cpu=on_cpu)
    if budget > room:
        raise SettingInvalid(
            "--hbm-bytes",
            f"{_said(settings, budget)} and the weights' {format_bytes(weights_bytes)} do not fit into the "
            f"{format_bytes(memory.available_bytes)} that are free; give at most {room // MIB}MiB",
        )
    slots = budget // layout.slot_bytes
    if slots < MIN_SLOTS:
        raise SettingInvalid(
            "--hbm-bytes",
            f"{_said(settings, budget)} holds {slots} blocks of {layout.block_tokens} tokens of this model and "
            f"{MIN_SLOTS} are the least; give {-(-MIN_SLOTS * layout.slot_bytes // MIB)}MiB or more",
        )
    context, notes = _context(settings, slots * layout.block_tokens, model_context)
    return Sizes(slots, layout.slot_bytes, layout.block_tokens, context, notes)


def _hbm_budget(settings: Settings, memory: Memory, room: int, *, on_cpu: bool) -> int:
    if isinstance(settings.hbm_bytes, int):
        return settings.hbm_bytes
    return int(memory.limit_bytes * CPU_HBM_SHARE) if on_cpu else int(room * CUDA_HBM_SHARE)


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


def _said(settings: Settings, budget: int) -> str:
    return f"{'auto, ' if settings.hbm_bytes == 'auto' else ''}{format_bytes(budget)}"
