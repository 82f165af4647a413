"""In fp32, greedy tokens and logits are those of transformers' own `generate`."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import pytest
import torch

from models.layout import kv_layout
from models.runner import Chunk, Runner
from tests.golden import tiny

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from models.loader import LoadedModel

TOLERANCE = 1e-3


def assert_generates_alike(theirs: Any, runner: Runner, prompt: array[int], new_tokens: int, chunk_tokens: int) -> None:
    """Teacher-forced on `generate`'s ids: logits within TOLERANCE at every step, and the same choice
    wherever the two best lie further apart than that (so a free run gives the same ids)."""
    generated = theirs.generate(
        torch.tensor([prompt.tolist()]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=new_tokens,
        output_logits=True,
        return_dict_in_generate=True,
    )
    expected_ids = generated.sequences[0, len(prompt) :].tolist()
    assert len(expected_ids) == new_tokens
    known = array("I", [*prompt, *expected_ids])
    slots = list(range(runner.layout.blocks_for(len(known))))
    position = 0
    logits = torch.empty(0)
    while position < len(prompt):
        size = min(chunk_tokens, len(prompt) - position)
        logits = runner.run([Chunk(known[position : position + size], position, slots, wants_logits=True)])
        position += size
    for step, expected in enumerate(generated.logits):
        assert (logits[0] - expected[0]).abs().max().item() <= TOLERANCE, f"step {step}"
        best = expected[0].topk(2).values
        if best[0] - best[1] > TOLERANCE:
            assert int(logits[0].argmax()) == expected_ids[step], f"step {step}"
        if step + 1 < new_tokens:
            token = known[position : position + 1]
            logits = runner.run([Chunk(token, position, slots, wants_logits=True)])
            position += 1


@pytest.fixture(scope="module")
def theirs(loaded_fp32: LoadedModel) -> PreTrainedModel:
    """The same weights under transformers' own attention."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    folder = loaded_fp32.model.config._name_or_path
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.train(False)
    generation: Any = GenerationConfig
    model.generation_config = generation(pad_token_id=0)  # no end of sequence: all have their full length
    return model


@pytest.mark.parametrize("which", range(4))
def test_the_embedded_model_generates_what_transformers_generates(
    loaded_fp32: LoadedModel, theirs: PreTrainedModel, real_text: Callable[[int, int], array[int]], which: int
) -> None:
    count = (150, 600, 1400, 3000)[which]
    runner = Runner(loaded_fp32.model, loaded_fp32.layout, slots=100, exact=False)
    assert_generates_alike(theirs, runner, real_text(count, which), new_tokens=8, chunk_tokens=512)


@pytest.mark.golden
@pytest.mark.parametrize("which", range(20))
def test_twenty_conversations_generate_what_transformers_generates(
    loaded_fp32: LoadedModel, theirs: PreTrainedModel, real_text: Callable[[int, int], array[int]], which: int
) -> None:
    count = 150 * (which + 1)
    runner = Runner(loaded_fp32.model, loaded_fp32.layout, slots=104, exact=which % 2 == 0)
    assert_generates_alike(theirs, runner, real_text(count, 40 + which), new_tokens=64, chunk_tokens=300)


@pytest.mark.parametrize("exact", [True, False], ids=["exact path", "fast path"])
@pytest.mark.parametrize(
    "build", [tiny.qwen3, tiny.gemma2, tiny.gpt_oss, tiny.mistral], ids=["qwen3", "gemma2", "gpt-oss", "mistral"]
)
def test_a_tiny_model_of_another_architecture_generates_what_transformers_generates(
    build: Callable[[], PreTrainedModel], exact: bool
) -> None:
    model = build()
    twin = tiny.paged(model)
    runner = Runner(twin, kv_layout(model, 32), slots=24, exact=exact)
    generator = torch.Generator().manual_seed(5)
    prompt = array("I", torch.randint(1, tiny.VOCABULARY, (600,), generator=generator).tolist())
    assert_generates_alike(model, runner, prompt, new_tokens=40, chunk_tokens=170)
