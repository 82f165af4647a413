"""The embedded model, loaded once per dtype, and real text in tokens."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import pytest
import torch

from models import exactness, loader
from tests.golden.sharegpt import conversations

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from models.loader import LoadedModel


@pytest.fixture(scope="session", autouse=True)
def _two_threads() -> None:
    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def loaded(cache_dir: Path) -> LoadedModel:
    """The embedded model in bf16, as it is served by default."""
    return loader.load("embedded", dtype="bf16", cache_dir=cache_dir)


@pytest.fixture(scope="session")
def loaded_fp32(cache_dir: Path) -> LoadedModel:
    return loader.load("embedded", dtype="fp32", cache_dir=cache_dir)


@pytest.fixture(scope="session")
def exact_machine(loaded: LoadedModel, cache_dir: Path) -> None:
    """Skips where the start-up check says that bits depend on batching here; nothing below could hold then."""
    verdict = exactness.cached_check(loaded.model, loaded.layout, loaded.model_key, cache_dir)
    if not verdict.is_exact:
        pytest.skip(f"not exact in bf16 on this machine: {verdict.reason}")


@pytest.fixture(scope="session")
def real_text(loaded: LoadedModel) -> Callable[[int, int], array[int]]:
    """`real_text(n, which)`: the first n tokens of ShareGPT conversations from number `which` on, as one chat."""

    def cut(count: int, which: int = 0) -> array[int]:
        token_ids = array("I")
        for messages in conversations()[which:]:
            text = loaded.tokenizer.apply_chat_template(messages, tokenize=False)
            token_ids.extend(loaded.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)
            if len(token_ids) >= count:
                return token_ids[:count]
        raise AssertionError("ShareGPT has fewer tokens than asked for")

    return cut
