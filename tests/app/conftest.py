"""Servers that tests of HTTP share: one with a scripted engine per test, one with the real model per module."""

from __future__ import annotations

import time
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from app.gateway import Gateway
from app.hints import Hints
from app.keeper import Keeper
from app.metrics import Metrics
from app.names import ServedNames
from app.settings import Settings
from kvstore.manager import TierManager
from kvstore.planner import Planner, PlannerConfig
from kvstore.reuse import MissReason
from kvstore.sessions import SessionBook
from models import embedded
from models.chat import ChatTemplate
from models.grammar import Grammars
from models.loader import GenerationDefaults
from tests.app.live import Live, live
from tests.app.recording import RecordingStore
from tests.app.scripted import EOS_ID, ScriptedEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from transformers import PreTrainedTokenizerFast

    from tests.kvstore.shelf import Shelf

MIB = 1024**2
BLOCK_TOKENS = 16
NAME = "scripted"


@pytest.fixture(scope="session")
def tokenizer(cache_dir: Path) -> PreTrainedTokenizerFast:
    """The embedded model's."""
    from transformers import AutoTokenizer

    folder = embedded.fetch(cache_dir, progress=print)
    return AutoTokenizer.from_pretrained(folder)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def real(cache_dir: Path) -> Iterator[Live]:
    """The embedded model behind the whole server, with HBM for about 2,900 tokens."""
    with live(Settings(model="embedded", hbm_bytes=64 * MIB, cache_dir=cache_dir, drain_seconds=5)) as server:
        yield server


@pytest.fixture
def fresh(real: Live) -> Iterator[Live]:
    """The same server with nothing cached; checked to be idle and lawful afterwards."""
    real.flush()
    yield real
    real.check_idle()


class Scripted:
    """A server whose engine says what a test wants, when it wants it."""

    def __init__(self, server: Live, engine: ScriptedEngine) -> None:
        self.server = server
        self.engine = engine
        self.url = server.url

    @property
    def store(self) -> RecordingStore:
        store = self.server.gateway.store
        assert isinstance(store, RecordingStore)
        return store

    def check(self) -> None:
        """Nothing runs, all laws hold, and book and store know of the same branches."""
        if self.server.uvicorn.should_exit:
            return
        self.server.check_idle()
        self.server.call(lambda: self.store.check_in_step_with(self.server.gateway.book))

    def pause(self) -> None:
        self.server.call(self.engine.pause)

    def go_on(self) -> None:
        self.server.call(self.engine.go_on)


def one_token(tokenizer: PreTrainedTokenizerFast) -> Callable[[str], int]:
    """The id of a word that is one token."""

    def id_of(word: str) -> int:
        (token_id,) = tokenizer.backend_tokenizer.encode(word, add_special_tokens=False).ids
        return int(token_id)

    return id_of


@pytest.fixture
def serve(tokenizer: PreTrainedTokenizerFast) -> Iterator[Callable[..., Scripted]]:
    """Starts scripted servers: `serve(hbm_slots=..., words=..., **settings)`; checks that each ends idle."""
    with ExitStack() as stack:

        def start(
            *,
            hbm_slots: int = 256,
            max_context: int = 2048,
            words: list[str] | None = None,
            drain_seconds: int = 5,
            shelf: Callable[[], Shelf] | None = None,
            **options: object,
        ) -> Scripted:
            script = None if words is None else lambda _spec: words
            engine = ScriptedEngine(BLOCK_TOKENS, one_token(tokenizer), script)
            settings = Settings(block_tokens=BLOCK_TOKENS, drain_seconds=drain_seconds, **options)  # type: ignore[arg-type]

            @asynccontextmanager
            async def opened(settings: Settings) -> AsyncIterator[Gateway]:
                with ThreadPoolExecutor(1) as threads:
                    kept = None if shelf is None else shelf()
                    gateway = scripted_gateway(settings, engine, tokenizer, hbm_slots, max_context, threads, kept)
                    yield gateway
                    gateway.is_draining = True
                    await gateway.manager.drain(settings.drain_seconds)
                    if kept is not None:
                        kept.close()

            server = stack.enter_context(live(settings, opened))
            scripted = Scripted(server, engine)
            stack.callback(scripted.check)
            return scripted

        yield start


def scripted_gateway(
    settings: Settings,
    engine: ScriptedEngine,
    tokenizer: PreTrainedTokenizerFast,
    hbm_slots: int,
    max_context: int,
    threads: Executor,
    shelf: Shelf | None = None,
) -> Gateway:
    config = PlannerConfig(
        cost_gate="off",
        hbm_slots=hbm_slots,
        block_tokens=BLOCK_TOKENS,
        max_running=settings.max_running,
        max_queue=settings.max_queue,
        age_limit_seconds=settings.age_limit_seconds,
    )
    manager = TierManager(Planner(config), engine, max_context=min(max_context, hbm_slots * BLOCK_TOKENS))
    engine.manager = manager
    metrics = Metrics(MissReason)
    metrics.watch_store(manager.snapshot)
    store = RecordingStore()
    book = SessionBook(max_sessions=settings.max_sessions, max_branches=settings.session_branches)
    metrics.watch_sessions(book)
    metrics.watch_transfers({})
    keeper = Keeper(book, store)
    if shelf is not None:
        keeper = Keeper(book, store, lambda: shelf.monotonic, shelf.journal)
        keeper.lost = None if shelf.catalog.loss is None else shelf.catalog.loss.reason
        keeper.restore(shelf.restored)
    return Gateway(
        settings=settings,
        names=ServedNames(NAME, settings.served_model_name),
        model_key=b"scripted-model-k",
        defaults=GenerationDefaults(),
        block_tokens=BLOCK_TOKENS,
        block_bytes=4096,
        manager=manager,
        store=store,
        keeper=keeper,
        hints=Hints(store),
        chat=ChatTemplate(tokenizer),
        grammars=Grammars(tokenizer.backend_tokenizer, frozenset({EOS_ID})),
        metrics=metrics,
        text_threads=threads,
        started_at=int(time.time()),
        disk=None if shelf is None else shelf.disk,
    )
