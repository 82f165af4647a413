"""The golden matrix: where a session slept cannot change a bit of what it says.

One ShareGPT conversation of six turns, greedy, told again and again: never asleep (the control),
asleep in DRAM between turns, suspended in the middle of answers, forked, among others under
pressure at several ratios of HBM to DRAM, and without any lower tier. Restored K/V must have
the control's bits, tokens must be the control's, and where a lower tier is in play the grant
must say that the blocks came from it.
"""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from kvstore import chain
from kvstore.types import Tier
from tests.golden.sharegpt import conversations
from tests.harness import SPACE, Bench, Outcome, bench

if TYPE_CHECKING:
    from models.loader import LoadedModel

TURNS = 6
SUITE_TOKENS = 16

pytestmark = pytest.mark.usefixtures("exact_machine")


class Conversation:
    """The users' words of one ShareGPT conversation, in tokens; answers are the model's own."""

    def __init__(self, loaded: LoadedModel, which: int, new_tokens: int) -> None:
        found = [talk for talk in conversations() if len(talk) >= 2 * TURNS]
        words = [message["content"][:160] for message in found[which] if message["role"] == "user"][:TURNS]
        encode = loaded.tokenizer.backend_tokenizer.encode
        shapes = ["<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"]
        shapes += ["<|im_end|>\n" + shapes[0]] * (TURNS - 1)
        texts = [shape.format(word) for shape, word in zip(shapes, words, strict=True)]
        self.parts = [array("I", encode(text, add_special_tokens=False).ids) for text in texts]
        self.new_tokens = new_tokens
        self.block_tokens = loaded.layout.block_tokens

    async def turn(self, it: Bench, history: array[int], number: int) -> Outcome:
        return await it.turn([*history, *self.parts[number]], self.new_tokens, ignore_eos=True)

    def keys(self, token_ids: array[int]) -> list[Any]:
        return chain.extend(None, token_ids[:-1], self.block_tokens, SPACE)


@dataclass
class Told:
    """One telling: the outcome of each turn."""

    outcomes: list[Outcome]

    @property
    def answers(self) -> list[list[int]]:
        return [outcome.output_ids for outcome in self.outcomes]

    def reused(self, tier: Tier) -> int:
        return sum(outcome.grant.reused[tier] for outcome in self.outcomes)

    def assert_same_bits(self, control: Told) -> None:
        """Tokens are equal, and every block this telling began a turn with has the control's bits."""
        assert self.answers == control.answers
        bits = max((outcome.restored for outcome in control.outcomes), key=len)
        for outcome in self.outcomes:
            count = min(len(outcome.restored), len(bits))
            assert outcome.restored[:count] == bits[:count]


async def tell(it: Bench, talk: Conversation, *, asleep: bool = False) -> Told:
    """All turns in order; `asleep` sends the session to sleep between them."""
    outcomes: list[Outcome] = []
    history = array("I")
    for number in range(TURNS):
        outcome = await talk.turn(it, history, number)
        outcomes.append(outcome)
        history = outcome.token_ids
        if asleep:
            await it.manager.sleep(talk.keys(history))
    return Told(outcomes)


@pytest.fixture(scope="module")
def talks(loaded: LoadedModel) -> list[Conversation]:
    """The conversation that is told, and others to crowd it."""
    return [Conversation(loaded, which, SUITE_TOKENS) for which in range(5)]


@pytest.fixture(scope="module")
def controls(loaded: LoadedModel, talks: list[Conversation]) -> list[Told]:
    async def never_asleep() -> list[Told]:
        async with bench(loaded, hbm_slots=600) as it:
            return [await tell(it, talk) for talk in talks]

    return asyncio.run(never_asleep())


async def test_a_session_that_slept_in_dram_has_every_bit_back(
    loaded: LoadedModel, talks: list[Conversation], controls: list[Told]
) -> None:
    async with bench(loaded, hbm_slots=100, dram_slots=100) as it:
        told = await tell(it, talks[0], asleep=True)
        assert it.manager.snapshot().totals.loaded > 0
    told.assert_same_bits(controls[0])
    for before, outcome in zip(told.outcomes, told.outcomes[1:], strict=False):
        storable = (len(before.token_ids) - 1) // 32 * 32
        assert outcome.grant.reused == {Tier.HBM: 0, Tier.DRAM: storable, Tier.NVME: 0}


@pytest.mark.parametrize(("hbm_slots", "dram_slots"), [(32, 8), (20, 20), (16, 64), (24, 0)], ids=str)
async def test_a_session_among_others_under_pressure_says_what_it_says_alone(
    loaded: LoadedModel, talks: list[Conversation], controls: list[Told], hbm_slots: int, dram_slots: int
) -> None:
    async with bench(loaded, hbm_slots=hbm_slots, dram_slots=dram_slots, output_slice_tokens=4) as it:
        told = await asyncio.gather(*(tell(it, talk) for talk in talks))
        totals = it.manager.snapshot().totals
        assert totals.evicted + totals.released > 0
    for mine, control in zip(told, controls, strict=True):
        mine.assert_same_bits(control)
    if dram_slots > hbm_slots:
        assert sum(mine.reused(Tier.DRAM) for mine in told) > 0


async def test_answers_suspended_in_the_middle_go_on_with_nothing_computed_again(
    loaded: LoadedModel, talks: list[Conversation]
) -> None:
    prompts = [talk.parts[0][:40] for talk in talks[:3]]
    async with bench(loaded, hbm_slots=100) as alone:
        expected = [(await alone.turn(prompt, 60, ignore_eos=True)).output_ids for prompt in prompts]
    async with bench(loaded, hbm_slots=7, dram_slots=64, output_slice_tokens=4) as it:
        outcomes = await asyncio.gather(*(it.turn(prompt, 60, ignore_eos=True) for prompt in prompts))
        totals = it.manager.snapshot().totals
        assert totals.turns_suspended > 0
        assert totals.tails_kept > 0
        computed = sum(step.prefill_tokens + step.decode_tokens for step in it.steps)
    assert [outcome.output_ids for outcome in outcomes] == expected
    assert computed == sum(len(outcome.token_ids) - 1 for outcome in outcomes)


async def test_a_fork_of_a_sleeping_session_has_its_bits_and_both_go_on(
    loaded: LoadedModel, talks: list[Conversation], controls: list[Told]
) -> None:
    talk, control = talks[0], controls[0]
    async with bench(loaded, hbm_slots=100, dram_slots=100) as it:
        history = array("I")
        for number in range(3):
            history = (await talk.turn(it, history, number)).token_ids
        await it.manager.sleep(talk.keys(history))
        other = await it.turn([*history, *talks[1].parts[1]], SUITE_TOKENS, ignore_eos=True)
        assert other.grant.reused[Tier.DRAM] == (len(history) - 1) // 32 * 32
        for number in range(3, TURNS):
            outcome = await talk.turn(it, history, number)
            assert outcome.output_ids == control.answers[number]
            history = outcome.token_ids
            await it.manager.sleep(talk.keys(history))
    bits = max((outcome.restored for outcome in control.outcomes), key=len)
    assert other.restored == bits[: len(other.restored)]
