"""Who asks. Each API key is a tenant: sessions, K/V, budgets and a share of the queue of its own.

The tenant of a request is set once, by auth.py, before anything reads its body, and everything that runs for the
request finds it here: routes, turns, and tasks that they start. A context variable, because there is no dialect and
no route that may forget to hand it on; what runs for no request runs for NOBODY, whose sessions no key can meet.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

from app.budgets import Budget


@dataclass(frozen=True, slots=True)
class Limits:
    """What one key may have. Rates are in its budget; 0 is no limit."""

    max_context: int = 0
    max_running: int = 0
    max_waiting: int = 0
    is_alone: bool = False
    """There is no other key to leave room for."""


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True, eq=False)
class Tenant:
    """A key's owner; `name` is part of its namespace, so renaming it forgets what it had."""

    name: str
    limits: Limits = NO_LIMITS
    budget: Budget = field(default_factory=Budget)

    @property
    def is_nobody(self) -> bool:
        """There are no keys: everyone is one and the same."""
        return not self.name


NOBODY = Tenant("")

_current: ContextVar[Tenant] = ContextVar("tenant", default=NOBODY)


def current() -> Tenant:
    """The tenant for whom this runs."""
    return _current.get()


def enter(tenant: Tenant) -> None:
    """Everything from here on in this task runs for `tenant`.

    Said for every request anew, with NOBODY where there are no keys: a connection that is kept alive may run its next
    request in the context of the last (cpython #140947).
    """
    _current.set(tenant)
