"""The real server for a round of the torture, with tests.crash.points' seams: `python -m tests.crash.server PLAN`.

Lines of JSON on stdout: "open" with its address and counts once it answers, "at" where the planned point is reached.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app import log, serving, startup
from app.main import create_app
from app.settings import Settings
from kvstore.tiers.segments import SEGMENT_BYTES
from kvstore.types import Tier
from tests.crash.points import CrashingFiles, Fuse, Plan, kill_in_commits

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from app.gateway import Gateway


def tell(what: str, **facts: object) -> None:
    """In one call, so that a kill leaves whole lines."""
    os.write(1, (json.dumps({"what": what, **facts}) + "\n").encode())


def main(plan: dict[str, Any]) -> None:
    settings = Settings(**plan["settings"])
    log.set_up("warning", "pretty")
    fuse = Fuse(Plan(**plan["plan"]), lambda point: tell("at", point=point))
    kill_in_commits(fuse)
    files = CrashingFiles(fuse, Path(plan["journal"]), SEGMENT_BYTES)
    sock = serving.bind("127.0.0.1", 0)

    def opened(settings: Settings) -> AbstractAsyncContextManager[Gateway]:
        return startup.opened(settings, files=files)

    app = create_app(settings, opened)

    async def ready() -> None:
        gateway: Gateway = app.state.gateway
        gateway.manager.check()
        nvme = {}
        if gateway.disk is not None:
            counts = gateway.manager.snapshot().tier(Tier.NVME)
            nvme = {
                "capacity": counts.capacity,
                "counted": counts.free + counts.valid + counts.erasing,
                "valid": counts.valid,
                "file_bytes": gateway.disk.store.bytes_on_disk,
                "held_bytes": gateway.disk.directory.bytes_held,
            }
        tell("open", url=f"http://127.0.0.1:{sock.getsockname()[1]}", **nvme)
        fuse.is_armed = True
        loop = asyncio.get_running_loop()
        loop.call_soon(functools.partial(_watch_drain, loop, gateway, fuse))

    serving.serve(app, sock, settings, ready)


def _watch_drain(loop: asyncio.AbstractEventLoop, gateway: Gateway, fuse: Fuse) -> None:
    fuse.is_draining = gateway.is_draining
    loop.call_later(0.005, _watch_drain, loop, gateway, fuse)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
