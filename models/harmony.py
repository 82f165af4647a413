"""The answers of gpt-oss, in OpenAI's harmony format: messages on channels.

    <|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>

analysis is reasoning, commentary to a function is a call, and all else is content. The prompt ends with
`<|start|>assistant`, so an answer begins with a channel.
"""

from __future__ import annotations

import re

from models.deltas import CallArguments, CallBegins, Content, Delta, Reasoning
from models.markers import first_of, suspect
from models.output import CallNumbers

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
SPECIALS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)

_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")


class HarmonyParser:
    """See the module; an OutputParser."""

    def __init__(self) -> None:
        self._numbers = CallNumbers()
        self._text = ""
        self._header: str | None = ""  # None inside a message
        self._call: int | None = None
        self.is_reasoning = False

    def feed(self, text: str) -> list[Delta]:
        """As OutputParser's."""
        self._text += text
        deltas: list[Delta] = []
        while self._text and (self._in_header(deltas) if self._header is not None else self._in_message(deltas)):
            pass
        return deltas

    def finish(self) -> list[Delta]:
        """As OutputParser's."""
        deltas: list[Delta] = []
        if self._header is not None:
            if not any(special in self._header for special in SPECIALS):
                self._say(self._header + self._text, deltas)  # a model that forgot its channels
        else:
            self._say(self._text, deltas)
        self._text, self._header = "", ""
        return deltas

    def _in_header(self, deltas: list[Delta]) -> bool:
        assert self._header is not None
        found = first_of(self._text, (MESSAGE,))
        if found is None:
            held = suspect(self._text, (MESSAGE,))
            self._header += self._text[: len(self._text) - held]
            self._text = self._text[len(self._text) - held :]
            return False
        header = self._header + self._text[: found[0]]
        self._text = self._text[found[0] + len(MESSAGE) :]
        self._header = None
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        self.is_reasoning = channel is not None and channel[1] == "analysis" and recipient is None
        self._call = None
        if recipient is not None:
            self._call, call_id = self._numbers(recipient[1])
            deltas.append(CallBegins(self._call, call_id, recipient[1]))
        return True

    def _in_message(self, deltas: list[Delta]) -> bool:
        found = first_of(self._text, (*ENDS, START))
        if found is None:
            held = suspect(self._text, (*ENDS, START))
            self._say(self._text[: len(self._text) - held], deltas)
            self._text = self._text[len(self._text) - held :]
            return False
        place, marker = found
        self._say(self._text[:place], deltas)
        self._text = self._text[place + len(marker) :]
        self._header, self._call, self.is_reasoning = "", None, False
        return True

    def _say(self, text: str, deltas: list[Delta]) -> None:
        if not text:
            return
        if self._call is not None:
            deltas.append(CallArguments(self._call, text))
        else:
            deltas.append(Reasoning(text) if self.is_reasoning else Content(text))
