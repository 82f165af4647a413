"""What every route shares: the model's facts, the store, the sessions, the counters."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from app import tenants
from app.admin.board import Board
from app.conversations import Conversations
from app.fair_queue import FairQueue
from app.traces import NoTraces

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Executor

    from fastapi import FastAPI

    from app.disk import Disk
    from app.hints import Hints
    from app.keeper import Keeper
    from app.metrics import Metrics
    from app.names import ServedNames
    from app.settings import Settings
    from app.store import SleepingStore
    from app.traces import Traces
    from kvstore.manager import TierManager
    from kvstore.sessions import SessionBook
    from kvstore.transfer import Traffic
    from kvstore.types import Tier
    from models.chat import ChatTemplate
    from models.grammar import Grammars
    from models.loader import GenerationDefaults

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class Gateway:
    """One served model. Made at start-up, alive until the last turn has ended."""

    settings: Settings
    names: ServedNames
    model_key: bytes
    defaults: GenerationDefaults
    block_tokens: int
    block_bytes: int
    """Of one slot, in every tier."""
    manager: TierManager
    store: SleepingStore
    keeper: Keeper
    hints: Hints
    chat: ChatTemplate
    grammars: Grammars
    metrics: Metrics
    text_threads: Executor
    """Where templates and tokenizers run."""
    started_at: int
    """Unix seconds; `/v1/models` calls it `created`."""
    is_draining: bool = False
    disk: Disk | None = None
    """What outlives the process; None where nothing does."""
    traces: Traces = field(default_factory=NoTraces)
    """Where turns that have ended are told."""
    traffic: Mapping[tuple[Tier, Tier], Traffic] = field(default_factory=dict)
    """Copies between tiers so far."""
    nvme_rated_bytes_per_day: int = 0
    """0: no rating is known, or there is no such tier."""
    queue: FairQueue = field(init=False)
    """Where turns ask for their leases."""
    board: Board = field(init=False)
    """What /admin shows."""
    text_jobs: int = 0
    """Templates and tokenizers at work, or waiting for a thread."""
    conversations: Conversations = field(default_factory=Conversations)

    def __post_init__(self) -> None:
        settings = self.settings
        self.queue = FairQueue(self.manager, max_queue=settings.max_queue, step_tokens=settings.prefill_chunk_tokens)
        self.board = Board(self)
        self.metrics.watch_board(self.board)

    @property
    def book(self) -> SessionBook:
        """To look at; what changes it goes through `keeper`."""
        return self.keeper.book

    @property
    def shows_text(self) -> bool:
        """May /admin show where a prompt and its history differ?"""
        settings = self.settings
        if settings.admin_text == "auto":  # with keys, the texts are other people's
            return settings.api_keys is None and settings.api_keys_file is None
        return settings.admin_text == "always"

    @property
    def max_context(self) -> int:
        """Tokens of prompt and output together, for whom this runs."""
        most = self.manager.max_context
        return min(most, tenants.current().limits.max_context or most)

    @property
    def system_fingerprint(self) -> str:
        """Changes whenever the same tokens could mean other K/V: weights, dtype, layout, rope."""
        return f"fp_{self.model_key.hex()[:12]}"

    async def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function`, which is slow and touches no shared state, off the event loop."""
        call = functools.partial(function, *args, **kwargs)
        self.text_jobs += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self.text_threads, call)
        finally:
            self.text_jobs -= 1


def gateway_of(app: FastAPI) -> Gateway:
    """The gateway of a started app."""
    gateway = app.state.gateway
    return gateway  # type: ignore[no-any-return]
