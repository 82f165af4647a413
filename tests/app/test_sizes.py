"""What budgets become, and which flag a misfit names."""

from __future__ import annotations

from typing import Any

import pytest

from app.settings import Settings
from app.sizes import Disk, Memory, Sizes, host_memory, nvme_slots, plan, rated_bytes_per_day
from kvstore.errors import SettingInvalid
from kvstore.types import KVLayout, LayerKV

GIB = 2**30
LAYOUT = KVLayout(tuple(LayerKV(kv_heads=3, head_dim=64) for _ in range(30)), 32, "bf16", 2)
WEIGHTS = 270_000_000
LARGE = Memory(24 * GIB, 20 * GIB)


def sizes(
    memory: Memory = LARGE, on_cpu: bool = True, weights: int = WEIGHTS, host: Memory | None = None, **settings: Any
) -> Sizes:
    return plan(
        Settings(**settings),
        LAYOUT,
        memory,
        host=host or memory,
        on_cpu=on_cpu,
        weights_bytes=weights,
        model_context=8192,
    )


def test_on_a_cpu_auto_takes_a_twentieth_of_the_limit_in_whole_slots() -> None:
    got = sizes()
    assert got.hbm_slots == int(24 * GIB * 0.05) // LAYOUT.slot_bytes
    assert 24 * GIB * 0.05 - LAYOUT.slot_bytes < got.hbm_bytes <= 24 * GIB * 0.05
    assert got.max_context == 8192


def test_on_a_gpu_auto_takes_nine_tenths_of_what_is_free_after_the_weights() -> None:
    free = 20 * GIB
    assert sizes(on_cpu=False).hbm_slots == int((free - WEIGHTS) * 0.9) // LAYOUT.slot_bytes
    assert sizes(on_cpu=False, weights=0).hbm_slots == int(free * 0.9) // LAYOUT.slot_bytes


def test_a_given_size_is_never_exceeded_by_even_one_slot() -> None:
    assert sizes(hbm_bytes=10 * LAYOUT.slot_bytes - 1).hbm_slots == 9
    assert sizes(hbm_bytes=10 * LAYOUT.slot_bytes).hbm_slots == 10


def test_the_context_is_capped_by_hbm_and_says_so() -> None:
    got = sizes(hbm_bytes=10 * LAYOUT.slot_bytes)
    assert got.max_context == 320
    assert "--max-context is 320 instead of 8,192" in got.lines()[-1]
    assert sizes(max_context=300, hbm_bytes=10 * LAYOUT.slot_bytes).notes == ()


def test_the_lines_tell_what_a_budget_holds() -> None:
    assert sizes(hbm_bytes=256 * LAYOUT.slot_bytes, dram_bytes=1024 * LAYOUT.slot_bytes).lines() == [
        "HBM 180 MiB: 256 blocks of 32 tokens, 2.0 sessions of 4K tokens",
        "DRAM 720 MiB: 1,024 blocks of 32 tokens, 8.0 sessions of 4K tokens, and 11.25 MiB for staging",
        "context 8,192 tokens",
    ]


def test_dram_takes_a_tenth_on_a_cpu_and_a_quarter_of_the_host_beside_a_gpu() -> None:
    assert sizes().dram_slots == int(24 * GIB * 0.10) // LAYOUT.slot_bytes
    beside = sizes(on_cpu=False, host=Memory(64 * GIB, 60 * GIB))
    assert beside.dram_slots == int(64 * GIB * 0.25) // LAYOUT.slot_bytes


def test_dram_is_never_exceeded_by_even_one_slot_and_staging_is_told_apart() -> None:
    got = sizes(dram_bytes=10 * LAYOUT.slot_bytes - 1)
    assert (got.dram_slots, got.dram_bytes) == (9, 9 * LAYOUT.slot_bytes)
    assert got.ring_bytes == 16 * LAYOUT.slot_bytes


def test_no_dram_is_legal_and_said() -> None:
    got = sizes(dram_bytes=0)
    assert got.dram_slots == 0
    assert got.lines()[1] == "DRAM 0 B: nothing sleeps there (--dram-bytes)"


