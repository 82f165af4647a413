"""Whatever the ids are, a stream says what the whole answer says: no half characters, no stop strings, no markers.

A tiny model is made to say ids that hypothesis chooses: words, emoji cut in their middle, calls, thoughts and parts of
their markers.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app import startup
from models import embedded
from tests.app.families import FAMILIES, save
from tests.app.forced import InOrder
from tests.app.live import Live, client, live
from tests.app.published import stream, whole
from tests.faults.server import settings as tiny_settings
from tests.models.test_tool_templates import TOOLS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

URL = "/v1/chat/completions"
FORCED = InOrder(end_id=2)

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 🌦", "days":  2}}\n</tool_call>'
PARTS = st.sampled_from(
    [
        "Dormice sleep",
        " all winter",
        "\n",
        " a<b",
        "🐿️ naïve 冬眠",
        "<think>\nHm, 🤔?\n</think>\n\n",
        "<tool_",
        "</tool_call>",
        CALL,
        f"\n{CALL}",
    ]
)
STOPS = st.lists(st.sampled_from(["winter", "sleep all", "🐿", "眠", "call>", "\n\n", "z"]), max_size=3, unique=True)


@pytest.fixture(scope="module")
def server(cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = embedded.fetch(cache_dir, progress=print)
    model = save(tmp_path_factory.mktemp("streamed") / "tiny", folder, FAMILIES["qwen3"])
    with live(tiny_settings(model, None), functools.partial(startup.opened, choose=FORCED)) as it:
        yield it
        it.check_idle()


Said = tuple[str, str, list[tuple[str, str]], str]


def said_whole(answer: dict[str, Any]) -> Said:
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return message["content"] or "", message.get("reasoning_content", ""), calls, choice["finish_reason"]


def said_streamed(chunks: list[dict[str, Any]]) -> Said:
    content, thought, calls, reason = "", "", list[list[str]](), ""
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            thought += delta.get("reasoning_content") or ""
            reason = choice["finish_reason"] or reason
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(calls):
                    calls.append([call["function"]["name"], ""])
                calls[call["index"]][1] += call["function"].get("arguments") or ""
    return content, thought, [(name, arguments) for name, arguments in calls], reason


@given(st.lists(PARTS, min_size=1, max_size=4), st.integers(0, 6), STOPS, st.booleans())
@settings(max_examples=10)  # models/test_output.py has the same without a server, and many more
def test_a_stream_says_what_the_whole_answer_says(
    server: Live, parts: list[str], cut: int, stops: list[str], has_tools: bool
) -> None:
    ids = server.gateway.chat.plain_ids("".join(parts))
    ids = ids[: len(ids) - cut] or ids[:1]
    body: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stop": stops}
    if has_tools:
        body["tools"] = TOOLS
    with client(server) as http:
        server.call(lambda: FORCED.say_next([ids, ids]))
        answer = whole(http.post(URL, json=body).text)
        streamed = http.post(URL, json={**body, "stream": True, "stream_options": {"include_usage": True}}).text
    chunks = stream(streamed, usage=True)
    content, thought, calls, reason = said_whole(answer)
    assert said_streamed(chunks) == (content, thought, calls, reason)
    assert chunks[-1]["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]
    # Half a character is never shown; ids cut in one end before it.
    assert "\ufffd" not in json.dumps([content, thought, calls], ensure_ascii=False)
    assert not any(stop in content for stop in stops)
    if has_tools:
        assert CALL not in content
    else:
        assert not calls
