"""The store and the engine on the real model: pressure, suspension, cancellation, eviction."""

from __future__ import annotations

import asyncio
from array import array
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.errors import ContextTooLong, QueueFull, ShuttingDown
from kvstore.types import StopReason, Tier, TurnSpec
from models.sampling import SamplingParams
from tests.harness import SPACE, bench

if TYPE_CHECKING:
    from collections.abc import Callable

    from models.loader import LoadedModel

    RealText = Callable[[int, int], array[int]]


@pytest.mark.usefixtures("exact_machine")
async def test_64_turns_whose_growth_exceeds_hbm_finish_with_the_text_they_have_alone(
    loaded: LoadedModel, real_text: RealText
) -> None:
    prompts = [real_text(27 + number % 5, number) for number in range(64)]
    async with bench(loaded, hbm_slots=400) as alone:
        expected = [(await alone.turn(prompt, 6, ignore_eos=True)).output_ids for prompt in prompts]
    async with bench(loaded, hbm_slots=16, output_slice_tokens=1) as crowded:
        outcomes = await asyncio.gather(*(crowded.turn(prompt, 6, ignore_eos=True) for prompt in prompts))
        assert crowded.manager.snapshot().totals.turns_suspended > 0
    assert [outcome.output_ids for outcome in outcomes] == expected


@pytest.mark.usefixtures("exact_machine")
async def test_sampling_draws_the_same_tokens_alone_and_after_suspensions(
    loaded: LoadedModel, real_text: RealText
) -> None:
    prompts = [real_text(28, number) for number in range(8)]
    options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1, "ignore_eos": True}

    async with bench(loaded, hbm_slots=200) as alone:
        expected = [
            (await alone.turn(prompt, 10, seed=seed, **options)).output_ids for seed, prompt in enumerate(prompts)
        ]
    async with bench(loaded, hbm_slots=8, output_slice_tokens=4) as crowded:
        turns = [crowded.turn(prompt, 10, seed=seed, **options) for seed, prompt in enumerate(prompts)]
        outcomes = await asyncio.gather(*turns)
        assert crowded.manager.snapshot().totals.turns_suspended > 0
    assert [outcome.output_ids for outcome in outcomes] == expected


async def test_a_turn_reuses_every_full_block_of_what_came_before(loaded: LoadedModel, real_text: RealText) -> None:
    async with bench(loaded, hbm_slots=64) as it:
        first = await it.turn(real_text(100, 3), 20, ignore_eos=True)
        assert first.grant.cached_tokens == 0
        again = await it.turn([*first.token_ids, 5, 6, 7], 4, ignore_eos=True)
        assert again.grant.cached_tokens == (len(first.token_ids) - 1) // 32 * 32 == 96
        assert again.grant.reused == {Tier.HBM: 96, Tier.DRAM: 0, Tier.NVME: 0}


async def test_a_prompt_of_whole_blocks_computes_its_last_token_again(loaded: LoadedModel, real_text: RealText) -> None:
    prompt = real_text(96, 3)
    async with bench(loaded, hbm_slots=64) as it:
        first = await it.turn(prompt, 4, ignore_eos=True)
        second = await it.turn(prompt, 4, ignore_eos=True)
        assert second.grant.cached_tokens == 64
        assert second.output_ids == first.output_ids


async def test_the_least_recent_give_way_and_are_computed_again(loaded: LoadedModel, real_text: RealText) -> None:
    async with bench(loaded, hbm_slots=12, max_context=160) as it:
        first = await it.turn(real_text(130, 1), 4, ignore_eos=True)
        for which in range(2, 6):
            await it.turn(real_text(130, which), 4, ignore_eos=True)
        again = await it.turn(first.token_ids[:130], 4, ignore_eos=True)
        assert again.grant.cached_tokens == 0
        assert again.output_ids == first.output_ids
        assert it.manager.snapshot().totals.evicted > 0


