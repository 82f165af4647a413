"""`dormouse doctor`: what this machine makes of the settings, and which settings would hold what is wanted."""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from app import disk_tier, doctor_disk, probe, sizes, startup
from app.capacity import Room, Wanted, wanted
from app.doctor_warnings import Host, Warned, warnings
from app.sizes import MIB, SHOWN_SESSION_TOKENS, Memory, host_memory
from app.units import format_bytes
from kvstore.cost import RECOMPUTE_MARGIN
from kvstore.tiers.base import Run
from kvstore.tiers.hbm import hbm_store
from kvstore.transfers import RUN_BLOCKS
from models.native.decoder import native_of
from models.packing import PackedLinear

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from app.doctor_disk import DiskRates
    from app.settings import Settings
    from app.startup import Machinery
    from kvstore.tiers.base import Landed, SlotStore
    from kvstore.tiers.dram import DramSlab

ROUNDS = 7
PREFILL_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    kind: str
    memory: Memory
    host: Memory


@dataclass(frozen=True, slots=True)
class Model:
    """`weights_bytes` as they lie on the device."""

    name: str
    dtype: str
    weights_bytes: int
    token_bytes: int
    block_tokens: int
    slot_bytes: int
    max_context: int
    longest_context: int
    """What the model knows, whatever HBM holds."""


