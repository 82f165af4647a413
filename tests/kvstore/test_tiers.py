"""What every tier must do, as one class that each inherits; and what is particular to one."""

from __future__ import annotations

import errno
import mmap
import resource
import threading
from typing import TYPE_CHECKING

import psutil
import pytest
import torch

from kvstore.errors import SettingInvalid
from kvstore.events import TransferEnd
from kvstore.tiers.base import Landed, Run
from kvstore.tiers.dram import DramSlab
from kvstore.tiers.hbm import hbm_store
from kvstore.tiers.memory import CALL_BYTES, spans
from kvstore.types import Tier
from tests.kvstore.faulty_files import FaultyFiles
from tests.kvstore.stores import (
    SLOT_BYTES,
    STRIDE,
    TorchArena,
    chain_run,
    contents,
    fill,
    model_folder,
    nvme_store,
    pattern,
    run,
    slab,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvstore.tiers.base import SlotStore
    from kvstore.tiers.nvme import NvmeStore

Slots = tuple[int, ...]
NUM_SLOTS = 12


class Contract:
    """A store of NUM_SLOTS slots, given by the fixture `store`, beside `host`, a slab of as many."""

    tier: Tier

    @pytest.fixture
    def host(self) -> Iterator[DramSlab]:
        made = slab(NUM_SLOTS)
        yield made
        made.close()

    def test_it_says_what_it_is(self, store: SlotStore) -> None:
        assert (store.tier, store.num_slots, store.slot_bytes) == (self.tier, NUM_SLOTS, SLOT_BYTES)

    @pytest.mark.parametrize(
        ("slots", "sources", "targets"),
        [
            pytest.param((5,), (2,), (3,), id="one block"),
            pytest.param((2, 3, 4, 5), (1, 2, 3, 4), (7, 8, 9, 10), id="adjacent"),
            pytest.param((0, 11, 4), (11, 0, 5), (3, 2, 1), id="scattered"),
            pytest.param((5, 4, 3), (0, 1, 2), (3, 4, 5), id="backwards"),
            pytest.param((1, 2, 6, 7, 8, 3), (0, 1, 2, 3, 4, 5), (6, 7, 8, 9, 10, 11), id="partly adjacent"),
        ],
    )
    def test_a_run_comes_back_bit_for_bit(
        self,
        store: SlotStore,
        host: DramSlab,
        slots: tuple[int, ...],
        sources: tuple[int, ...],
        targets: tuple[int, ...],
    ) -> None:
        written = fill(host, sources)
        assert store.copy_in(run(slots, host, sources)) == Landed(len(slots))
        fill(host, tuple(range(NUM_SLOTS)), seed=1)
        assert store.copy_out(run(slots, host, targets)) == Landed(len(slots))
        assert contents(host, targets) == written

    def test_keyed_blocks_come_back_under_their_keys_also_in_other_runs_than_they_came_in(
        self, store: SlotStore, host: DramSlab
    ) -> None:
        written = fill(host, (0, 1, 2, 3, 4))
        store.copy_in(chain_run((2, 3, 4), host, (0, 1, 2)))
        store.copy_in(chain_run((9, 5), host, (3, 4), first_block=3))
        assert store.copy_out(chain_run((3, 4, 9, 5), host, (8, 9, 10, 11), first_block=1)) == Landed(4)
        assert contents(host, (8, 9, 10, 11)) == written[1:]

    def test_a_slot_that_is_written_again_holds_the_new_block(self, store: SlotStore, host: DramSlab) -> None:
        fill(host, (0,))
        store.copy_in(chain_run((4,), host, (0,), chain=1))
        (block,) = fill(host, (0,), seed=1)
        store.copy_in(chain_run((4,), host, (0,), chain=2))
        assert store.copy_out(chain_run((4,), host, (7,), chain=2)) == Landed(1)
        assert contents(host, (7,)) == [block]

    def test_copies_of_different_slots_do_not_meet_whatever_thread_makes_them(
        self, store: SlotStore, host: DramSlab
    ) -> None:
        written = fill(host, (0, 1, 2, 3))
        together, wrong = threading.Barrier(4), []

        def back_and_forth(place: int) -> None:
            together.wait(30.0)
            for _ in range(25):
                ends = [store.copy_in(run((3 * place,), host, (place,)))]
                ends.append(store.copy_out(run((3 * place,), host, (4 + place,))))
                if ends != [Landed(1)] * 2 or contents(host, (4 + place,)) != [written[place]]:
                    wrong.append(place)

        threads = [threading.Thread(target=back_and_forth, args=(place,)) for place in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
        assert wrong == []

    def test_a_block_changes_no_other_slot(self, store: SlotStore, host: DramSlab) -> None:
        every = tuple(range(NUM_SLOTS))
        written = fill(host, every)
        store.copy_in(run(every, host, every))
        written[4] = pattern(99)
        host.view(0)[:] = written[4]
        store.copy_in(run((4,), host, (0,)))
        store.copy_out(run(every, host, every))
        assert contents(host, every) == written

    def test_a_copy_out_changes_only_its_targets_and_leaves_the_source(self, store: SlotStore, host: DramSlab) -> None:
        (block,) = fill(host, (0,))
        store.copy_in(run((7,), host, (0,)))
        around = fill(host, tuple(range(NUM_SLOTS)), seed=1)
        for _ in range(2):
            store.copy_out(run((7,), host, (5,)))
        around[5] = block
        assert contents(host, tuple(range(NUM_SLOTS))) == around

    @pytest.mark.parametrize("slot", [-1, NUM_SLOTS, 10**9])
    @pytest.mark.parametrize("direction", ["copy_in", "copy_out"])
    def test_a_slot_that_does_not_exist_is_refused_before_a_byte_has_moved(
        self, store: SlotStore, host: DramSlab, slot: int, direction: str
    ) -> None:
        store.copy_in(run((3,), host, (8,)))  # zeros
        written = fill(host, (0, 1))
        copy: Callable[[Run], Landed] = getattr(store, direction)
        with pytest.raises(IndexError):
            copy(run((3, slot), host, (0, 1)))
        with pytest.raises(IndexError):
            copy(run((3, 4), host, (0, slot)))
        assert contents(host, (0, 1)) == written
        store.copy_out(run((3,), host, (0,)))
        assert contents(host, (0,)) == [bytes(SLOT_BYTES)]

    def test_a_run_of_nothing_is_done(self, store: SlotStore, host: DramSlab) -> None:
        assert store.copy_in(run((), host, ())) == store.copy_out(run((), host, ())) == Landed(0)

    @pytest.mark.parametrize("allowed", [0, 1, 3])
    @pytest.mark.parametrize("direction", ["copy_in", "copy_out"])
    def test_a_cancelled_run_ends_between_blocks_and_what_it_counts_is_sound(
        self, store: SlotStore, host: DramSlab, allowed: int, direction: str
    ) -> None:
        slots, sources, targets = (0, 2, 4, 6, 8), (0, 1, 2, 3, 4), (5, 6, 7, 8, 9)
        written = fill(host, sources)
        questions = iter(range(100))
        cancelling = [
            Run(slots, host, side, (None,) * 5, lambda: next(questions) >= allowed) for side in (sources, targets)
        ]
        if direction == "copy_in":
            landed = store.copy_in(cancelling[0])
            store.copy_out(run(slots, host, targets))
        else:
            store.copy_in(run(slots, host, sources))
            landed = store.copy_out(cancelling[1])
        assert landed == Landed(allowed, TransferEnd.CANCELLED)
        assert contents(host, targets)[:allowed] == written[:allowed]
        if direction == "copy_out":
            assert contents(host, targets)[allowed:] == [bytes(SLOT_BYTES)] * (5 - allowed)

    def test_closing_twice_is_closing_once(self, store: SlotStore) -> None:
        store.close()
        store.close()


class TestHostArena(Contract):
    tier = Tier.HBM

    @pytest.fixture
    def arena(self) -> TorchArena:
        return TorchArena.zeros(NUM_SLOTS)

    @pytest.fixture
    def store(self, arena: TorchArena) -> SlotStore:
        made = hbm_store(arena, SLOT_BYTES)
        made.open()
        return made

    def test_it_writes_where_the_engine_reads(self, store: SlotStore, arena: TorchArena, host: DramSlab) -> None:
        (block,) = fill(host, (0,))
        store.copy_in(run((2,), host, (0,)))
        data = arena.data.view(torch.uint8).numpy().tobytes()
        assert data == bytes(2 * SLOT_BYTES) + block + bytes((NUM_SLOTS - 2) * SLOT_BYTES)


class TestDramSlab(Contract):
    tier = Tier.DRAM

    @pytest.fixture
    def store(self) -> Iterator[DramSlab]:
        made = slab(NUM_SLOTS, num_ring=2)
        yield made
        made.close()

    def test_the_ring_lies_behind_the_capacity_and_is_no_part_of_it(self, store: DramSlab, host: DramSlab) -> None:
        assert store.num_slots == NUM_SLOTS
        assert store.ring_bytes == 4 * SLOT_BYTES
        assert store.ring_slots((0, 3)) == (12, 15)
        assert store.address(15) == store.address(0) + 15 * SLOT_BYTES
        with pytest.raises(IndexError):
            store.address(16)
        with pytest.raises(IndexError):
            store.copy_in(run((12,), host, (0,)))

    def test_slots_are_aligned_for_direct_io(self, store: DramSlab) -> None:
        assert store.address(0) % mmap.PAGESIZE == 0
        assert {store.address(slot) % 4096 for slot in range(16)} == {0}

    def test_a_view_is_the_slots_own_memory(self, store: DramSlab) -> None:
        store.view(3, 2)[SLOT_BYTES] = 7
        assert store.view(4)[0] == 7
        assert len(store.view(3, 2)) == 2 * SLOT_BYTES
        for slot, count in ((-1, 1), (0, 0), (15, 2)):
            with pytest.raises(IndexError):
                store.view(slot, count)

    def test_memory_that_was_never_written_is_never_taken(self) -> None:
        before = _resident_bytes()
        large = slab(2**30 // SLOT_BYTES)
        large.view(2**16)[0] = 1
        taken = _resident_bytes() - before
        large.close()
        assert taken < 64 * 2**20

    def test_what_is_closed_goes_back_to_the_machine(self) -> None:
        large = slab(64 * 2**20 // SLOT_BYTES)
        large.view(0, large.num_slots)[:] = bytes(64 * 2**20)
        before = _resident_bytes()
        large.close()
        assert before - _resident_bytes() > 60 * 2**20

    def test_closing_waits_for_nobody_and_pulls_no_memory_from_under_a_reader(self, store: DramSlab) -> None:
        view = store.view(3)
        view[0] = 7
        store.close()
        assert view[0] == 7

    def test_a_slab_of_nothing_is_legal_and_one_of_only_a_ring_too(self) -> None:
        DramSlab(0, SLOT_BYTES).open()
        only_ring = slab(0, num_ring=1)
        assert only_ring.num_slots == 0
        only_ring.view(*only_ring.ring_slots((1,)))[0] = 1
        only_ring.close()

    def test_memory_that_cannot_be_had_is_said_with_the_flag_to_change(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (1 << 44, hard))
        try:
            with pytest.raises(SettingInvalid, match=rf"--dram-bytes: {1 << 46} bytes cannot be mapped"):
                DramSlab(2**46 // SLOT_BYTES, SLOT_BYTES).open()
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))

    def test_memory_that_cannot_be_pinned_is_given_back(self) -> None:
        class Refusing:
            def pin(self, address: int, size: int, unit: int) -> None:
                raise MemoryError("the driver says 2")

            def unpin(self) -> None:
                raise AssertionError("nothing was pinned")

        refused = DramSlab(4, SLOT_BYTES, pinning=Refusing())
        with pytest.raises(SettingInvalid, match=r"--dram-bytes: 32768 bytes cannot be pinned: the driver says 2"):
            refused.open()
        with pytest.raises(AssertionError, match="not open"):
            refused.address(0)

    def test_it_is_pinned_whole_before_use_and_unpinned_once(self) -> None:
        calls: list[tuple[int, ...]] = []

        class Recording:
            def pin(self, address: int, size: int, unit: int) -> None:
                calls.append((address, size, unit))

            def unpin(self) -> None:
                calls.append(())

        pinned = DramSlab(4, SLOT_BYTES, num_ring=1, pinning=Recording())
        pinned.open()
        assert calls == [(pinned.address(0), 6 * SLOT_BYTES, SLOT_BYTES)]
        pinned.close()
        pinned.close()
        assert calls[1:] == [()]

    def test_a_kernel_without_huge_pages_is_no_obstacle(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", -1)  # EINVAL, as such a kernel says
        with pytest.raises(OSError, match=str(errno.EINVAL)):
            mmap.mmap(-1, 4096).madvise(-1)
        slab(1).close()


@pytest.mark.parametrize("io", ["buffered", "direct"])
@pytest.mark.parametrize("per_segment", [1, 5, 1000])
class TestNvmeStore(Contract):
    tier = Tier.NVME

    @pytest.fixture
    def store(self, tmp_path: Path, io: str, per_segment: int) -> Iterator[NvmeStore]:
        folder, files = model_folder(tmp_path), FaultyFiles()
        try:
            made = nvme_store(folder, NUM_SLOTS, io=io, files=files, segment_bytes=per_segment * STRIDE)
        except SettingInvalid as exc:
            pytest.skip(str(exc))  # where temporary files lie, there is no direct IO
        yield made
        made.close()
        assert files.open_files == set()


@pytest.mark.gpu
class TestCudaArena(Contract):
    tier = Tier.HBM

    @pytest.fixture
    def arena(self) -> TorchArena:
        return TorchArena.zeros(NUM_SLOTS, device="cuda")

    @pytest.fixture
    def store(self, arena: TorchArena) -> SlotStore:
        return hbm_store(arena, SLOT_BYTES)

    @pytest.fixture
    def host(self) -> Iterator[DramSlab]:
        from kvstore.tiers.cuda import CudaPinning

        made = DramSlab(NUM_SLOTS, SLOT_BYTES, pinning=CudaPinning())
        made.open()
        yield made
        made.close()

    def test_a_copy_out_waits_for_the_kernel_that_writes_the_block(
        self, store: SlotStore, arena: TorchArena, host: DramSlab
    ) -> None:
        _keep_busy()
        arena.data.fill_(1.0)
        store.copy_out(run((3,), host, (0,)))
        ones = torch.ones(SLOT_BYTES // 2, dtype=torch.bfloat16)
        assert bytes(host.view(0)) == ones.view(torch.uint8).numpy().tobytes()

    def test_a_copy_in_waits_for_the_kernel_that_reads_the_former_block(
        self, store: SlotStore, arena: TorchArena, host: DramSlab
    ) -> None:
        arena.data.fill_(1.0)
        _keep_busy()
        former = arena.data.clone()
        store.copy_in(run((3,), host, (0,)))
        assert bool((former == 1.0).all())
        assert bool((arena.data[3 * SLOT_BYTES // 2 : 4 * SLOT_BYTES // 2] == 0.0).all())


def test_neighbours_on_both_sides_go_together_and_nobody_else() -> None:
    slots, host_slots = (4, 5, 6, 8, 9, 3), (0, 1, 2, 3, 7, 8)
    assert list(spans(slots, host_slots, 8)) == [(0, 3), (3, 1), (4, 1), (5, 1)]
    assert list(spans((1, 2, 3, 4, 5), (1, 2, 3, 4, 5), 2)) == [(0, 2), (2, 2), (4, 1)]
    assert list(spans((), (), 8)) == []


def test_no_call_is_longer_than_a_cancelled_run_may_go_on() -> None:
    large = slab(8, slot_bytes=CALL_BYTES // 2)
    arena = TorchArena.zeros(8, slot_bytes=CALL_BYTES // 2)
    every = tuple(range(8))
    questions = 0

    def is_cancelled() -> bool:
        nonlocal questions
        questions += 1
        return False

    hbm_store(arena, CALL_BYTES // 2).copy_out(Run(every, large, every, (None,) * 8, is_cancelled))
    large.close()
    assert questions == 4


def _resident_bytes() -> int:
    return psutil.Process().memory_info().rss


def _keep_busy() -> None:
    """Make the device wait for about a tenth of a second before what is launched next."""
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]
