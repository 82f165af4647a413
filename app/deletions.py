"""What `DELETE /v1/sessions/{id}` does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.errors import SessionUnknown

if TYPE_CHECKING:
    from app.gateway import Gateway


async def delete_session(gateway: Gateway, scope: str, session_id: str) -> dict[str, object]:
    """Forget a session; returns when no file has it any more, unless that takes too long.

    Raises:
        SessionUnknown: nobody knows it.
    """
    session = gateway.book.get(scope, session_id)
    if session is not None:
        gateway.hints.withdraw(session)
    if not gateway.keeper.forget(scope, session_id):
        raise SessionUnknown(session_id)
    await settle(gateway)
    return {"id": session_id, "object": "session.deleted", "deleted": True}


async def settle(gateway: Gateway) -> None:
    """What was deleted leaves the disk before it is answered, unless that takes too long."""
    if await gateway.keeper.settled() and gateway.disk is not None:
        await gateway.disk.sweep_others()
