"""What doctor finds on this very machine, with the embedded model."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from app import doctor
from app.settings import Settings
from kvstore.errors import SettingInvalid
from models import loader
from models.errors import ModelUnavailable

if TYPE_CHECKING:
    from app.doctor import Findings

MIB = 2**20
SLOT = 737_280


@pytest.fixture(scope="module")
def findings(cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Findings:
    settings = Settings(
        device="cpu",
        attention="fast",
        hbm_bytes=64 * MIB,
        dram_bytes=128 * MIB,
        nvme_bytes=256 * MIB,
        nvme_dir=tmp_path_factory.mktemp("nvme") / "made by serve",
        cache_dir=cache_dir,
    )
    return doctor.examine(settings, sessions=20, tokens=2048)


def test_it_tells_what_serve_would_run_on(findings: Findings) -> None:
    assert findings.device.kind == "cpu"
    assert findings.device.memory.limit_bytes == findings.device.host.limit_bytes
    assert (findings.model.dtype, findings.model.token_bytes, findings.model.slot_bytes) == ("bf16", 23_040, SLOT)
    assert findings.model.weights_bytes > 250 * MIB
    assert findings.model.max_context == 91 * 32
    assert findings.exactness.path == "fast"
    assert "as asked for" in findings.exactness.reason


def test_what_the_weights_take_is_what_was_reckoned_with_before_loading_them(
    findings: Findings, cache_dir: Path
) -> None:
    """Packing leaves a tied head twice in memory, 56 MB of the embedded model's."""
    reckoned = loader.estimate("embedded", dtype="bf16", cache_dir=cache_dir)
    assert findings.model.weights_bytes == pytest.approx(reckoned, rel=0.001)


def test_it_tells_what_the_budgets_hold(findings: Findings) -> None:
    hbm, dram, nvme = findings.budgets
    assert (nvme.tier, nvme.blocks) == ("nvme", 256 * MIB // (SLOT + 4096))
    assert (hbm.tier, hbm.blocks, hbm.bytes, hbm.tokens) == ("hbm", 91, 91 * SLOT, 91 * 32)
    assert (dram.tier, dram.blocks, dram.tokens, dram.sessions_4k) == ("dram", 182, 182 * 32, 182 / 128)
    assert findings.ring_bytes == 16 * SLOT


def test_it_measures_every_direction(findings: Findings) -> None:
    ways = [("hbm", "dram"), ("dram", "hbm"), ("dram", "nvme"), ("nvme", "dram")]
    assert [(copying.source, copying.target) for copying in findings.copies] == ways
    for copying in findings.copies:
        assert copying.bytes_per_second > 5e6
        assert copying.session_seconds == pytest.approx(128 * SLOT / copying.bytes_per_second)


def test_it_measures_waking_against_computing_again(findings: Findings) -> None:
    waking = findings.waking
    assert 0 < waking.from_dram_seconds < waking.from_nvme_seconds
    assert waking.recompute_seconds > 0
    assert waking.gate


def test_json_has_every_finding_under_its_name(findings: Findings) -> None:
    told: dict[str, Any] = json.loads(json.dumps(doctor.as_json(findings)))
    assert set(told) == {
        "device",
        "model",
        "exactness",
        "copies",
        "waking",
        "budgets",
        "ring_bytes",
        "advice",
        "wanted",
        "disk",
        "warnings",
    }
    assert told["budgets"][0]["sessions_4k"] == 91 / 128
    assert told["wanted"]["flags"] == "--hbm-bytes 64MiB --dram-bytes 900MiB"
    assert told["wanted"]["problem"] == ""


def test_for_people_it_ends_with_the_command_to_copy(findings: Findings) -> None:
    out = io.StringIO()
    doctor.show(findings, Console(file=out, width=120))
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert lines[-1] == "20 sessions of 2,048 tokens: dormouse serve --hbm-bytes 64MiB --dram-bytes 900MiB"
    assert "HBM 63.98 MiB: 2,912 tokens, 0.7 sessions of 4K tokens" in lines
    assert any(line.startswith("DRAM to HBM ") and line.endswith("ms for 4K tokens") for line in lines)
    # Both tiers are RAM here: what one large arena would gain is said.
    assert "--hbm-bytes 191MiB --dram-bytes 0" in " ".join(lines)


def test_it_tells_how_the_disk_is_used_and_leaves_nothing_there(findings: Findings, tmp_path: Path) -> None:
    assert findings.disk is not None
    assert findings.disk.mode in ("direct", "buffered")
    assert findings.disk.file_system
    assert findings.disk.fault == ""
    assert list(Path(findings.disk.folder).iterdir()) == []


def test_what_stops_serve_stops_doctor(cache_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingInvalid, match="--dram-bytes"):
        doctor.examine(Settings(device="cpu", dram_bytes=2**50, cache_dir=cache_dir), None, 4096)
    with pytest.raises(ModelUnavailable):
        doctor.examine(Settings(device="cpu", model=str(tmp_path / "none"), cache_dir=cache_dir), None, 4096)
