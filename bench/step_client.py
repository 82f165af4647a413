"""Streams answers and throws them away: the client side of `bench steps`, in a process of its own.

A line on stdin is a JSON object `{"host", "port", "bodies"}`; all bodies are posted at once, and once every answer has
ended a line on stdout says how many bytes came. Plain sockets, since every cycle that a client takes on a machine it
shares with the server would be counted as the server's.
"""

from __future__ import annotations

import asyncio
import json
import sys

MOST_BYTES = 2**16


async def post(host: str, port: int, body: str) -> bytes:
    """The whole reply to one request, as it came."""
    reader, writer = await asyncio.open_connection(host, port)
    payload = body.encode()
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


async def window(host: str, port: int, bodies: list[str]) -> dict[str, object]:
    """Post all `bodies` at once; what is wrong with the first reply that did not end as it should, if any."""
    replies = await asyncio.gather(*(post(host, port, body) for body in bodies))
    broken = [reply for reply in replies if b"data: [DONE]" not in reply]
    return {
        "bytes": sum(map(len, replies)),
        "error": broken[0][-500:].decode(errors="replace") if broken else None,
    }


def main() -> None:
    """Serve windows until stdin ends."""
    with asyncio.Runner() as runner:
        for line in sys.stdin:
            print(json.dumps(runner.run(window(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main()
