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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from kvstore import chain
from kvstore.types import Tier
from tests.golden.sharegpt import conversations
from tests.harness import SPACE, Bench, Lesson, Outcome, bench

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from models.loader import LoadedModel

    Say = Callable[[str], None]

TURNS = 6
TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Form:
    """One size of the matrix. `pressures` are (HBM, DRAM) slots at 4:1, 1:1, 1:4 and without DRAM."""

    dtype: str
    new_tokens: int
    num_told: int
    num_others: int
    roomy_slots: int
    pressures: tuple[tuple[int, int], ...]

    @property
    def is_exact(self) -> bool:
        """Are bits the same in any batch?"""
        return self.dtype == "bf16"


SUITE = Form("bf16", 16, 1, 4, 600, ((32, 8), (20, 20), (16, 64), (24, 0)))
LONG = {dtype: Form(dtype, 64, 3, 16, 800, ((160, 40), (100, 100), (64, 256), (160, 0))) for dtype in ("bf16", "fp32")}
RATIOS = ("4:1", "1:1", "1:4", "no DRAM")


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

    async def turn(self, it: Bench, history: array[int], number: int, lesson: Lesson | None = None) -> Outcome:
        return await it.turn([*history, *self.parts[number]], self.new_tokens, ignore_eos=True, lesson=lesson)

    def keys(self, token_ids: array[int]) -> list[Any]:
        return chain.extend(None, token_ids[:-1], self.block_tokens, SPACE)


@dataclass
class Told:
    """One telling: the outcome of each turn, and what was heard of it where anybody listened."""

    outcomes: list[Outcome]
    lessons: list[Lesson]

    @property
    def answers(self) -> list[list[int]]:
        return [outcome.output_ids for outcome in self.outcomes]

    @property
    def bits(self) -> list[int]:
        """Of the longest prefix that a turn began with."""
        return max((outcome.restored for outcome in self.outcomes), key=len)

    def reused(self, tier: Tier) -> int:
        return sum(outcome.grant.reused[tier] for outcome in self.outcomes)

    def assert_same_bits(self, control: Told) -> None:
        """Tokens are equal, and every block this telling began a turn with has the control's bits."""
        assert self.answers == control.answers
        for outcome in self.outcomes:
            count = min(len(outcome.restored), len(control.bits))
            assert outcome.restored[:count] == control.bits[:count]

    def assert_same_logits(self, control: Told) -> None:
        """Told with the control's ids, it would have said the same, but for rounding."""
        assert self.answers == control.answers, "it was taught what to say"
        assert len(self.lessons) == len(self.outcomes)
        for mine, theirs in zip(self.lessons, control.lessons, strict=True):
            assert mine.differs_from(theirs) <= TOLERANCE


async def tell(
    it: Bench, talk: Conversation, *, asleep: bool = False, listen: bool = False, teacher: Told | None = None
) -> Told:
    """All turns in order; `asleep` sends the session to sleep between them, `teacher` says what it says."""
    told = Told([], [])
    history = array("I")
    for number in range(TURNS):
        lesson = None
        if listen or teacher is not None:
            lesson = Lesson([] if teacher is None else teacher.answers[number])
            told.lessons.append(lesson)
        outcome = await talk.turn(it, history, number, lesson)
        told.outcomes.append(outcome)
        history = outcome.token_ids
        if asleep:
            await it.manager.sleep(talk.keys(history))
    return told


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(SUITE, id="suite"),
        *(pytest.param(form, id=f"long {dtype}", marks=pytest.mark.golden) for dtype, form in LONG.items()),
    ],
)
def form(request: pytest.FixtureRequest) -> Form:
    """Skips where bits in bf16 depend on batching anyway."""
    chosen: Form = request.param
    if chosen.is_exact:
        request.getfixturevalue("exact_machine")
    return chosen


@pytest.fixture(scope="module")
def model(form: Form, request: pytest.FixtureRequest) -> LoadedModel:
    loaded: LoadedModel = request.getfixturevalue("loaded" if form.dtype == "bf16" else "loaded_fp32")
    return loaded


@pytest.fixture(scope="session")
def say(request: pytest.FixtureRequest) -> Say:
    """How far a long run is, on the terminal although output is captured."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def shown(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n    {text}", end="", flush=True)

    return shown


@pytest.fixture(scope="module")
def talks(form: Form, model: LoadedModel) -> list[Conversation]:
    """First the conversations that are looked at, then others to crowd them."""
    return [Conversation(model, which, form.new_tokens) for which in range(form.num_told + form.num_others)]


@pytest.fixture(scope="module")
def controls(form: Form, model: LoadedModel, talks: list[Conversation], say: Say) -> list[Told]:
    """Of those that are compared: all where bits do not depend on the batch, else those that are looked at."""
    compared = talks if form.is_exact else talks[: form.num_told]

    async def never_asleep() -> list[Told]:
        told = []
        async with bench(model, hbm_slots=form.roomy_slots) as it:
            for number, talk in enumerate(compared):
                told.append(await tell(it, talk, listen=not form.is_exact))
                progress(say, form, f"control {number + 1} of {len(compared)}")
        return told

    return asyncio.run(never_asleep())


def progress(say: Say, form: Form, text: str) -> None:
    if form is not SUITE:
        say(f"{form.dtype}: {text}")


def looked_at(form: Form, talks: list[Conversation], controls: list[Told]) -> Iterable[tuple[Conversation, Told]]:
    return zip(talks[: form.num_told], controls, strict=False)


async def test_a_session_that_slept_in_dram_has_every_bit_back(
    form: Form, model: LoadedModel, talks: list[Conversation], controls: list[Told], say: Say
) -> None:
    for number, (talk, control) in enumerate(looked_at(form, talks, controls)):
        async with bench(model, hbm_slots=100, dram_slots=100) as it:
            told = await tell(it, talk, asleep=True)
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
