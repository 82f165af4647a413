"""The measurement of the NVMe tier moves every block both ways; how fast is for a quiet machine to tell."""

from __future__ import annotations

import json
import resource
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from bench import nvme
from bench.errors import BenchFailed
from bench.nvme import NvmePlan, NvmeSamples

if TYPE_CHECKING:
    from pathlib import Path

PLAN = NvmePlan(blocks=20, slot_bytes=8192, threads=2, rounds=2)


def shown(samples: NvmeSamples) -> str:
    json.dumps(nvme.part(samples))
    console = Console(width=200)
    with console.capture() as capture:
        console.print(nvme.table(samples))
    return capture.get()


def test_every_round_writes_and_reads_in_every_mode_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    told: list[str] = []
    samples = nvme.measure(PLAN, tmp_path, told.append)
    modes = [mode for mode in nvme.MODES if mode not in samples.skipped]
    assert "buffered" in modes
    assert told == [f"{mode} {number}" for number in (1, 2) for mode in modes]
    assert all(len(rates) == 2 and min(rates) > 0.0 for rates in (samples.read | samples.written).values())
    assert samples.share_of_fio is None
    assert list(tmp_path.iterdir()) == []
    assert "fio is not installed" in shown(samples)


@pytest.mark.golden  # with `make golden`: a machine may lack fio
def test_fio_reads_the_same_file_in_turn(tmp_path: Path) -> None:
    samples = nvme.measure(PLAN, tmp_path, lambda what: None)
    if "direct" in samples.skipped:
        pytest.skip(samples.skipped["direct"])
    assert len(samples.fio) == PLAN.rounds
    assert samples.share_of_fio is not None
    assert "of what fio reads; the bar is 85%" in shown(samples)


def test_a_disk_that_does_not_give_back_is_no_figure(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16_384, hard))
    try:
        with pytest.raises(BenchFailed, match="not every block made it"):
            nvme.measure(PLAN, tmp_path, lambda what: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
