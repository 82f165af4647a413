"""The output items of a response, and the events that tell of them while they grow.

    reasoning       added, content_part.added, reasoning_text.delta ..., .done, content_part.done, item done
    message         added, content_part.added, output_text.delta ..., .done, content_part.done, item done
    function_call   added, function_call_arguments.delta ..., .done, item done

One item grows at a time: what is of another kind closes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from app.response_ids import call_id, item_id
from app.response_items import sealed
from models.deltas import CallArguments, CallBegins, Content, Delta, Reasoning

if TYPE_CHECKING:
    from collections.abc import Iterator

Event = dict[str, Any]
Item = dict[str, Any]
Logprobs = list[dict[str, object]]

TEXT = "output_text"
THOUGHT = "reasoning_text"
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class Output:
    """Grows by deltas. With `seals_thoughts` thoughts are told twice: some clients keep the sealed one only."""

    def __init__(self, response_id: str, *, seals_thoughts: bool = False) -> None:
        self.items: list[Item] = []
        self._response_id = response_id
        self._seals_thoughts = seals_thoughts
        self._num_calls = 0
        self._is_open = False

    def take(self, delta: Delta, logprobs: Logprobs) -> Iterator[Event]:
        """What a delta adds; `logprobs` are of its tokens."""
        match delta:
            case Content(text):
                yield from self._grow("message", TEXT, text, logprobs)
            case Reasoning(text):
                yield from self._grow("reasoning", THOUGHT, text, [])
            case CallBegins(_, given_id, name):
                yield from self._close("completed")
                called = call_id(self._response_id, self._num_calls, given_id)
                self._num_calls += 1
                yield self._open("function_call", {"call_id": called, "name": name, "arguments": ""})
            case CallArguments(_, text):
                item = self.items[-1]
                assert item["type"] == "function_call"
                item["arguments"] += text
                yield self._event("function_call_arguments.delta", delta=text)

    def finish(self, status: str, logprobs: Logprobs, *, may_be_empty: bool = False) -> Iterator[Event]:
        """No more comes; an answer of nothing is a message without text, which clients expect rather than no item."""
        if not self.items and not may_be_empty:
            yield from self._grow("message", TEXT, "", [])
        if self.items and self.items[-1]["type"] == "message" and self._is_open:
            self.items[-1]["content"][0]["logprobs"] += logprobs
        yield from self._close(status)

    def _grow(self, kind: str, part: str, text: str, logprobs: Logprobs) -> Iterator[Event]:
        if not self._is_open or self.items[-1]["type"] != kind:
            yield from self._close("completed")
            yield from self._begin(kind, part)
        content = self.items[-1]["content"][0]
        content["text"] += text
        if part == TEXT:
            content["logprobs"] += logprobs
        if text:
            told = {"logprobs": logprobs} if part == TEXT else {}
            yield self._event(f"{part}.delta", content_index=0, delta=text, **told)

    def _begin(self, kind: str, part: str) -> Iterator[Event]:
        fields: Item = {"role": "assistant", "content": []} if kind == "message" else {"summary": [], "content": []}
        yield self._open(kind, fields)
        content: Item = {"type": part, "text": ""}
        if part == TEXT:
            content |= {"annotations": [], "logprobs": []}
        self.items[-1]["content"] = [content]
        yield self._event("content_part.added", content_index=0, part=_copy(content))

    def _open(self, kind: str, fields: Item) -> Event:
        ident = item_id(self._response_id, PREFIXES[kind], len(self.items))
        self.items.append({"id": ident, "type": kind, "status": "in_progress", **fields})
        self._is_open = True
        return self._item_event("output_item.added")

    def _close(self, status: str) -> Iterator[Event]:
        if not self._is_open:
            return
        item = self.items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            yield self._event("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            (part,) = item["content"]
            told = {"logprobs": list(part["logprobs"])} if part["type"] == TEXT else {}
            yield self._event(f"{part['type']}.done", content_index=0, text=part["text"], **told)
            yield self._event("content_part.done", content_index=0, part=_copy(part))
        if item["type"] == "reasoning" and self._seals_thoughts:
            item["encrypted_content"] = sealed(part["text"])
        self._is_open = False
        yield self._item_event("output_item.done")

    def _event(self, kind: str, **fields: object) -> Event:
        index = len(self.items) - 1
        return {"type": f"response.{kind}", "item_id": self.items[-1]["id"], "output_index": index, **fields}

    def _item_event(self, kind: str) -> Event:
        item = self.items[-1]
        copied = {**item, "content": [_copy(part) for part in item["content"]]} if "content" in item else dict(item)
        return {"type": f"response.{kind}", "output_index": len(self.items) - 1, "item": copied}


def _copy(part: Item) -> Item:
    """As it is now: events are written after more has come."""
    return {**part, "logprobs": list(part["logprobs"])} if "logprobs" in part else dict(part)
