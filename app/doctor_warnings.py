"""What `doctor` would change here, each with its remedy: rules on what was found, nothing measured (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.sizes import SHOWN_SESSION_TOKENS
from app.units import format_bytes
from kvstore.cost import RECOMPUTE_MARGIN

if TYPE_CHECKING:
    from app.doctor import Findings

IN_MEMORY = ("tmpfs", "ramfs")
REMOTE = ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "fuse.sshfs", "glusterfs")
LEAST_FILES = 4096
"""Open files: one for each connection, besides slabs and the catalog."""
BUSY = 1.25
"""Load for each core beyond which figures say more of the others than of this machine."""


@dataclass(frozen=True, slots=True)
class Host:
    """What the process was given: `load` is the average of the last minute, `open_files` the limit of them."""

    cores: int
    load: float
    open_files: int
    threads: int


@dataclass(frozen=True, slots=True)
class Warned:
    """`rule` is for programs."""

    rule: str
    text: str
    remedy: str


def warnings(findings: Findings, host: Host) -> tuple[Warned, ...]:
    """Of every rule that applies."""
    return tuple(warned for rule in RULES for warned in rule(findings, host))


def _busy(findings: Findings, host: Host) -> Iterator[Warned]:
    if host.load > BUSY * host.cores:
        text = f"the machine is busy (load {host.load:.1f} on {host.cores} cores): these figures are rough"
        yield Warned("busy", text, "run it again when nothing else runs")


def _nothing_sleeps(findings: Findings, _host: Host) -> Iterator[Warned]:
    if not any(budget.blocks for budget in findings.budgets if budget.tier != "hbm"):
        yield Warned("nothing_sleeps", "nothing is kept below HBM", "give --dram-bytes or --nvme-bytes")


def _small_hbm(findings: Findings, _host: Host) -> Iterator[Warned]:
    hbm, longest = findings.budgets[0], findings.model.longest_context
    if hbm.tokens < min(SHOWN_SESSION_TOKENS, longest):
        text = f"HBM holds {hbm.tokens:,} tokens, so no context is longer (the model knows {longest:,})"
        yield Warned("small_hbm", text, "raise --hbm-bytes")


def _not_exact(findings: Findings, _host: Host) -> Iterator[Warned]:
    if findings.exactness.path != "exact":
        text = f"what is said may depend on what else is computed with it: {findings.exactness.reason}"
        yield Warned("not_exact", text, "--dtype bf16 and --attention exact, where a check proves it")


def _disk_unusable(findings: Findings, _host: Host) -> Iterator[Warned]:
    if findings.disk is not None and findings.disk.fault:
        text = f"{findings.disk.folder} cannot be used: {findings.disk.fault}"
        yield Warned("disk_unusable", text, "mend that, name another --nvme-dir, or give --nvme-bytes 0")


def _disk_is_no_disk(findings: Findings, _host: Host) -> Iterator[Warned]:
    disk = findings.disk
    if disk is None:
        return
    if disk.file_system in IN_MEMORY:
        text = f"{disk.folder} is on {disk.file_system}: its files take memory, and a restart of the machine empties it"
        yield Warned("disk_is_memory", text, "put --nvme-dir on a disk")
    if disk.file_system in REMOTE:
        text = f"{disk.folder} is on {disk.file_system}, and wakes wait for the network"
        yield Warned("disk_is_remote", text, "put --nvme-dir on a disk of this machine")


def _buffered(findings: Findings, _host: Host) -> Iterator[Warned]:
    disk = findings.disk
    if disk is not None and disk.mode == "buffered":
        text = f"{disk.folder} is read and written through the page cache, which takes what memory is free"
        yield Warned("buffered", text, "none, if that is wanted (--nvme-io buffered); else a file system with O_DIRECT")


def _slow_disk(findings: Findings, _host: Host) -> Iterator[Warned]:
    waking = findings.waking
    if waking.from_nvme_seconds > RECOMPUTE_MARGIN * waking.recompute_seconds > 0:
        text = "computing again is quicker than waking from this disk, so little of what it holds will be used"
        yield Warned("slow_disk", text, "a faster disk, more --dram-bytes, or --nvme-write-policy on-pressure")


def _small_disk(findings: Findings, _host: Host) -> Iterator[Warned]:
    budgets = {budget.tier: budget for budget in findings.budgets}
    nvme, dram = budgets.get("nvme"), budgets["dram"]
    if nvme is not None and nvme.blocks and nvme.blocks < budgets["hbm"].blocks + dram.blocks:
        text = f"NVMe holds {format_bytes(nvme.bytes)}, less than HBM and DRAM together: a restart forgets some of it"
        yield Warned("small_disk", text, "raise --nvme-bytes, or make room on the disk")


def _few_files(_findings: Findings, host: Host) -> Iterator[Warned]:
    if host.open_files < LEAST_FILES:
        text = f"this process may open {host.open_files:,} files, and every connection is one"
        yield Warned("few_files", text, "ulimit -n 65536 before serving, or LimitNOFILE= in a unit")


def _too_many_threads(_findings: Findings, host: Host) -> Iterator[Warned]:
    if host.threads > host.cores:
        text = f"{host.threads} threads compute on {host.cores} cores, and wait for each other"
        yield Warned("too_many_threads", text, f"--threads {host.cores}")


RULES: tuple[Callable[[Findings, Host], Iterator[Warned]], ...] = (
    _busy,
    _nothing_sleeps,
    _small_hbm,
    _not_exact,
    _disk_unusable,
    _disk_is_no_disk,
    _buffered,
    _slow_disk,
    _small_disk,
    _few_files,
    _too_many_threads,
)
