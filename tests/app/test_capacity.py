"""Which flags would hold what is wanted, and that `serve` takes them."""

from __future__ import annotations

import pytest

from app.capacity import Room, wanted
from app.settings import Settings
from app.sizes import Disk, Memory, Sizes, nvme_slots, plan
from app.units import parse_bytes
from kvstore.types import KVLayout, LayerKV

GIB = 2**30
LAYOUT = KVLayout(tuple(LayerKV(kv_heads=3, head_dim=64) for _ in range(30)), 32, "bf16", 2)
SLOT = LAYOUT.slot_bytes
NOW = Sizes(hbm_slots=512, dram_slots=1024, slot_bytes=SLOT, block_tokens=32, max_context=8192)
LARGE = Memory(64 * GIB, 60 * GIB)
CPU = Room(LARGE, LARGE, on_cpu=True, model_context=8192)


@pytest.mark.parametrize(("sessions", "tokens"), [(1, 1), (200, 8192), (120, 4096), (3, 33)])
def test_what_the_flags_say_serve_makes_room_for(sessions: int, tokens: int) -> None:
    got = wanted(sessions, tokens, NOW, CPU)
    assert got.problem == ""
    words = got.flags.split()
    assert words[::2] == ["--hbm-bytes", "--dram-bytes"]
    settings = Settings(hbm_bytes=parse_bytes(words[1]), dram_bytes=parse_bytes(words[3]))
    sizes = plan(settings, LAYOUT, LARGE, host=LARGE, on_cpu=True, weights_bytes=0, model_context=8192)
    assert sizes.dram_slots >= sessions * LAYOUT.blocks_for(tokens)
    assert sizes.hbm_slots >= NOW.hbm_slots
    assert sizes.max_context >= tokens


def test_hbm_grows_only_where_one_such_turn_would_not_fit() -> None:
    assert wanted(10, 4096, NOW, CPU).hbm_bytes == 512 * SLOT
    small = Sizes(hbm_slots=8, dram_slots=8, slot_bytes=SLOT, block_tokens=32, max_context=256)
    assert 129 * SLOT <= wanted(10, 4096, small, CPU).hbm_bytes < 131 * SLOT


def test_more_than_the_machine_has_says_how_many_would_fit() -> None:
    got = wanted(10_000, 4096, NOW, CPU)
    fitting = (60 * GIB - 512 * SLOT - 16 * SLOT) // (128 * SLOT)
    assert "60 GiB are free" in got.problem
    assert got.problem.endswith(f": {fitting} sessions fit")
    assert wanted(fitting, 4096, NOW, CPU).problem == ""
    assert wanted(fitting + 1, 4096, NOW, CPU).problem != ""


def test_where_memory_is_too_small_the_disk_holds_every_session() -> None:
    room = Room(LARGE, LARGE, on_cpu=True, model_context=8192, disk_bytes=1000 * GIB)
    got = wanted(1000, 8192, NOW, room)
    assert got.problem == ""
    words = got.flags.split()
    assert words[::2] == ["--hbm-bytes", "--dram-bytes", "--nvme-bytes"]
    settings = Settings(nvme_bytes=parse_bytes(words[5]))
    assert nvme_slots(settings, SLOT, Disk(2000 * GIB, 1000 * GIB)) >= 1000 * 256
    assert parse_bytes(words[3]) <= NOW.dram_bytes, "DRAM is left as it is"


def test_longer_than_the_models_context_is_said_first() -> None:
    assert wanted(1, 8193, NOW, CPU).problem == "the model knows 8,192 tokens, and these sessions have 8,193"


def test_a_gpu_holds_what_runs_and_its_host_what_sleeps() -> None:
    gpu = Room(Memory(2 * GIB, GIB), LARGE, on_cpu=False, model_context=131_072)
    assert wanted(600, 4096, NOW, gpu).problem == ""
    got = wanted(1, 65_536, NOW, gpu)
    assert got.problem == "one session needs 1.407 GiB of HBM, and 1 GiB are free"
