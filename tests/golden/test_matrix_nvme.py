"""The golden matrix on disk: what slept on NVMe, or was restarted there, has every bit back.

The forms, conversations and controls are those of test_matrix, told through a real directory.
"""

from __future__ import annotations

import asyncio
from array import array
from typing import TYPE_CHECKING

import pytest

from kvstore.events import WritePolicy
from kvstore.types import Tier
from tests.golden.telling import RATIOS, TURNS, Conversation, Form, Told, looked_at, progress, tell
from tests.harness import bench

if TYPE_CHECKING:
    from pathlib import Path

    from models.loader import LoadedModel
    from tests.golden.telling import Say
    from tests.harness import Outcome

DRAIN_SECONDS = 60.0


def storable_tokens(outcome: Outcome) -> int:
    """Of a turn, those whose K/V the next one can begin with: the last was never computed."""
    return (len(outcome.token_ids) - 1) // 32 * 32


@pytest.mark.parametrize("dram_slots", [100, 4, 0], ids=["DRAM for all", "longer than DRAM", "no DRAM"])
async def test_a_session_that_slept_on_nvme_has_every_bit_back(
    form: Form,
    model: LoadedModel,
    talks: list[Conversation],
    controls: list[Told],
    say: Say,
    tmp_path: Path,
    dram_slots: int,
) -> None:
    """Nothing is written ahead: all of it goes down when it is asked to, through DRAM or the ring."""
    for number, (talk, control) in enumerate(looked_at(form, talks, controls)):
        async with bench(
            model,
            hbm_slots=100,
            dram_slots=dram_slots,
            nvme_dir=tmp_path / str(number),
            nvme_slots=100,
            ring_slots=2,
            nvme_write_policy=WritePolicy.ON_PRESSURE,
        ) as it:
            told = await tell(it, talk, asleep=Tier.NVME)
            snapshot = it.manager.snapshot()
        told.assert_same_bits(control)
        blocks = (len(told.outcomes[-1].token_ids) - 1) // 32
        assert blocks > 4
        assert snapshot.totals.nvme_blocks_written == snapshot.tier(Tier.NVME).valid == blocks
        assert [snapshot.tier(tier).valid for tier in (Tier.HBM, Tier.DRAM)] == [0, 0]
        for before, outcome in zip(told.outcomes, told.outcomes[1:], strict=False):
            assert outcome.grant.reused == {Tier.HBM: 0, Tier.DRAM: 0, Tier.NVME: storable_tokens(before)}
        progress(say, form, f"asleep on NVMe {number + 1} of {form.num_told}")


@pytest.mark.parametrize("policy", [WritePolicy.EVERY_TURN, WritePolicy.ON_PRESSURE])
async def test_a_session_restarted_between_turns_has_every_bit_back(
    form: Form,
    model: LoadedModel,
    talks: list[Conversation],
    controls: list[Told],
    say: Say,
    tmp_path: Path,
    policy: WritePolicy,
) -> None:
    """With every turn written there is nothing left for the drain, which writes all of it with the other policy."""
    for number, (talk, control) in enumerate(looked_at(form, talks, controls)):
        told = Told([], [])
        history = array("I")
        for turn in range(TURNS):
            async with bench(
                model,
                hbm_slots=100,
                dram_slots=20,
                nvme_dir=tmp_path / str(number),
                nvme_slots=100,
                nvme_write_policy=policy,
                drain_seconds=0.0 if policy is WritePolicy.EVERY_TURN else DRAIN_SECONDS,
            ) as it:
                if turn:
                    assert it.manager.snapshot().totals.found == storable_tokens(told.outcomes[-1]) // 32
                told.outcomes.append(await talk.turn(it, history, turn))
                history = told.outcomes[-1].token_ids
                if policy is WritePolicy.EVERY_TURN:
                    await it.until(lambda snapshot: snapshot.dirty_blocks == 0)
                else:
                    assert it.manager.snapshot().dirty_blocks > 0
        told.assert_same_bits(control)
        for before, outcome in zip(told.outcomes, told.outcomes[1:], strict=False):
            assert outcome.grant.reused == {Tier.HBM: 0, Tier.DRAM: 0, Tier.NVME: storable_tokens(before)}
        progress(say, form, f"restarted {number + 1} of {form.num_told}")


@pytest.mark.parametrize(
    "ratio", [RATIOS[0], RATIOS[3], *(pytest.param(ratio, marks=pytest.mark.golden) for ratio in RATIOS[1:3])]
)
async def test_a_session_among_others_with_nvme_below_says_what_it_says_alone(
    form: Form,
    model: LoadedModel,
    talks: list[Conversation],
    controls: list[Told],
    say: Say,
    tmp_path: Path,
    ratio: str,
) -> None:
    """Memory holds some, the disk all: under pressure they go down by themselves, and come back. The suite has two."""
    hbm_slots, dram_slots = form.pressures[RATIOS.index(ratio)]
    teachers: list[Told | None] = [*([] if form.is_exact else controls), *([None] * len(talks))][: len(talks)]
    async with bench(
        model,
        hbm_slots=hbm_slots,
        dram_slots=dram_slots,
        nvme_dir=tmp_path,
        nvme_slots=form.roomy_slots,
        nvme_write_policy=WritePolicy.ON_PRESSURE,
        output_slice_tokens=4,
    ) as it:
        told = await asyncio.gather(
            *(tell(it, talk, teacher=teacher) for talk, teacher in zip(talks, teachers, strict=True))
        )
        totals = it.manager.snapshot().totals
    progress(say, form, f"HBM to DRAM {ratio}, NVMe below")
    for mine, control in zip(told, controls, strict=form.is_exact):
        if form.is_exact:
            mine.assert_same_bits(control)
        else:
            mine.assert_same_logits(control)
    stored = sum(storable_tokens(outcome) for mine in told for outcome in mine.outcomes[:-1])
    assert sum(mine.reused(tier) for mine in told for tier in Tier) >= 0.995 * stored
    if hbm_slots > dram_slots:
        assert totals.nvme_blocks_written > 0
        assert sum(mine.reused(Tier.NVME) for mine in told) > 0
