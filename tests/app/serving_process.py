"""A server process for test_serving: app.serving round an app that needs no model.

Prints its port once it answers. `GET /` streams "one", waits for a byte on stdin or for ever, then "two".
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from app import announce, serving
from app.settings import Settings
from kvstore.errors import SettingInvalid

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        await _lifespan(receive, send)
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"one\n", "more_body": True})
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    await send({"type": "http.response.body", "body": b"two\n"})


async def _lifespan(receive: Receive, send: Send) -> None:
    await receive()
    if "refuse" in sys.argv:
        await send({"type": "lifespan.startup.failed", "message": "a long traceback"})
        raise SettingInvalid("--hbm-bytes", "holds nothing")
    if "crash" in sys.argv:
        await send({"type": "lifespan.startup.failed", "message": "a long traceback"})
        raise RuntimeError("a bug")
    if "load" in sys.argv:
        print("loading", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    await send({"type": "lifespan.startup.complete"})
    await receive()
    print("shut down", flush=True)
    await send({"type": "lifespan.shutdown.complete"})


def main() -> None:
    sock = serving.bind("127.0.0.1", 0)

    async def ready() -> None:
        print(announce.base_url(*sock.getsockname()[:2]), flush=True)

    try:
        serving.serve(app, sock, Settings(drain_seconds=30), ready)
    except SettingInvalid as exc:
        print(exc, flush=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
