"""What doctor warns of, on findings of machines that are not at hand."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from app import doctor_disk
from app.doctor import Budget, Device, Exactness, Findings, Model, Waking
from app.doctor_disk import DiskRates
from app.doctor_warnings import Host, warnings
from app.settings import Settings
from app.sizes import Memory
from kvstore.tiers.dram import DramSlab

if TYPE_CHECKING:
    from pathlib import Path

MEMORY = Memory(2**35, 2**34)
SOUND = Findings(
    device=Device("a machine", "cpu", MEMORY, MEMORY),
    model=Model("m", "bf16", 2**28, 23_040, 32, 737_280, 8192, 8192),
    exactness=Exactness("exact", "attention exact: bit-equal"),
    copies=(),
    waking=Waking(0.004, 0.02, 1.0, "wakes"),
    budgets=(
        Budget("hbm", 2**30, 1400, 44_800, 10.9),
        Budget("dram", 2**31, 2800, 89_600, 21.9),
        Budget("nvme", 2**34, 22_000, 704_000, 171.9),
    ),
    ring_bytes=0,
    advice=(),
    wanted=None,
    disk=DiskRates("/mnt/nvme", "ext4", "direct", 1e9, 2e9),
)
HOST = Host(cores=8, load=0.5, open_files=65_536, threads=8)


def rules(findings: Findings, host: Host = HOST) -> list[str]:
    return [warned.rule for warned in warnings(findings, host)]


def disk(**changes: Any) -> Findings:
    assert SOUND.disk is not None
    return replace(SOUND, disk=replace(SOUND.disk, **changes))


def test_a_sound_machine_is_not_warned_of() -> None:
    assert warnings(SOUND, HOST) == ()


@pytest.mark.parametrize(
    ("findings", "rule"),
    [
        (replace(SOUND, budgets=(SOUND.budgets[0], Budget("dram", 0, 0, 0, 0)), disk=None), "nothing_sleeps"),
        (replace(SOUND, budgets=(Budget("hbm", 2**20, 91, 2912, 0.7), *SOUND.budgets[1:])), "small_hbm"),
        (replace(SOUND, exactness=Exactness("fast", "attention fast: fp32")), "not_exact"),
        (disk(fault="[Errno 13] Permission denied", mode=""), "disk_unusable"),
        (disk(file_system="tmpfs"), "disk_is_memory"),
        (disk(file_system="nfs4"), "disk_is_remote"),
        (disk(mode="buffered"), "buffered"),
        (replace(SOUND, waking=Waking(0.004, 9.0, 1.0, "would compute again")), "slow_disk"),
        (replace(SOUND, budgets=(*SOUND.budgets[:2], Budget("nvme", 2**29, 700, 22_400, 5.5))), "small_disk"),
    ],
)
def test_each_fault_is_told_by_its_rule_with_a_remedy(findings: Findings, rule: str) -> None:
    (warned,) = warnings(findings, HOST)
    assert warned.rule == rule
    assert warned.text
    assert warned.remedy


def test_what_the_process_was_given_is_looked_at_too() -> None:
    assert rules(SOUND, replace(HOST, load=11.0)) == ["busy"]
    assert rules(SOUND, replace(HOST, open_files=1024)) == ["few_files"]
    (warned,) = warnings(SOUND, replace(HOST, threads=16))
    assert warned.remedy == "--threads 8"


def test_a_folder_that_cannot_be_written_is_a_finding_and_no_crash(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    slab = DramSlab(2, 8192)
    slab.open()
    try:
        found = doctor_disk.measure(Settings(), slab, file)
    finally:
        slab.close()
    assert found.fault
    assert found.read_bytes_per_second == 0


def test_blocks_are_measured_in_either_mode(tmp_path: Path) -> None:
    slab = DramSlab(20, 8192)
    slab.open()
    try:
        found = doctor_disk.measure(Settings(nvme_io="buffered"), slab, tmp_path)
    finally:
        slab.close()
    assert (found.mode, found.fault, found.folder) == ("buffered", "", str(tmp_path))
    assert found.read_bytes_per_second > 0
    assert found.write_bytes_per_second > 0
    assert list(tmp_path.iterdir()) == []