@dataclass(frozen=True, slots=True)
class Exactness:
    """`path` is the one that would serve: exact or fast."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Copying:
    """One direction, in runs as they are when serving: by one thread, to and from NVMe by as many as serve."""

    source: str
    target: str
    bytes_per_second: float
    session_seconds: float  # of 4K tokens


@dataclass(frozen=True, slots=True)
class Waking:
    """What it takes to have 1,024 tokens back; 0 is not known. `gate` says what a turn would do."""

    from_dram_seconds: float
    from_nvme_seconds: float
    recompute_seconds: float
    gate: str


@dataclass(frozen=True, slots=True)
class Budget:
    tier: str
    bytes: int
    blocks: int
    tokens: int
    sessions_4k: float


@dataclass(frozen=True, slots=True)
class Findings:
    """All that `doctor` knows. `advice` is for people; every figure in it stands elsewhere, too.

    `disk` is None where nothing is kept on disk.
    """

    device: Device
    model: Model
    exactness: Exactness
    copies: tuple[Copying, ...]
    waking: Waking
    budgets: tuple[Budget, ...]
    ring_bytes: int
    advice: tuple[str, ...]
    wanted: Wanted | None
    disk: DiskRates | None = None
    warnings: tuple[Warned, ...] = ()


def examine(settings: Settings, sessions: int | None, tokens: int) -> Findings:
    """Load the model as `serve` would and measure; blocking.

    Raises:
        SettingInvalid, ModelError: `serve` would not start, either.
    """
    machinery = startup.load(settings)
    budgets, model = machinery.sizes, machinery.model
    on_cpu = model.device.type == "cpu"
    device = Device(_device_name(model.device), str(model.device), startup.memory_of(model.device), host_memory())
    copies, disk = measure_copies(machinery), _disk_rates(settings, machinery)
    asked = None
    if sessions is not None:
        asked = wanted(sessions, tokens, budgets, _room(settings, machinery, device, on_cpu=on_cpu))
    findings = Findings(
        device=device,
        model=Model(
            name=model.name,
            dtype=model.layout.dtype,
            weights_bytes=_weights_bytes(model.model),
            token_bytes=model.layout.token_bytes,
            block_tokens=model.layout.block_tokens,
            slot_bytes=model.layout.slot_bytes,
            max_context=budgets.max_context,
            longest_context=model.max_positions,
        ),
        exactness=Exactness("exact" if machinery.runner.exact else "fast", machinery.attention),
        copies=(*copies, *_disk_copies(disk, machinery)),
        waking=_waking(settings, machinery, disk),
        budgets=tuple(
            Budget(tier, slots * budgets.slot_bytes, slots, held, held / SHOWN_SESSION_TOKENS)
            for tier, slots, held in (
                ("hbm", budgets.hbm_slots, budgets.hbm_tokens),
                ("dram", budgets.dram_slots, budgets.dram_tokens),
                *_disk(settings, machinery),
            )
        ),
        ring_bytes=budgets.ring_bytes,
        advice=_advice(machinery, copies, on_cpu=on_cpu),
        wanted=asked,
        disk=disk,
    )
    return replace(findings, warnings=warnings(findings, _host()))


def _host() -> Host:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    files = 2**31 if limit == resource.RLIM_INFINITY else limit
    return Host(_cores(), os.getloadavg()[0], files, torch.get_num_threads())


def _cores() -> int:
    """That this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _disk_rates(settings: Settings, machinery: Machinery) -> DiskRates | None:
    if settings.nvme_bytes == 0:
        return None
    slot_bytes = machinery.sizes.slot_bytes
    with _slab(max(1, doctor_disk.MOST_BYTES // slot_bytes), slot_bytes, machinery) as slab:
        return doctor_disk.measure(settings, slab, _nearest(settings.nvme_dir))


def _disk_copies(disk: DiskRates | None, machinery: Machinery) -> Iterator[Copying]:
    if disk is None or disk.fault:
        return
    session = machinery.model.layout.blocks_for(SHOWN_SESSION_TOKENS) * machinery.sizes.slot_bytes
    for source, target, rate in (
        ("dram", "nvme", disk.write_bytes_per_second),
        ("nvme", "dram", disk.read_bytes_per_second),
    ):
        yield Copying(source, target, rate, session / rate)


def _nearest(folder: Path) -> Path:
    """`folder`, or what is there of its path: the same file system."""
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _disk(settings: Settings, machinery: Machinery) -> Iterator[tuple[str, int, int]]:
    if settings.nvme_bytes == 0:
        return
    held = sum(path.stat().st_size for path in settings.nvme_dir.glob("*/slabs/*.kv"))
    disk = disk_tier.disk_of(_nearest(settings.nvme_dir), held)
    slots = sizes.nvme_slots(settings, machinery.sizes.slot_bytes, disk)
    yield "nvme", slots, slots * machinery.sizes.block_tokens


def _waking(settings: Settings, machinery: Machinery, disk: DiskRates | None) -> Waking:
    """Of 1K tokens, measured now."""
    # A disturbance makes computing look slower, and never faster.
    prefill = max(probe.prefill_rate(machinery.runner) for _ in range(PREFILL_ROUNDS))
    dram = probe.dram_rate(machinery.runner, machinery.slab)
    nvme = 0.0 if disk is None else disk.read_bytes_per_second / machinery.sizes.slot_bytes
    blocks = 1024 / machinery.sizes.block_tokens
    up = blocks / dram if dram else 0.0
    from_nvme = blocks / nvme + up if nvme else 0.0
    recompute = 1024 / prefill
    slower = from_nvme or up
    if settings.cost_gate == "off":
        gate = "off: everything that sleeps is woken"
    elif slower > RECOMPUTE_MARGIN * recompute:
        gate = "would compute again what lies deepest"
    else:
        gate = f"wakes: {recompute / slower:.0f} times quicker than computing again" if slower else "nothing sleeps"
    return Waking(up, from_nvme, recompute, gate)


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU with {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


def _weights_bytes(model: PreTrainedModel) -> int:
    """As they lie in memory: packed weights are no parameters any more."""
    packed = (module.packed for module in model.modules() if isinstance(module, PackedLinear))
    native = native_of(model)
    taken = 0 if native is None else native.packed_bytes
    return taken + sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *packed))


def _room(settings: Settings, machinery: Machinery, device: Device, *, on_cpu: bool) -> Room:
    """What budgets could take once the caches that were just made for the examination are gone."""
    # A fresh arena on a CPU is zero pages that nothing has touched: it takes nothing yet.
    made = 0 if on_cpu else machinery.sizes.hbm_bytes
    memory = Memory(device.memory.limit_bytes, device.memory.available_bytes + made)
    disk = disk_tier.disk_of(_nearest(settings.nvme_dir), 0)
    spare = max(0, disk.free_bytes - int(disk.total_bytes * settings.nvme_free_share))
    return Room(memory, device.host, on_cpu, machinery.model.max_positions, spare)


def _advice(machinery: Machinery, copies: tuple[Copying, ...], *, on_cpu: bool) -> tuple[str, ...]:
    sizes = machinery.sizes
    if not (on_cpu and sizes.dram_slots):
        return ()
    together = sizes.hbm_bytes + sizes.dram_bytes
    waking = max(copying.session_seconds for copying in copies) * 1000
    return (
        f"On a CPU, HBM and DRAM are the same memory: `--hbm-bytes {together // MIB}MiB --dram-bytes 0` makes one "
        f"arena of the same {format_bytes(together)}, holds no block twice, and wakes 4K tokens without the "
        f"{waking:.0f} ms of a copy.",
    )


# --- copies ---------------------------------------------------------------------------------


def measure_copies(machinery: Machinery) -> tuple[Copying, ...]:
    """DRAM <-> HBM over a 4K session's blocks, or as many as HBM holds."""
    layout = machinery.model.layout
    blocks = min(layout.blocks_for(SHOWN_SESSION_TOKENS), machinery.sizes.hbm_slots)
    hbm = hbm_store(machinery.runner.arena, layout.slot_bytes)
    session_bytes = layout.blocks_for(SHOWN_SESSION_TOKENS) * layout.slot_bytes
    with _slab(blocks, layout.slot_bytes, machinery) as slab:
        down = _bytes_per_second(hbm.copy_out, hbm, slab, blocks)
        up = _bytes_per_second(hbm.copy_in, hbm, slab, blocks)
    return (
        Copying("hbm", "dram", down, session_bytes / down),
        Copying("dram", "hbm", up, session_bytes / up),
    )


@contextmanager
def _slab(blocks: int, slot_bytes: int, machinery: Machinery) -> Iterator[DramSlab]:
    slab = startup.make_slab(blocks, slot_bytes, machinery.model.device)
    slab.open()
    try:
        yield slab
    finally:
        slab.close()


def _bytes_per_second(copy: Callable[[Run], Landed], store: SlotStore, slab: DramSlab, blocks: int) -> float:
    """Median of several rounds; the first, in which fresh memory is touched, does not count."""
    runs = [_run(slab, first, min(first + RUN_BLOCKS, blocks)) for first in range(0, blocks, RUN_BLOCKS)]
    seconds = []
    for _ in range(1 + ROUNDS):
        started = time.perf_counter()
        for run in runs:
            landed = copy(run)
            assert landed.good == len(run.slots)
        seconds.append(time.perf_counter() - started)
    return blocks * store.slot_bytes / statistics.median(seconds[1:])


def _run(slab: DramSlab, first: int, end: int) -> Run:
    slots = tuple(range(first, end))
    return Run(slots, slab, slots, (None,) * len(slots))


# --- shown ----------------------------------------------------------------------------------


def as_json(findings: Findings) -> dict[str, object]:
    """The fields as they are; `wanted` has its `flags` beside them, or is null."""
    told: dict[str, object] = asdict(findings)
    if findings.wanted is not None:
        told["wanted"] = asdict(findings.wanted) | {"flags": findings.wanted.flags}
    return told


def show(findings: Findings, console: Console | None = None) -> None:
    console = console or Console()
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, text in _rows(findings):
        table.add_row(f"[bold]{name}[/bold]", text)
    console.print(table, highlight=False)
    for warned in findings.warnings:
        console.print(f"\n[bold yellow]warning[/bold yellow] {escape(warned.text)}", highlight=False)
        console.print(f"        {escape(warned.remedy)}", highlight=False)
    for line in findings.advice:
        console.print(f"\n{line}", highlight=False)
    if findings.wanted is not None:
        console.print(f"\n{_answer(findings.wanted)}", highlight=False, soft_wrap=True)


def _rows(findings: Findings) -> Iterator[tuple[str, str]]:
    device, model = findings.device, findings.model
    yield "device", f"{device.kind}: {device.name}"
    yield "memory", f"{_told(device.memory)}" + ("" if device.kind == "cpu" else f"; host {_told(device.host)}")
    yield "model", f"{model.name}, {model.dtype}, weights {format_bytes(model.weights_bytes)}"
    yield "K/V", f"{model.token_bytes:,} bytes a token, blocks of {model.block_tokens} tokens"
    yield "attention", findings.exactness.reason.removeprefix("attention ")
    if (disk := findings.disk) is not None:
        yield "disk", f"{disk.folder}, {disk.file_system or 'unknown file system'}, {disk.mode or 'not usable'}"
    for copying in findings.copies:
        yield (
            f"{NAMES[copying.source]} to {NAMES[copying.target]}",
            f"{copying.bytes_per_second / 1e9:.1f} GB/s, {copying.session_seconds * 1000:.0f} ms for 4K tokens",
        )
    for name, seconds in (
        ("1K from DRAM", findings.waking.from_dram_seconds),
        ("1K from NVMe", findings.waking.from_nvme_seconds),
        ("1K computed", findings.waking.recompute_seconds),
    ):
        yield name, f"{seconds * 1000:.3g} ms" if seconds else "-"
    yield "cost gate", findings.waking.gate
    for budget in findings.budgets:
        yield (
            NAMES[budget.tier],
            f"{format_bytes(budget.bytes)}: {budget.tokens:,} tokens, {budget.sessions_4k:.1f} sessions of 4K tokens",
        )
    yield "staging", f"{format_bytes(findings.ring_bytes)}, outside DRAM's budget"
    yield "context", f"{model.max_context:,} tokens"


NAMES = {"hbm": "HBM", "dram": "DRAM", "nvme": "NVMe"}


def _told(memory: Memory) -> str:
    return f"{format_bytes(memory.available_bytes)} free of {format_bytes(memory.limit_bytes)}"


def _answer(wanted: Wanted) -> str:
    asked = f"{wanted.sessions:,} sessions of {wanted.tokens:,} tokens"
    if wanted.problem:
        return f"{asked} would need {wanted.flags}, which this machine does not have: {wanted.problem}"
    return f"{asked}: dormouse serve {wanted.flags}"
