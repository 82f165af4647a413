"""Log lines for people or for machines, on stderr.

Records may carry `extra={"fields": {...}}`: pairs that the pretty form spells as key=value and the JSON form as keys.
Text of prompts and answers goes into neither, unless `--log-prompts` asks for it.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from typing import Literal

QUIET = ("httpx", "httpcore", "asyncio", "urllib3", "filelock", "huggingface_hub")
"""Libraries whose INFO says nothing to who runs this server."""


def set_up(level: str, form: Literal["pretty", "json"]) -> None:
    """Send every record of the process to stderr in one form; replaces what was set up before."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else PrettyLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True
    # One line a turn says more than one a request; connections and their ends stay visible at debug.
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING if level != "debug" else logging.INFO)


def fields_of(record: logging.LogRecord) -> Mapping[str, object]:
    """The pairs a record carries, if any."""
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, Mapping) else {}


class PrettyLines(logging.Formatter):
    """`12:00:01 INFO  dormouse.turns turn session=a prompt=12`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line itself; exceptions follow it."""
        pairs = " ".join(f"{name}={_spelled(value)}" for name, value in fields_of(record).items())
        line = super().formatMessage(record)
        return f"{line} {pairs}" if pairs else line


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, then the record's own pairs."""

    def format(self, record: logging.LogRecord) -> str:
        """The object; an exception is its `exception`."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def _spelled(value: object) -> str:
    if value is None:
        return "-"
    text = f"{value:.1f}" if isinstance(value, float) else str(value)
    return json.dumps(text, ensure_ascii=False) if any(c in text for c in ' "=\n') else text
