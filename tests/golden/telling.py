"""One telling of a conversation, and the forms of the golden matrix: what test_matrix and test_matrix_nvme share."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore import chain
from tests.golden.sharegpt import conversations
from tests.harness import SPACE, Bench, Lesson, Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvstore.types import Tier
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
        self.name = f"talk {which}"
        self.new_tokens = new_tokens
        self.block_tokens = loaded.layout.block_tokens

    async def turn(self, it: Bench, history: array[int], number: int, lesson: Lesson | None = None) -> Outcome:
        prompt = [*history, *self.parts[number]]
        return await it.turn(prompt, self.new_tokens, session=self.name, ignore_eos=True, lesson=lesson)

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
    it: Bench, talk: Conversation, *, asleep: Tier | None = None, listen: bool = False, teacher: Told | None = None
) -> Told:
    """All turns in order; `asleep` is where the session sleeps between them, `teacher` says what it says."""
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
        if asleep is not None:
            await it.manager.sleep(talk.keys(history), asleep)
    return told


def progress(say: Say, form: Form, text: str) -> None:
    if form is not SUITE:
        say(f"{form.dtype}: {text}")


def looked_at(form: Form, talks: list[Conversation], controls: list[Told]) -> Iterable[tuple[Conversation, Told]]:
    return zip(talks[: form.num_told], controls, strict=False)
