"""In exact mode the bits of logits and K/V do not depend on chunking or on company."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from models.runner import Chunk, Runner

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable

    from torch import Tensor

    from models.loader import LoadedModel

PROMPT_TOKENS = 3000
OTHERS = 16
TOKEN_BY_TOKEN = [PROMPT_TOKENS - 24, *[1] * 24]

pytestmark = pytest.mark.usefixtures("exact_machine")


class Prompt:
    """One prompt computed into block table 0 or 1; sixteen others decode behind it."""

    def __init__(self, loaded: LoadedModel, text: Callable[[int, int], array[int]]) -> None:
        self.layout = loaded.layout
        self.blocks = self.layout.blocks_for(PROMPT_TOKENS)
        self.other_blocks = 12
        self.runner = Runner(loaded.model, self.layout, slots=2 * self.blocks + OTHERS * self.other_blocks)
        self.token_ids = text(PROMPT_TOKENS, 0)
        self.others = [text(300, 20 + number) for number in range(OTHERS)]
        self.expected = self.compute([PROMPT_TOKENS], table=0)

    def slots(self, table: int) -> list[int]:
        return list(range(table * self.blocks, (table + 1) * self.blocks))

    def other_chunks(self, step: int) -> list[Chunk]:
        """Each of the others at another length; first a chunk of prompt, then single tokens."""
        chunks = []
        for number, token_ids in enumerate(self.others):
            first = 2 * self.blocks + number * self.other_blocks
            slots = list(range(first, first + self.other_blocks))
            start = 0 if step == 0 else 17 * (number + 1) + step - 1
            stop = 17 * (number + 1) if step == 0 else start + 1
            if stop <= len(token_ids):
                chunks.append(Chunk(token_ids[start:stop], start, slots, wants_logits=True))
        return chunks

    def compute(self, sizes: list[int], table: int, *, company: bool = False) -> tuple[Tensor, Tensor]:
        """Logits after the last token and the K/V of all full blocks."""
        position, step = 0, 0
        logits = torch.empty(0)
        while position < PROMPT_TOKENS:
            size = min(sizes[step % len(sizes)], PROMPT_TOKENS - position)
            chunk = Chunk(self.token_ids[position : position + size], position, self.slots(table), wants_logits=True)
            logits = self.runner.run([*(self.other_chunks(step) if company else []), chunk])[-1].clone()
            position, step = position + size, step + 1
        full = PROMPT_TOKENS // self.layout.block_tokens
        return logits, torch.stack([self.runner.arena.slot(slot) for slot in self.slots(table)[:full]])


@pytest.fixture(
    scope="module",
    params=["loaded", pytest.param("loaded_modules", marks=pytest.mark.golden)],
    ids=["as served", "without kernels"],
)
def prompt(request: pytest.FixtureRequest, real_text: Callable[[int, int], array[int]]) -> Prompt:
    return Prompt(request.getfixturevalue(request.param), real_text)


@pytest.mark.parametrize(
    ("sizes", "company"),
    [([512], False), ([64], False), ([37], False), (TOKEN_BY_TOKEN, False), ([64], True), ([700, 3, 5, 37], True)],
    ids=["512", "64", "37", "token by token at the end", "64 among 16 others", "uneven among 16 others"],
)
def test_a_prompt_has_the_same_bits_however_it_is_cut_and_in_any_company(
    prompt: Prompt, sizes: list[int], company: bool
) -> None:
    logits, kv = prompt.compute(sizes, table=1, company=company)
    assert torch.equal(logits, prompt.expected[0])
    assert torch.equal(kv, prompt.expected[1])


def test_the_check_notices_attention_whose_bits_depend_on_the_number_of_keys(
    loaded_modules: LoadedModel,
) -> None:
    """The fast path is not exact here, or the check could not tell one from the other."""
    from models import exactness

    class Fast(Runner):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **{**kwargs, "exact": False})  # type: ignore[arg-type]

    assert exactness.check(loaded_modules.model, loaded_modules.layout).is_exact
    assert not exactness.check(loaded_modules.model, loaded_modules.layout, runner=Fast).is_exact
