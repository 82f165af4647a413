"""What is said in crash rounds, by both sides, told in advance: conversations with the answers of a control."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field

from tests.crash.model import Context

MOST_TURNS = 9


@dataclass(slots=True)
class Talk:
    """One conversation; told turn by turn, each made when it is first asked for."""

    seed: int
    number: int
    _context: Context = field(default_factory=Context)
    _turns: list[tuple[list[int], list[int]]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"talk-{self.number}"

    def user(self, turn: int) -> list[int]:
        """Tokens that the user says."""
        return self._told(turn)[0]

    def answer(self, turn: int) -> list[int]:
        """What the model says to it, had nothing ever been stored."""
        return self._told(turn)[1]

    def prompt(self, turn: int) -> array[int]:
        """Everything up to the answer of `turn`."""
        self._told(turn)
        told = [tokens for pair in self._turns[:turn] for tokens in pair]
        return array("I", [token for tokens in [*told, self._turns[turn][0]] for token in tokens])

    def _told(self, turn: int) -> tuple[list[int], list[int]]:
        while len(self._turns) <= turn:
            chance = random.Random(f"{self.seed} {self.number} {len(self._turns)}")
            # Talks begin alike in groups of eight, so that blocks are shared and outlive one of those who have them.
            first = [self.number % 8] * 24 if not self._turns else []
            said = first + [chance.randrange(1000) for _ in range(chance.randrange(3, 40))]
            before = self._turns[-1][1][-1:] if self._turns else []  # sampled, and never computed until now
            answer = self._context.answer([*before, *said], chance.randrange(4, 24))
            self._turns.append((said, answer))
        return self._turns[turn]