async def test_a_turn_that_neither_reads_nor_keeps_leaves_nothing(loaded: LoadedModel, real_text: RealText) -> None:
    async with bench(loaded, hbm_slots=64) as it:
        prompt = real_text(100, 3)
        await it.turn(prompt, 4, ignore_eos=True)
        before = it.manager.snapshot().tier(Tier.HBM)
        private = await it.turn(prompt, 60, ignore_eos=True, cache=False)
        assert private.grant.cached_tokens == 0
        assert it.manager.snapshot().tier(Tier.HBM) == before


async def test_other_namespaces_share_nothing(loaded: LoadedModel, real_text: RealText) -> None:
    from kvstore import chain

    async with bench(loaded, hbm_slots=64) as it:
        prompt = real_text(100, 3)
        await it.turn(prompt, 4, ignore_eos=True)
        params = SamplingParams(temperature=0.0, max_new_tokens=1)
        for tenant, salt in (("other", None), ("", "salt")):
            space = chain.namespace(b"tests", tenant, salt)
            lease = await it.manager.acquire(TurnSpec(prompt, 1, space, params))
            assert lease.grant.cached_tokens == 0
            await lease.close()


@pytest.mark.parametrize("after_tokens", [0, 1, 5])
async def test_a_closed_lease_stops_its_turn_within_a_step_and_gives_every_slot_back(
    loaded: LoadedModel, real_text: RealText, after_tokens: int
) -> None:
    async with bench(loaded, hbm_slots=64) as it:
        params = SamplingParams(temperature=0.0, max_new_tokens=500, ignore_eos=True)
        lease = await it.manager.acquire(TurnSpec(real_text(700, 2), 500, SPACE, params))
        seen = 0
        async for piece in lease.pieces():
            seen += len(piece.new_token_ids)
            if seen >= after_tokens:
                break
        steps = len(it.steps)
        await lease.close()
        assert len(it.steps) <= steps + 2
        await lease.close()
        it.check_idle()


