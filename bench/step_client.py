"""Streams answers and throws them away: the client side of `bench steps` and `bench gateway`, in a process of its own.

A line on stdin is a JSON object `{"host", "port", "bodies"}`; all bodies are posted at once, and once every answer has
ended a line on stdout says how many bytes and events came. Plain sockets, since every cycle that a client takes on a
machine it shares with the server would be counted as the server's. What came is looked at afterwards.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.errors import BenchFailed

MOST_BYTES = 2**16
ROOT = Path(__file__).parent.parent
CONTENT = b'"delta":{"content":'


@dataclass(frozen=True, slots=True)
class Came:
    """What all answers of a window were."""

    bytes: int
    events: int
    """With text."""


class Clients:
    """The process, as the benchmark has it."""

    def __init__(self, process: asyncio.subprocess.Process, host: str, port: int) -> None:
        self._process = process
        self._host = host
        self._port = port

    async def window(self, bodies: Sequence[dict[str, Any]]) -> Came:
        """Post all `bodies` at once; what came, once all have ended.

        Raises:
            BenchFailed: an answer was refused or cut off.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps({"host": self._host, "port": self._port, "bodies": bodies}).encode() + b"\n")
        await stdin.drain()
        reply = await stdout.readline()
        if not reply:
            raise BenchFailed("the process with the clients ended")
        told = json.loads(reply)
        if told["error"]:
            raise BenchFailed(f"a streamed answer was not whole: {told['error']}")
        return Came(int(told["bytes"]), int(told["events"]))


@asynccontextmanager
async def clients(host: str, port: int) -> AsyncIterator[Clients]:
    """The process, for as long as the block lasts."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "bench.step_client"),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for us; we end it
    )
    try:
        yield Clients(process, host, port)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def post(host: str, port: int, body: dict[str, Any]) -> bytes:
    """The whole reply to one request, as it came."""
    reader, writer = await asyncio.open_connection(host, port)
    payload = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}:{port}\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(payload)}\r\n\r\n"
    )
    writer.write(head.encode() + payload)
    pieces = []
    while piece := await reader.read(MOST_BYTES):
        pieces.append(piece)
    writer.close()
    await writer.wait_closed()
    return b"".join(pieces)


async def window(host: str, port: int, bodies: list[dict[str, Any]]) -> dict[str, object]:
    """Post all `bodies` at once; what is wrong with the first reply that did not end as it should, if any."""
    replies = await asyncio.gather(*(post(host, port, body) for body in bodies))
    broken = [reply for reply in replies if b"data: [DONE]" not in reply]
    return {
        "bytes": sum(map(len, replies)),
        "events": sum(reply.count(CONTENT) for reply in replies),
        "error": broken[0][-500:].decode(errors="replace") if broken else None,
    }


def main() -> None:
    """Serve windows until stdin ends."""
    with asyncio.Runner() as runner:
        for line in sys.stdin:
            print(json.dumps(runner.run(window(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
