"""What the kernels compute is what transformers computes, with the same bits in any company."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import pytest
import torch

from models.layout import kv_layout
from models.native import compiler
from models.native.decoder import attach, native_of, why_not
from models.runner import Chunk, Runner
from tests.golden import tiny

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

TOKENS = 700
SLOTS = 23


@pytest.fixture(scope="module")
def library(cache_dir: Path) -> ctypes.CDLL:
    try:
        return compiler.library(cache_dir)
    except compiler.NoKernels as error:
        pytest.skip(f"no kernels here: {error}")


def native(plain: PreTrainedModel, library: ctypes.CDLL, block_tokens: int = 32) -> Runner:
    model = tiny.in_bf16(plain)
    layout = kv_layout(model, block_tokens)
    assert why_not(model, layout) == ""
    attach(model, layout, library)
    assert native_of(model) is not None
    return Runner(model, layout, slots=6 * SLOTS * 32 // block_tokens)


def every_logit(runner: Runner, token_ids: array[int], sizes: list[int], table: int = 0) -> Tensor:
    """Logits after each token, computed in chunks of `sizes`, in a block table of its own."""
    blocks = runner.layout.blocks_for(len(token_ids))
    slots = list(range(table * blocks, (table + 1) * blocks))
    position, parts = 0, []
    for size in sizes:
        parts.append(runner.run([Chunk(token_ids[position : position + size], position, slots, False, True)]))
        position += size
    assert position == len(token_ids)
    return torch.cat(parts)


def ids(count: int, seed: int = 5) -> array[int]:
    generator = torch.Generator().manual_seed(seed)
    return array("I", torch.randint(1, tiny.VOCABULARY, (count,), generator=generator).tolist())


MODELS = {
    "llama, 5 heads to a KV head": lambda: tiny.wide_llama(heads=10, kv_heads=2, head_dim=64),
    "llama, heads of 96": lambda: tiny.wide_llama(heads=4, kv_heads=4, head_dim=96),
    "llama, one KV head, heads of 128": lambda: tiny.wide_llama(heads=16, kv_heads=1, head_dim=128),
    "qwen2, biases": tiny.wide_qwen2,
    "qwen3, norms of heads": tiny.wide_qwen3,
    "mistral, a window": tiny.wide_mistral,
}


@pytest.mark.parametrize("which", MODELS)
def test_the_kernels_are_as_near_to_fp32_as_transformers_in_bf16_is(which: str, library: ctypes.CDLL) -> None:
    plain: Any = MODELS[which]()
    token_ids = ids(TOKENS)
    given = torch.tensor([token_ids.tolist()])
    with torch.inference_mode():
        expected = plain(input_ids=given).logits[0]
        rounded = tiny.in_bf16(plain)(input_ids=given).logits[0].float()
    got = every_logit(native(plain, library), token_ids, [TOKENS]).float()
    theirs, ours = (rounded - expected).abs(), (got - expected).abs()
    assert ours.mean() <= 1.15 * theirs.mean()
    assert ours.max() <= 1.5 * theirs.max()
    assert theirs.mean() < 0.05 * expected.abs().mean()  # or nearness would say nothing


@pytest.mark.parametrize("block_tokens", [16, 32])
@pytest.mark.parametrize("which", MODELS)
def test_bits_are_the_same_in_one_pass_in_chunks_and_token_by_token(
    which: str, block_tokens: int, library: ctypes.CDLL
) -> None:
    runner = native(MODELS[which](), library, block_tokens)
    token_ids = ids(TOKENS)
    expected = every_logit(runner, token_ids, [TOKENS])
    for table, sizes in enumerate(([64] * 10 + [60], [37] * 18 + [34], [1, 2, 3, 4, 5, 6, 7] * 25), start=1):
        assert torch.equal(every_logit(runner, token_ids, sizes, table), expected)
    written = runner.layout.slot_bytes // runner.layout.itemsize * (TOKENS // block_tokens)
    tables = runner.arena.slot_elements * runner.layout.blocks_for(TOKENS)
    for table in (1, 2, 3):
        copied = runner.arena.data[table * tables : table * tables + written]
        assert torch.equal(copied, runner.arena.data[:written])


def test_bits_are_the_same_among_others_and_with_other_numbers_of_threads(library: ctypes.CDLL) -> None:
    runner = native(MODELS["qwen3, norms of heads"](), library)
    token_ids = ids(300)
    slots = [list(range(11 * number, 11 * number + 11)) for number in range(12)]
    expected = every_logit(runner, token_ids, [300])[-1]
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            runner.run([Chunk(token_ids[:299], 0, slots[1], False)])
            for number in range(2, 12):
                runner.run([Chunk(ids(20 * number, number), 0, slots[number], False)])
            others = [Chunk(ids(1, number), 20 * number, slots[number], True) for number in range(2, 12)]
            mine = Chunk(token_ids[299:], 299, slots[1], True)
            logits = runner.run([*others[:4], mine, *others[4:]])
            assert torch.equal(logits[4], expected)
    finally:
        torch.set_num_threads(threads)


def test_no_logits_are_computed_where_none_are_wanted(library: ctypes.CDLL) -> None:
    runner = native(MODELS["qwen2, biases"](), library)
    assert runner.run([Chunk(ids(40), 0, [0, 1], False)]).shape == (0, tiny.VOCABULARY)
    wanted = [Chunk(ids(40), 0, [2, 3], False), Chunk(ids(30), 0, [4], True), Chunk(ids(5, 2), 0, [5], False, True)]
    logits = runner.run(wanted)
    assert torch.equal(logits[0], every_logit(runner, ids(30), [30])[-1])
    assert torch.equal(logits[1:], every_logit(runner, ids(5, 2), [5]))


@pytest.mark.parametrize("build", [tiny.gemma2, tiny.gpt_oss], ids=["gemma2", "gpt-oss"])
def test_other_architectures_are_left_to_transformers(build: Callable[[], PreTrainedModel]) -> None:
    model = tiny.in_bf16(build())
    assert type(model).__name__ in why_not(model, kv_layout(model, 32))


def test_small_heads_and_other_dtypes_are_left_to_transformers() -> None:
    model = tiny.qwen3()
    assert "float32" in why_not(model, kv_layout(model, 32))
    model = tiny.in_bf16(model)
    assert "16 dimensions" in why_not(model, kv_layout(model, 32))


def test_the_modules_whose_weights_the_kernels_took_say_so(library: ctypes.CDLL) -> None:
    model: Any = tiny.in_bf16(tiny.wide_qwen2())
    attach(model, kv_layout(model, 32), library)
    with pytest.raises(RuntimeError, match="compile='off'"):
        model(input_ids=torch.tensor([[1, 2]]))
