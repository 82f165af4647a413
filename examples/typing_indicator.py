"""A chat that wakes its session at the first key, so that it is awake when the message is sent.

    python examples/typing_indicator.py

People type for seconds; a wake takes milliseconds. In a web page the same belongs into the handler of the text field's
first `input` event, on the way that also shows others that somebody is typing.
"""

from __future__ import annotations

import argparse
import sys
import termios
import tty
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

IDLE_SECONDS = 20.0
"""How long a typist is believed to be about to send."""


@contextmanager
def key_by_key() -> Iterator[None]:
    """The terminal gives each key at once and echoes nothing; as it was before, at the end."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def typed_line(on_first_key: Callable[[], None]) -> str | None:
    """One line, edited with backspace; None at the end of input."""
    line = ""
    while True:
        key = sys.stdin.read(1)
        if key in ("", "\x04"):
            return None
        if not line and key.isprintable():
            on_first_key()
        if key in ("\r", "\n"):
            print()
            return line
        if key in ("\x7f", "\b"):
            if line:
                line = line[:-1]
                print("\b \b", end="", flush=True)
        elif key.isprintable():
            line += key
            print(key, end="", flush=True)


class Chat:
    """One conversation over plain HTTP."""

    def __init__(self, http: httpx.Client, model: str | None) -> None:
        self._http = http
        self._model = model or http.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        self._session = f"typing-{uuid.uuid4().hex[:8]}"
        self._messages: list[dict[str, str]] = []

    def somebody_types(self) -> None:
        """Hint that a turn is coming; before the first one there is nothing to wake."""
        if self._messages:
            hint = {"hold_seconds": IDLE_SECONDS}
            told = self._http.post(f"/v1/sessions/{self._session}/wake", json=hint).json()
            print(f"\r[{told['status']}] ", end="", flush=True)

    def say(self, text: str) -> tuple[str, dict[str, Any]]:
        """The answer, and its `session` object."""
        self._messages.append({"role": "user", "content": text})
        body = {"model": self._model, "messages": self._messages, "session_id": self._session, "max_tokens": 60}
        reply = self._http.post("/v1/chat/completions", json=body).raise_for_status().json()
        answer = reply["choices"][0]["message"]["content"]
        self._messages.append({"role": "assistant", "content": answer})
        return answer, reply["session"]

    def sleep(self) -> None:
        """So that there is something to wake, however little there is to do on this machine."""
        self._http.post(f"/v1/sessions/{self._session}/sleep")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default=None, help="by default the first one served")
    parser.add_argument("--key", default="unused", help="API key, where the server asks for one")
    options = parser.parse_args()
    headers = {"authorization": f"Bearer {options.key}"}
    with httpx.Client(base_url=options.url, headers=headers, timeout=600) as http, key_by_key():
        chat = Chat(http, options.model)
        print("Type, and press Enter; Ctrl-D ends it.")
        while True:
            print("> ", end="", flush=True)
            line = typed_line(chat.somebody_types)
            if line is None:
                print()
                return
            if line:
                answer, session = chat.say(line)
                print(f"{answer}\n[woke from {session['woke_from']}, by {session['wake_trigger']}]")
                chat.sleep()


if __name__ == "__main__":
    main()
