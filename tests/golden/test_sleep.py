"""Sessions asleep in DRAM on the real model: faults, cancellation, many sessions, little memory."""

from __future__ import annotations

import asyncio
from array import array
from random import Random
from typing import TYPE_CHECKING

import pytest

from kvstore import chain
from kvstore.events import WakeStatus, WritePolicy
from kvstore.tiers.nvme import stride_bytes
from kvstore.types import Tier, TurnSpec
from models.sampling import SamplingParams
from tests.harness import SPACE, Bench, bench
from tests.kvstore.stores import FaultyStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvstore.tiers.base import SlotStore
    from kvstore.types import BlockKey
    from models.loader import LoadedModel

    RealText = Callable[[int, int], array[int]]


def keys_of(token_ids: array[int]) -> list[BlockKey]:
    return chain.extend(None, token_ids[:-1], 32, SPACE)


@pytest.mark.usefixtures("exact_machine")
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.golden)])
async def test_copies_that_come_late_or_fail_change_no_output(
    loaded: LoadedModel, real_text: RealText, seed: int
) -> None:
    prompts = [real_text(100 + 9 * number, number) for number in range(6)]

    async def three_turns(it: Bench, prompt: array[int]) -> list[list[int]]:
        answers, history = [], prompt
        for word in (11, 12, 13):
            outcome = await it.turn([*history, word], 8, ignore_eos=True)
            answers.append(outcome.output_ids)
            history = outcome.token_ids
            await it.manager.sleep(keys_of(history))
        return answers

    async with bench(loaded, hbm_slots=200) as calm:
        expected = [await three_turns(calm, prompt) for prompt in prompts]
    faulty: list[FaultyStore] = []

    def breaking(store: SlotStore) -> SlotStore:
        chances = {"late": 0.5, "delay_seconds": 0.3, "short": 0.5, "raising": 0.3}
        faulty.append(FaultyStore(store, Random(seed), **chances))
        return faulty[0]

    sizes = {"hbm_slots": 14, "dram_slots": 60, "output_slice_tokens": 4, "wake_deadline_seconds": 0.2}
    async with bench(loaded, store=breaking, **sizes) as it:  # type: ignore[arg-type]
        told = await asyncio.gather(*(three_turns(it, prompt) for prompt in prompts))
    assert told == expected
    assert faulty[0].num_faults > 0


async def test_a_client_that_leaves_while_its_session_wakes_gives_everything_back(
    loaded: LoadedModel, real_text: RealText
) -> None:
    """The load is slow enough to be left in the middle of it."""

    def slow(store: SlotStore) -> SlotStore:
        return FaultyStore(store, Random(0), late=1.0, delay_seconds=0.8)

    async with bench(loaded, hbm_slots=40, dram_slots=40, store=slow) as it:
        first = await it.turn(real_text(130, 1), 8, ignore_eos=True)
        keys = keys_of(first.token_ids)
        assert await it.manager.sleep(keys) == 128
        waking = asyncio.create_task(it.turn([*first.token_ids, 5], 4, ignore_eos=True))
        await it.until(lambda snapshot: snapshot.turns.waking == 1 and snapshot.transfers > 0)
        waking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waking
        turns = it.manager.snapshot().turns
        assert turns.waking == turns.granted == turns.waiting == 0
        again = await it.turn([*first.token_ids, 5], 4, ignore_eos=True)
        assert again.grant.cached_tokens == 128


async def test_a_hint_wakes_a_session_before_its_turn(loaded: LoadedModel, real_text: RealText) -> None:
    async with bench(loaded, hbm_slots=40, dram_slots=40) as it:
        first = await it.turn(real_text(130, 1), 8, ignore_eos=True)
        keys = keys_of(first.token_ids)
        assert await it.manager.sleep(keys) == 128
        wake = it.manager.wake(keys, Tier.HBM, 30.0)
        assert wake.status is WakeStatus.WAKING
        await wake.settled()
        assert (wake.status, wake.tokens, wake.origin) == (WakeStatus.AWAKE, 128, Tier.DRAM)
        assert it.manager.blocks_by_tier(keys)[Tier.HBM] == 4
        params = SamplingParams(temperature=0.0, max_new_tokens=2)
        announced = it.manager.wake(keys, Tier.HBM, 1.0)
        spec = TurnSpec(array("I", [*first.token_ids, 5]), 2, SPACE, params, wake=announced.id)
        lease = await it.manager.acquire(spec)
        assert lease.grant.reused == {Tier.HBM: 0, Tier.DRAM: 128, Tier.NVME: 0}
        assert lease.grant.wake_trigger == "hint"
        await lease.close()


