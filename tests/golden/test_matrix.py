"""The golden matrix: where a session slept cannot change a bit of what it says.

ShareGPT conversations of six turns, greedy, told again and again: never asleep (the control), asleep in DRAM between
turns, suspended in the middle of answers, forked, among others under pressure at several ratios of HBM to DRAM, and
without any lower tier. Where a lower tier is in play the grant must say that the blocks came from it.

    bf16   everything has the control's bits: tokens, and every block of K/V that a turn began with
    fp32   what was only restored has them, too; what was computed again or in another batch is told with the control's
           ids, and its logits are within TOLERANCE: sgemm rounds differently at another number of rows

The suite tells one conversation in bf16, in short answers and among few others; `make golden` (-m golden) all of it.
"""

from __future__ import annotations

import asyncio
from array import array
from typing import TYPE_CHECKING

import pytest

from kvstore.types import Tier
from tests.golden.telling import RATIOS, TOLERANCE, TURNS, Conversation, Form, Told, looked_at, progress, tell
from tests.harness import Bench, Lesson, bench

if TYPE_CHECKING:
    from models.loader import LoadedModel
    from tests.golden.telling import Say


async def test_a_session_that_slept_in_dram_has_every_bit_back(
    form: Form, model: LoadedModel, talks: list[Conversation], controls: list[Told], say: Say
) -> None:
    for number, (talk, control) in enumerate(looked_at(form, talks, controls)):
        async with bench(model, hbm_slots=100, dram_slots=100) as it:
            told = await tell(it, talk, asleep=Tier.DRAM)
            assert it.manager.snapshot().totals.loaded > 0
        told.assert_same_bits(control)
        for before, outcome in zip(told.outcomes, told.outcomes[1:], strict=False):
            storable = (len(before.token_ids) - 1) // 32 * 32
            assert outcome.grant.reused == {Tier.HBM: 0, Tier.DRAM: storable, Tier.NVME: 0}
        progress(say, form, f"asleep {number + 1} of {form.num_told}")


@pytest.mark.parametrize("ratio", RATIOS)
async def test_a_session_among_others_under_pressure_says_what_it_says_alone(
    form: Form, model: LoadedModel, talks: list[Conversation], controls: list[Told], say: Say, ratio: str
) -> None:
    hbm_slots, dram_slots = form.pressures[RATIOS.index(ratio)]
    teachers: list[Told | None] = [*([] if form.is_exact else controls), *([None] * len(talks))][: len(talks)]

    async def telling(it: Bench, talk: Conversation, teacher: Told | None) -> Told:
        told = await tell(it, talk, teacher=teacher)
        progress(say, form, f"HBM to DRAM {ratio}: one more of {len(talks)}")
        return told

    async with bench(model, hbm_slots=hbm_slots, dram_slots=dram_slots, output_slice_tokens=4) as it:
        told = await asyncio.gather(*map(telling, [it] * len(talks), talks, teachers))
        totals = it.manager.snapshot().totals
        assert totals.evicted + totals.released > 0
    for mine, control in zip(told, controls, strict=form.is_exact):
        if form.is_exact:
            mine.assert_same_bits(control)
        else:
            mine.assert_same_logits(control)
    if dram_slots > hbm_slots:
        assert sum(mine.reused(Tier.DRAM) for mine in told) > 0


async def test_answers_suspended_in_the_middle_go_on_with_nothing_computed_again(
    form: Form, model: LoadedModel, talks: list[Conversation], say: Say
) -> None:
    prompts = [talk.parts[0][:40] for talk in talks[:3]]
    alone = [Lesson() for _ in prompts]
    async with bench(model, hbm_slots=100) as it:
        expected = [
            (await it.turn(prompt, 60, ignore_eos=True, lesson=lesson)).output_ids
            for prompt, lesson in zip(prompts, alone, strict=True)
        ]
    progress(say, form, "suspended: control")
    taught = [Lesson([] if form.is_exact else ids) for ids in expected]
    async with bench(model, hbm_slots=7, dram_slots=64, output_slice_tokens=4) as it:
        turns = (
            it.turn(prompt, 60, ignore_eos=True, lesson=lesson) for prompt, lesson in zip(prompts, taught, strict=True)
        )
        outcomes = await asyncio.gather(*turns)
        totals = it.manager.snapshot().totals
        assert totals.turns_suspended > 0
        assert totals.tails_kept > 0
        computed = sum(step.prefill_tokens + step.decode_tokens for step in it.steps)
    assert [outcome.output_ids for outcome in outcomes] == expected
    assert computed == sum(len(outcome.token_ids) - 1 for outcome in outcomes)
    for mine, theirs in zip(taught, alone, strict=True):
        assert mine.differs_from(theirs) <= (0.0 if form.is_exact else TOLERANCE)


async def test_a_fork_of_a_sleeping_session_has_its_bits_and_both_go_on(
    form: Form, model: LoadedModel, talks: list[Conversation], controls: list[Told], say: Say
) -> None:
    for number, (talk, control) in enumerate(looked_at(form, talks, controls)):
        async with bench(model, hbm_slots=100, dram_slots=100) as it:
            history = array("I")
            for turn in range(3):
                history = (await talk.turn(it, history, turn)).token_ids
            await it.manager.sleep(talk.keys(history))
            other = await it.turn([*history, *talks[number + 1].parts[1]], form.new_tokens, ignore_eos=True)
            assert other.grant.reused[Tier.DRAM] == (len(history) - 1) // 32 * 32
            for turn in range(3, TURNS):
                outcome = await talk.turn(it, history, turn)
                assert outcome.output_ids == control.answers[turn]
                history = outcome.token_ids
                await it.manager.sleep(talk.keys(history))
        assert other.restored == control.bits[: len(other.restored)]
        progress(say, form, f"forked {number + 1} of {form.num_told}")