async def test_a_turn_cancelled_while_it_waits_is_gone_at_once(loaded: LoadedModel, real_text: RealText) -> None:
    async with bench(loaded, hbm_slots=64, max_running=1) as it:
        params = SamplingParams(temperature=0.0, max_new_tokens=200, ignore_eos=True)
        running = await it.manager.acquire(TurnSpec(real_text(60, 2), 200, SPACE, params))
        waiting = asyncio.create_task(it.turn(real_text(60, 3), 4))
        await it.until(lambda snapshot: snapshot.turns.waiting > 0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert it.manager.snapshot().turns.waiting == 0
        await running.close()


async def test_a_suspended_turn_whose_client_leaves_is_forgotten(loaded: LoadedModel, real_text: RealText) -> None:
    async with bench(loaded, hbm_slots=8, output_slice_tokens=4) as it:
        turns = [asyncio.create_task(it.turn(real_text(40, which), 70, ignore_eos=True)) for which in range(6)]
        await it.until(lambda snapshot: snapshot.turns.suspended > 0)
        for turn in turns[1:]:
            turn.cancel()
        await asyncio.wait(turns[1:])
        assert len((await turns[0]).output_ids) == 70


async def test_a_full_queue_refuses_and_says_when_to_come_back(loaded: LoadedModel, real_text: RealText) -> None:
    async with bench(loaded, hbm_slots=64, max_running=1, max_queue=1) as it:
        running = asyncio.create_task(it.turn(real_text(40, 1), 30, ignore_eos=True))
        waiting = asyncio.create_task(it.turn(real_text(40, 2), 2, ignore_eos=True))
        await it.until(lambda snapshot: snapshot.turns.waiting > 0)
        with pytest.raises(QueueFull) as refused:
            await it.turn(real_text(40, 3), 2)
        assert refused.value.retry_after_seconds >= 1
        await asyncio.gather(running, waiting)


async def test_what_can_never_fit_is_refused_with_both_numbers(loaded: LoadedModel, real_text: RealText) -> None:
    async with bench(loaded, hbm_slots=8) as it:
        with pytest.raises(ContextTooLong) as refused:
            await it.turn(real_text(300, 1), 4)
        assert (refused.value.prompt_tokens, refused.value.max_context) == (300, 256)


async def test_a_turn_ends_where_the_context_ends(loaded: LoadedModel, real_text: RealText) -> None:
    async with bench(loaded, hbm_slots=8, max_context=120) as it:
        outcome = await it.turn(real_text(100, 1), 500, ignore_eos=True)
        assert outcome.stopped is StopReason.LENGTH
        assert len(outcome.token_ids) == 120


async def test_a_turn_that_generates_nothing_stores_its_prompt(loaded: LoadedModel, real_text: RealText) -> None:
    async with bench(loaded, hbm_slots=64) as it:
        prompt = real_text(100, 3)
        outcome = await it.turn(prompt, 0)
        assert (outcome.output_ids, outcome.stopped) == ([], StopReason.LENGTH)
        assert (await it.turn([*prompt, 7], 1)).grant.cached_tokens == 96


async def test_draining_lets_running_turns_finish_and_refuses_new_ones(
    loaded: LoadedModel, real_text: RealText
) -> None:
    async with bench(loaded, hbm_slots=64) as it:
        running = asyncio.create_task(it.turn(real_text(40, 1), 12, ignore_eos=True))
        await it.until(lambda snapshot: snapshot.turns.granted > 0)
        draining = asyncio.create_task(it.manager.drain(60.0))
        await asyncio.sleep(0)
        with pytest.raises(ShuttingDown):
            await it.turn(real_text(40, 2), 1)
        await draining
        assert running.done()
        assert len((await running).output_ids) == 12


async def test_draining_cancels_what_does_not_finish_in_time(loaded: LoadedModel, real_text: RealText) -> None:
    async with bench(loaded, hbm_slots=64) as it:
        running = asyncio.create_task(it.turn(real_text(40, 1), 1000, ignore_eos=True))
        await it.until(lambda snapshot: snapshot.turns.granted > 0)
        await it.manager.drain(0.1)
        assert (await running).stopped is StopReason.CANCELLED


async def test_stop_strings_and_end_of_sequence_cut_ids_and_text_alike(
    loaded: LoadedModel, real_text: RealText
) -> None:
    async with bench(loaded, hbm_slots=64) as it:
        prompt = real_text(60, 4)
        free = await it.turn(prompt, 24, ignore_eos=True)
        middle = free.text[len(free.text) // 2 :][:3]
        assert middle
        cut = await it.turn(prompt, 24, ignore_eos=True, stop=(middle,))
        assert cut.stopped is StopReason.STOP
        assert cut.text == free.text[: free.text.index(middle)]
        assert cut.kept_tokens <= len(cut.output_ids)
        ended = await it.turn(prompt, 24, ignore_eos=True, stop_token_ids=frozenset({free.output_ids[5]}))
        place = free.output_ids.index(free.output_ids[5])
        assert (ended.stopped, ended.output_ids) == (StopReason.STOP, free.output_ids[: place + 1])


async def test_a_step_that_raises_fails_its_turns_and_the_engine_goes_on(
    loaded: LoadedModel, real_text: RealText
) -> None:
    async with bench(loaded, hbm_slots=64) as it:
        vocabulary = loaded.model.config.vocab_size
        params = SamplingParams(temperature=0.0, max_new_tokens=4)
        bad = array("I", [*real_text(40, 1), vocabulary + 5])
        lease = await it.manager.acquire(TurnSpec(bad, 4, SPACE, params))
        pieces = [piece async for piece in lease.pieces()]
        await lease.close()
        assert pieces[-1].stopped is StopReason.FAILED
        assert pieces[-1].error
        assert len((await it.turn(real_text(40, 2), 4, ignore_eos=True)).output_ids) == 4


async def test_a_turn_that_cannot_even_start_fails_alone(loaded: LoadedModel, real_text: RealText) -> None:
    async with bench(loaded, hbm_slots=64) as it:
        lease = await it.manager.acquire(TurnSpec(real_text(40, 1), 4, SPACE, "no sampling parameters"))
        pieces = [piece async for piece in lease.pieces()]
        await lease.close()
        assert pieces[-1].stopped is StopReason.FAILED
        assert len((await it.turn(real_text(40, 2), 4, ignore_eos=True)).output_ids) == 4
