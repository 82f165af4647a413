"""Which turns get tokens in a step: order, budget, and whose prompts are next."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from models.contention import SHARED_STEPS, Contention
from models.scheduler import Work, schedule

BUDGET = 8


@dataclass
class Turn:
    """Prompt tokens still to compute, then one token a step."""

    num_pending: int
    tenant: str = ""
    num_writable: int = 1_000

    def run(self, count: int) -> None:
        self.num_pending = max(1, self.num_pending - count)

    @property
    def has_begun(self) -> bool:
        """Has it said its first token?"""
        return self.num_pending == 1


def step(turns: list[Turn], contention: Contention, budget: int = BUDGET) -> list[Work]:
    works = schedule(turns, budget, contention)
    for work in works:
        turns[work.place].run(work.num_tokens)
    return works


def steps_until_first_token(turn: Turn, others: list[Turn], contention: Contention, flood: int = 0) -> int:
    """Steps in which `turn`, which arrives now, gets to its first token; whenever one of `others` has got to its own,
    it ends, and another of `flood` tokens follows."""
    turns, steps = [*others, turn], 0
    while not turn.has_begun:
        step(turns, contention)
        steps += 1
        turns = [Turn(flood, "flood") if each.has_begun and each is not turn else each for each in turns]
    return steps


def test_decoding_turns_take_part_and_prompts_share_what_they_leave() -> None:
    turns = [Turn(1), Turn(20), Turn(1), Turn(3)]
    assert step(turns, Contention()) == [Work(0, 1), Work(2, 1), Work(1, 6)]
    turns[1].num_pending = 4
    assert step(turns, Contention()) == [Work(0, 1), Work(2, 1), Work(1, 4), Work(3, 2)]


def test_a_turn_without_room_waits_for_its_slots() -> None:
    assert step([Turn(5, num_writable=0), Turn(1, num_writable=0), Turn(5, num_writable=2)], Contention()) == [
        Work(2, 2)
    ]


def test_decoding_beyond_the_budget_leaves_prompts_for_later() -> None:
    assert step([Turn(1)] * BUDGET + [Turn(5)], Contention()) == [Work(place, 1) for place in range(BUDGET)]


def test_one_tenant_under_a_name_is_served_as_one_without() -> None:
    for name in ("", "alice"):
        turns = [Turn(20, name), Turn(1, name), Turn(3, name)]
        assert [step(turns, contention) for contention in [Contention()] for _ in range(3)] == [
            [Work(1, 1), Work(0, 7)], [Work(1, 1), Work(0, 7)], [Work(1, 1), Work(0, 6), Work(2, 1)]
        ]  # fmt: skip


@pytest.mark.parametrize("prompt", [2, 8, 16, 40])
@pytest.mark.parametrize("flood", [8, 100, 1_000])
def test_a_prompt_beside_a_flood_of_long_ones_needs_few_steps_more_than_alone(prompt: int, flood: int) -> None:
    """Steps of a flood are half as long as those of who is alone; so twice as many steps take as long."""
    alone = steps_until_first_token(Turn(prompt, "bob"), [], Contention())
    contention = Contention()
    contention.choose({"bob": 1})  # he was there before
    others = [Turn(flood, "flood") for _ in range(12)]
    step(others, contention)
    beside = steps_until_first_token(Turn(prompt, "bob"), others, contention, flood)
    tokens_of_a_step = contention.budget(BUDGET)
    under_way = tokens_of_a_step / BUDGET  # he arrives while a step of the flood runs
    assert beside * tokens_of_a_step / BUDGET + under_way <= 3 * alone


def test_who_arrives_goes_before_a_longer_prompt_that_has_been_computed_for_a_while() -> None:
    contention = Contention()
    turns = [Turn(1_000, "flood")]
    for _ in range(20):
        step(turns, contention)
    turns.append(Turn(3, "bob"))
    assert step(turns, contention) == [Work(1, 3)]
    turns += [Turn(1_000, "bob")]
    served = [step(turns, contention)[-1].place for _ in range(8)]
    assert 3 <= served.count(0) <= 5


def test_who_stayed_away_has_saved_up_nothing() -> None:
    contention = Contention()
    turns = [Turn(10, "bob"), Turn(10_000, "flood")]
    for _ in range(200):
        step(turns, contention)
    turns.append(Turn(10_000, "bob"))
    served = [step(turns, contention)[-1].place for _ in range(20)]
    assert served.count(1) in (9, 10, 11)


def test_three_tenants_are_served_alike_however_many_prompts_each_has() -> None:
    contention = Contention()
    turns = [Turn(10_000, name) for name in "aaaaaabcc"]
    tokens = dict.fromkeys("abc", 0)
    for _ in range(300):
        for work in step(turns, contention):
            tokens[turns[work.place].tenant] += work.num_tokens
    assert max(tokens.values()) - min(tokens.values()) <= BUDGET


def test_steps_are_long_again_when_others_have_not_been_seen_for_a_while() -> None:
    contention = Contention()
    step([Turn(5, "a"), Turn(5, "b")], contention)
    assert contention.budget(BUDGET) == BUDGET // 2
    long = Turn(10**6, "a")
    for _ in range(SHARED_STEPS):
        step([long], contention)
    assert contention.budget(BUDGET) == BUDGET
