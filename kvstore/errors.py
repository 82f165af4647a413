"""Errors of the store.

    StoreError
    ├── Refusal                 reaches the client, with a sentence that says what to do
    │   ├── QueueFull           429, with Retry-After
    │   ├── ContextTooLong      400 context_length_exceeded
    │   ├── ShuttingDown        503, with Retry-After
    │   ├── SessionUnknown      404 session_not_found
    │   ├── SessionTaken        409 session_exists
    │   └── SessionEmpty        409 session_empty
    ├── TurnFailed              500: the step that computed this turn raised
    └── SettingInvalid          stops start-up and names the setting

Misses (a load that failed, came late or did not verify) are not exceptions: they degrade
to computing again and are counted by reason.
"""

from __future__ import annotations


class StoreError(Exception):
    """Root of the store's errors."""


class Refusal(StoreError):
    """What was asked will not be done; nothing was changed by asking."""


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
            f"this model's maximum context length is {max_context} tokens here, and the prompt has {prompt_tokens}; "
            f"shorten the messages, or raise --max-context and --hbm-bytes"
        )
        self.prompt_tokens = prompt_tokens
        self.max_context = max_context


class ShuttingDown(Refusal):
    """The server drains; another replica, or the same one after its restart, will answer."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down; retry shortly")
        self.retry_after_seconds = 5.0


class SessionUnknown(Refusal):
    """There is no such session, or no such branch of it, for this caller."""

    def __init__(self, session_id: str, branch: int | None = None) -> None:
        what = f"session {session_id!r}" if branch is None else f"branch {branch} of session {session_id!r}"
        super().__init__(f"There is no {what} here; it may have expired, been deleted, or never existed.")
        self.session_id = session_id
        self.branch = branch


class SessionTaken(Refusal):
    """The id that a new session was to have is one already."""

    def __init__(self, session_id: str) -> None:
        super().__init__(f"Session {session_id!r} exists already; choose another id, or leave it out to be given one.")
        self.session_id = session_id


class SessionEmpty(Refusal):
    """No turn of the session has completed, so there is nothing to go on from."""

    def __init__(self, session_id: str) -> None:
        super().__init__(f"No turn of session {session_id!r} has completed yet; retry when one has.")
        self.session_id = session_id


class TurnFailed(StoreError):
    """The engine raised while computing this turn; the session keeps what it had before."""


class SettingInvalid(StoreError):
    """A setting cannot work; `name` is the flag to change."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name}: {problem}")
        self.name = name
