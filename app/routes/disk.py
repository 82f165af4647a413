"""`/admin/api/store`: what lies on disk, for `dormouse store` where this server holds the directory."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import JSONResponse, Response

from app import disk
from app.errors import InvalidRequest
from app.gateway import Gateway, gateway_of
from app.raw_paths import RawPathRoute, decoded
from kvstore import catalog_reading as reading

if TYPE_CHECKING:
    from app.disk import Disk

router = APIRouter(prefix="/admin/api/store", route_class=RawPathRoute, include_in_schema=False)

MOST_LISTED = 10_000


class Keeping:
    """The gateway and its disk."""

    def __init__(self, request: Request) -> None:
        self.gateway: Gateway = gateway_of(request.app)
        if self.gateway.disk is None:
            raise InvalidRequest("this server keeps nothing on disk (--nvme-bytes 0)", "nvme_bytes", "invalid_value")
        self.disk: Disk = self.gateway.disk


AnyKeeping = Annotated[Keeping, Depends()]


@router.get("")
async def look(kept: AnyKeeping) -> Response:
    """Folders and sessions, the latest first."""
    where = kept.disk
    return JSONResponse(asdict(await where.run(lambda: disk.report(where.directory, where.catalog.path, MOST_LISTED))))


@router.post("/verify")
async def verify(kept: AnyKeeping) -> Response:
    """Read everything and say what is not as it was written; turns go on meanwhile."""
    where, served = kept.disk, (kept.disk.folder, kept.disk.store)
    verdict = await where.run(lambda: disk.verify(where.directory, where.catalog.path, served))
    return JSONResponse(verdict.as_json())


@router.post("/gc")
async def collect(kept: AnyKeeping) -> Response:
    """Erase what no session has, in the folders of other models; in the served one nothing is ever left over."""
    return JSONResponse({"erased": await kept.disk.collect_others()})


@router.delete("/sessions/{session_id}")
async def remove(session_id: str, kept: AnyKeeping) -> Response:
    """Forget an id, whosever and whichever model's it is."""
    where, name = kept.disk, decoded(session_id)
    count, scopes = await where.run(lambda: _found(where, name))
    kept.gateway.keeper.forget_everywhere(name, scopes)
    return await _removed(kept, count)


@router.delete("/sessions")
async def remove_all(kept: AnyKeeping) -> Response:
    """Forget every session of every model."""
    where = kept.disk
    count, scopes = await where.run(lambda: _found(where))
    await kept.gateway.keeper.forget_all_everywhere(scopes)
    return await _removed(kept, count)


def _found(where: Disk, session_id: str | None = None) -> tuple[int, list[str]]:
    """How many sessions the file has by that id, or of any; and whose there are."""
    return len(reading.serials(where.catalog.path, session_id)), reading.tenants(where.catalog.path)


async def _removed(kept: Keeping, count: int) -> Response:
    is_settled = await kept.gateway.keeper.settled()
    await kept.disk.sweep_others()
    return JSONResponse({"removed": count, "settled": is_settled})
