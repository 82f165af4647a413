"""Errors of the store.

    StoreError
    ├── Refusal                 reaches the client, with a sentence that says what to do
    │   ├── QueueFull           429, with Retry-After
    │   ├── ContextTooLong      400 context_length_exceeded
    │   └── ShuttingDown        503, with Retry-After
    ├── TurnFailed              500: the step that computed this turn raised
    └── SettingInvalid          stops start-up and names the setting

Misses (a load that failed, came late or did not verify) are not exceptions: they degrade
to computing again and are counted by reason.
"""

from __future__ import annotations


class StoreError(Exception):
    """Root of the store's errors."""


class Refusal(StoreError):
    """The turn will not run; nothing was changed by asking."""


class QueueFull(Refusal):
    """As many turns wait as the queue admits."""

    def __init__(self, waiting: int, retry_after_seconds: float) -> None:
        super().__init__(
            f"{waiting} requests are already waiting; retry in {retry_after_seconds:.0f} s "
            f"or start the server with a larger --max-queue"
        )
        self.waiting = waiting
        self.retry_after_seconds = retry_after_seconds


class ContextTooLong(Refusal):
    """The prompt can never fit."""

    def __init__(self, prompt_tokens: int, max_context: int) -> None:
        super().__init__(
            f"this model's context holds {max_context} tokens here and the prompt has {prompt_tokens}; "
            f"shorten the messages, or raise --max-context and --hbm-bytes"
        )
        self.prompt_tokens = prompt_tokens
        self.max_context = max_context


class ShuttingDown(Refusal):
    """The server drains; another replica, or the same one after its restart, will answer."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down; retry shortly")
        self.retry_after_seconds = 5.0


class TurnFailed(StoreError):
    """The engine raised while computing this turn; the session keeps what it had before."""


class SettingInvalid(StoreError):
    """A setting cannot work; `name` is the flag to change."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name}: {problem}")
        self.name = name