def test_a_gpus_caches_are_held_against_their_own_memories() -> None:
    """What fills the device leaves the host alone, and the other way round."""
    got = sizes(Memory(80 * GIB, 70 * GIB), on_cpu=False, host=Memory(8 * GIB, 7 * GIB), hbm_bytes=60 * GIB)
    assert got.dram_slots == 2 * GIB // LAYOUT.slot_bytes
    with pytest.raises(SettingInvalid, match="for staging do not fit into the 7 GiB that") as caught:
        sizes(Memory(80 * GIB, 70 * GIB), on_cpu=False, host=Memory(8 * GIB, 7 * GIB), dram_bytes=15 * GIB // 2)
    assert caught.value.name == "--dram-bytes"
    assert "--hbm-bytes" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "memory", "name", "says"),
    [
        ({}, Memory(GIB, 200_000_000), "--model", "take a smaller model"),
        ({"dtype": "fp32"}, Memory(GIB, 200_000_000), "--dtype", "take bf16"),
        ({"hbm_bytes": 3 * GIB}, Memory(4 * GIB, 3 * GIB), "--hbm-bytes", "give at most 2814MiB"),
        ({}, Memory(24 * GIB, GIB), "--hbm-bytes", "auto, 1.2 GiB"),
        (
            {"hbm_bytes": GIB, "dram_bytes": 2 * GIB},
            Memory(4 * GIB, 3 * GIB),
            "--dram-bytes",
            "at most 1779MiB, or lower",
        ),
        ({"hbm_bytes": 2700 * 2**20}, Memory(4 * GIB, 3 * GIB), "--dram-bytes", "auto, 409.6 MiB, --hbm-bytes and the"),
        ({"hbm_bytes": 2810 * 2**20}, Memory(4 * GIB, 3 * GIB), "--dram-bytes", "give 0, or lower --hbm-bytes"),
        (
            {"dram_bytes": 700_000},
            Memory(24 * GIB, 20 * GIB),
            "--dram-bytes",
            "holds no block; give 1MiB or more, or 0",
        ),
        ({"hbm_bytes": 800_000}, Memory(4 * GIB, 3 * GIB), "--hbm-bytes", "give 2MiB or more"),
        ({"max_context": 9000}, Memory(24 * GIB, 20 * GIB), "--max-context", "more than the 8,192 tokens"),
    ],
)
def test_a_misfit_names_the_flag_to_change(settings: dict[str, Any], memory: Memory, name: str, says: str) -> None:
    with pytest.raises(SettingInvalid, match=says) as caught:
        sizes(memory, **settings)
    assert caught.value.name == name


def test_what_a_refusal_advises_is_accepted() -> None:
    memory = Memory(4 * GIB, 3 * GIB)
    assert sizes(memory, hbm_bytes=2814 * 2**20, dram_bytes=0).hbm_slots > 0
    assert sizes(memory, hbm_bytes=GIB, dram_bytes=1779 * 2**20).dram_slots > 0
    assert sizes(memory, dram_bytes=2**20).dram_slots == 1
    assert sizes(memory, hbm_bytes=2 * 2**20).hbm_slots == 2


def test_this_machine_has_memory() -> None:
    memory = host_memory()
    assert 0 < memory.available_bytes <= memory.limit_bytes


def disk_slots(free: int = 100 * GIB, held: int = 0, **given: object) -> int:
    settings = Settings(**given)  # type: ignore[arg-type]
    return nvme_slots(settings, LAYOUT.slot_bytes, Disk(200 * GIB, free, held))


def test_nvme_takes_a_tenth_of_the_free_disk_and_twenty_gibibytes_at_most() -> None:
    on_disk = LAYOUT.slot_bytes + 4096
    assert disk_slots() == 10 * GIB // on_disk
    assert disk_slots(free=900 * GIB) == 20 * GIB // on_disk


def test_what_already_sleeps_on_disk_counts_as_free_so_that_a_budget_does_not_shrink_as_it_fills() -> None:
    assert disk_slots(free=90 * GIB, held=10 * GIB) == disk_slots(free=100 * GIB)


def test_nvme_is_never_exceeded_by_even_one_slot_headers_included() -> None:
    on_disk = LAYOUT.slot_bytes + 4096
    assert disk_slots(nvme_bytes=10 * on_disk - 1) == 9
    assert disk_slots(nvme_bytes=0) == 0


def test_a_disk_budget_that_is_not_there_or_holds_nothing_names_its_flag() -> None:
    with pytest.raises(SettingInvalid, match=r"--nvme-bytes.*give at most"):
        disk_slots(free=GIB, nvme_bytes=2 * GIB)
    with pytest.raises(SettingInvalid, match="holds no block; give 1MiB or more"):
        disk_slots(nvme_bytes=4096)


def test_a_drive_is_rated_for_three_tenths_of_its_size_a_day_unless_told() -> None:
    disk = Disk(1000, 0)
    assert rated_bytes_per_day(Settings(), disk) == 300
    assert rated_bytes_per_day(Settings(nvme_rated_bytes_per_day=7), disk) == 7
