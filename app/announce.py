"""What the server says of itself when it starts: the settings that were given, then a line to copy once it answers."""

from __future__ import annotations

import gc
import json
import logging
import sys
from typing import TYPE_CHECKING

from app import config_view, disk_address
from app.configuration import CLIENT_KEY_VARIABLE, Source
from app.doors import ANY, is_loopback_name
from app.gateway import gateway_of
from dormouse_gateway import __version__

if TYPE_CHECKING:
    import socket

    from fastapi import FastAPI

    from app.configuration import Configuration
    from app.settings import Settings

log = logging.getLogger("dormouse")


def settings(configuration: Configuration, asks_for_key: bool = False) -> None:
    """Log every setting that is not its default, and which doors are open; `dormouse config` shows them all."""
    given = {
        field: config_view.plain(configuration, field)
        for field, origin in configuration.origins.items()
        if origin.source is not Source.DEFAULT
    }
    log.info("dormouse %s starts", __version__, extra={"fields": given})
    if configuration.settings.log_prompts:
        log.warning("the text of prompts and answers goes into this log: --log-prompts")
    host, origins = configuration.settings.host, configuration.settings.cors_origin
    if not asks_for_key and not is_loopback_name(host):
        log.warning("whoever reaches %s can use this server: it asks for no key", host)
    if not asks_for_key and ANY in origins:
        log.warning("any web page open in a browser on this machine can use this server: --cors-origin '*' and no key")


async def ready(app: FastAPI, sock: socket.socket, settings: Settings, asks_for_key: bool = False) -> None:
    """Say where the server answers; for people, with commands that work as they stand."""
    # What start-up made stays: a collector that looked through a hundred thousand restored sessions again and again
    # would stop every stream for most of a second.
    gc.freeze()
    url = base_url(*sock.getsockname()[:2])
    model = gateway_of(app).names.first
    log.info("ready", extra={"fields": {"url": url, "model": model}})
    if (disk := gateway_of(app).disk) is not None:
        disk_address.tell(disk.directory.root, url, app.state.process_key)
    if settings.log_format == "pretty":
        print(hello(url, model, asks_for_key), file=sys.stderr, flush=True)


def base_url(host: str, port: int) -> str:
    """Where a client on this machine finds the server; a wildcard address is reached by loopback."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def hello(url: str, model: str, asks_for_key: bool = False) -> str:
    """The first words; where keys are asked for, the commands take one from the variable that `dormouse chat` reads."""
    # Bounded, since a small model may ramble, and a reply that is not streamed shows nothing until its end.
    messages = [{"role": "user", "content": "Who are you?"}]
    body = json.dumps({"model": model, "messages": messages, "max_tokens": 60})
    key = f' -H "Authorization: Bearer ${CLIENT_KEY_VARIABLE}"' if asks_for_key else ""
    return f"""
  Dormouse answers at {url}/v1 as {model}. Try

    curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'

  or, in another terminal, `dormouse chat{"" if url.endswith(":8000") else f" --url {url}"}`; Ctrl-C stops the server.
"""
