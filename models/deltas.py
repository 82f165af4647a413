"""What an answer consists of, as it comes: text, reasoning, and calls of tools."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of a thought."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """Call number `index` of the answer, of the tool `name`; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A part of a call's arguments, as the model spelled their JSON."""

    index: int
    text: str


Delta = Content | Reasoning | CallBegins | CallArguments


@dataclass(slots=True)
class Call:
    """One call of a tool; `arguments` is JSON as the model spelled it."""

    id: str
    name: str
    arguments: str = ""


class Said:
    """An answer put together again from its deltas."""

    def __init__(self) -> None:
        self.content = ""
        self.reasoning = ""
        self.calls: list[Call] = []

    def add(self, delta: Delta) -> None:
        """Take what comes next."""
        match delta:
            case Content(text):
                self.content += text
            case Reasoning(text):
                self.reasoning += text
            case CallBegins(_, call_id, name):
                self.calls.append(Call(call_id, name))
            case CallArguments(index, text):
                self.calls[index].arguments += text