async def test_24_sessions_of_600_tokens_with_hbm_for_few_reuse_nearly_everything(
    loaded: LoadedModel, real_text: RealText
) -> None:
    """In random order, several at once; DRAM holds all of them, HBM an eighth."""
    random = Random(7)
    histories = {number: real_text(600, number) for number in range(24)}
    order = [number for number in range(24) for _ in range(3)]
    random.shuffle(order)
    running = {number: asyncio.Lock() for number in histories}
    at_once = asyncio.Semaphore(8)
    reused = storable = 0

    async with bench(loaded, hbm_slots=190, dram_slots=560) as it:

        async def turn(number: int, is_first: bool) -> None:
            nonlocal reused, storable
            async with running[number], at_once:
                history = histories[number]
                outcome = await it.turn([*history, 100 + number], 4, ignore_eos=True)
                histories[number] = outcome.token_ids
                if not is_first:
                    reused += outcome.grant.cached_tokens // 32
                    storable += (len(history) - 1) // 32

        seen: set[int] = set()
        turns = []
        for number in order:
            turns.append(turn(number, number not in seen))
            seen.add(number)
        await asyncio.gather(*turns)
        assert it.manager.snapshot().totals.loaded > 0
    assert storable > 48 * 17
    assert reused >= 0.995 * storable


async def test_24_sessions_with_hbm_for_few_dram_for_some_and_nvme_for_all_reuse_nearly_everything(
    loaded: LoadedModel, real_text: RealText, tmp_path: Path
) -> None:
    """Three turns each in random order, several at once; no tier ever has more than its slots."""
    random = Random(11)
    histories = {number: real_text(600, number) for number in range(24)}
    order = [number for number in range(24) for _ in range(3)]
    random.shuffle(order)
    running = {number: asyncio.Lock() for number in histories}
    at_once = asyncio.Semaphore(6)
    reused = storable = from_nvme = 0
    limits = {Tier.HBM: 130, Tier.DRAM: 110, Tier.NVME: 520}

    async with bench(
        loaded,
        hbm_slots=limits[Tier.HBM],
        dram_slots=limits[Tier.DRAM],
        nvme_dir=tmp_path,
        nvme_slots=limits[Tier.NVME],
        nvme_write_policy=WritePolicy.ON_PRESSURE,
    ) as it:
        assert it.tier is not None
        store = it.tier.disk.store

        def check_sizes() -> None:
            for tier in it.manager.snapshot().tiers:
                assert tier.capacity - tier.free <= limits[tier.tier], tier
            assert store.bytes_on_disk <= limits[Tier.NVME] * stride_bytes(store.slot_bytes)

        async def turn(number: int, is_first: bool) -> None:
            nonlocal reused, storable, from_nvme
            async with running[number], at_once:
                history = histories[number]
                prompt = [*history, 100 + number]
                outcome = await it.turn(prompt, 2, session=f"session {number}", ignore_eos=True)
                check_sizes()
                histories[number] = outcome.token_ids
                if not is_first:
                    reused += outcome.grant.cached_tokens // 32
                    from_nvme += outcome.grant.reused[Tier.NVME] // 32
                    storable += (len(history) - 1) // 32

        seen: set[int] = set()
        turns = []
        for number in order:
            turns.append(turn(number, number not in seen))
            seen.add(number)
        await asyncio.gather(*turns)
        totals = it.manager.snapshot().totals
    files = sum(path.stat().st_size for path in tmp_path.rglob("*.kv"))  # noqa: ASYNC240 - nothing else runs any more
    assert files <= limits[Tier.NVME] * stride_bytes(store.slot_bytes)
    assert storable > 48 * 17
    assert reused >= 0.995 * storable
    assert from_nvme > 0
    assert totals.nvme_blocks_read >= from_nvme


async def test_a_long_prompt_among_a_stream_of_short_ones_starts_within_the_age_limit(
    loaded: LoadedModel, real_text: RealText
) -> None:
    async with bench(loaded, hbm_slots=24, age_limit_seconds=0.5, max_running=64) as it:
        stop = asyncio.Event()

        async def short_ones(which: int) -> None:
            number = 0
            while not stop.is_set():
                number += 1
                await it.turn([which, number, *real_text(40, which)], 24, ignore_eos=True)

        streams = [asyncio.create_task(short_ones(which)) for which in range(12)]
        await it.until(lambda snapshot: snapshot.turns.waiting > 0 or snapshot.turns.granted > 6)
        long = await it.turn(real_text(700, 9), 2, ignore_eos=True)
        stop.set()
        await asyncio.gather(*streams)
        assert len(long.output_ids) == 2
        assert long.grant.queue_seconds < 10


async def test_what_a_broken_copy_left_in_a_slot_is_never_attended_to(loaded: LoadedModel, real_text: RealText) -> None:
    """A masked position counts for nothing, unless it holds NaN."""
    prompt = real_text(70, 2)
    async with bench(loaded, hbm_slots=8, max_context=200) as it:
        expected = await it.turn(prompt, 8, ignore_eos=True)
        it.manager.flush()
        for slot in range(8):
            it.runner.arena.slot(slot).fill_(float("nan"))
        assert (await it.turn(prompt, 8, ignore_eos=True)).output_ids == expected.output_ids
