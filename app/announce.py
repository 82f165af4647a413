"""What the server says of itself when it starts: the settings that were given, then a line to copy once it answers."""

from __future__ import annotations

import ipaddress
import json
import logging
import sys
from typing import TYPE_CHECKING

from app import config_view, disk_address
from app.configuration import Source
from app.gateway import gateway_of
from dormouse_gateway import __version__

if TYPE_CHECKING:
    import socket

    from fastapi import FastAPI
    from starlette.types import ASGIApp

    from app.configuration import Configuration
    from app.settings import Settings

log = logging.getLogger("dormouse")


def settings(configuration: Configuration) -> None:
    """Log every setting that is not its default; `dormouse config` shows them all."""
    given = {
        field: config_view.plain(configuration, field)
        for field, origin in configuration.origins.items()
        if origin.source is not Source.DEFAULT
    }
    log.info("dormouse %s starts", __version__, extra={"fields": given})
    host = configuration.settings.host
    if not is_loopback(host):
        log.warning("whoever reaches %s can use this server: it asks for no key", host)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`; a name other than localhost is taken for one that others can."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def ready(app: FastAPI, sock: socket.socket, settings: Settings) -> None:
    """Say where the server answers; for people, with commands that work as they stand."""
    url = base_url(*sock.getsockname()[:2])
    model = await _first_model(app)
    log.info("ready", extra={"fields": {"url": url, "model": model}})
    if (disk := gateway_of(app).disk) is not None:
        disk_address.tell(disk.directory.root, url)
    if settings.log_format == "pretty":
        print(hello(url, model), file=sys.stderr, flush=True)


def base_url(host: str, port: int) -> str:
    """Where a client on this machine finds the server; a wildcard address is reached by loopback."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def hello(url: str, model: str) -> str:
    # Bounded, since a small model may ramble, and a reply that is not streamed shows nothing until its end.
    messages = [{"role": "user", "content": "Who are you?"}]
    body = json.dumps({"model": model, "messages": messages, "max_tokens": 60})
    return f"""
  Dormouse answers at {url}/v1 as {model}. Try

    curl {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'

  or, in another terminal, `dormouse chat{"" if url.endswith(":8000") else f" --url {url}"}`; Ctrl-C stops the server.
"""


async def _first_model(app: ASGIApp) -> str:
    """The first name that requests may ask for: asked of the app itself, so that the line printed is one that works."""
    import httpx

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://dormouse") as client:
        reply = await client.get("/v1/models")
        return str(reply.raise_for_status().json()["data"][0]["id"])
