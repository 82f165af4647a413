"""The embedded model, loaded once per dtype, and real text in tokens."""

from __future__ import annotations

import asyncio
from array import array
from typing import TYPE_CHECKING

import pytest
import torch

from models import exactness, loader
from tests.golden.sharegpt import conversations
from tests.golden.telling import LONG, SUITE, Conversation, Form, Told, progress, tell
from tests.harness import bench

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from models.loader import LoadedModel
    from tests.golden.telling import Say


@pytest.fixture(scope="session", autouse=True)
def _two_threads() -> None:
    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def loaded(cache_dir: Path) -> LoadedModel:
    """The embedded model in bf16, as it is served by default."""
    return loader.load("embedded", dtype="bf16", cache_dir=cache_dir)


@pytest.fixture(scope="session")
def loaded_modules(cache_dir: Path) -> LoadedModel:
    """In bf16 as it is served where the kernels cannot be had: transformers' modules compute it."""
    return loader.load("embedded", dtype="bf16", cache_dir=cache_dir, compile="off")


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


@pytest.fixture(
    scope="session",
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


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
def talks(form: Form, model: LoadedModel) -> list[Conversation]:
    """First the conversations that are looked at, then others to crowd them."""
    return [Conversation(model, which, form.new_tokens) for which in range(form.num_told + form.num_others)]


@pytest.fixture(scope="session")
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
