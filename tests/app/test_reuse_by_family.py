"""Ten turns with tools, in each family's form and with thinking on and off: all is reused, or the answer says why not.

The models are tiny and random; a hook in this process has them say what the family's would. Clients send calls back in
their own spelling.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from app import startup
from models import embedded
from tests.app.families import FAMILIES, Family, save
from tests.app.forced import InOrder
from tests.app.live import Live, client, live
from tests.faults.server import settings
from tests.models.test_tool_templates import TOOLS

if TYPE_CHECKING:
    from pathlib import Path

BLOCK = 16
TURNS = 10

KEEPS: Callable[[int], bool] = lambda _turn: False  # noqa: E731
QUESTIONS: Callable[[int], bool] = lambda turn: turn % 2 == 1  # noqa: E731
EVERY: Callable[[int], bool] = lambda _turn: True  # noqa: E731

DIVERGES: dict[str, tuple[Callable[[int], bool], str]] = {
    # An empty thought opens each answer and is not told again.
    "qwen3": (EVERY, "think>\n\n</think>"),
    # A new question ends the thoughts behind the last one.
    "qwen3-thinking": (QUESTIONS, "think>"),
    "llama3": (KEEPS, ""),
    "mistral": (KEEPS, ""),
    # The tools leave the first question for the new one: nothing of any answer is where it was.
    "mistral-v3": (QUESTIONS, "AVAILABLE_TOOLS]"),
    "gemma": (KEEPS, ""),
    "gpt-oss": (KEEPS, ""),
    # A final answer ends the analysis before it, its own and those of its calls.
    "gpt-oss-thinking": (QUESTIONS, "analysis"),
}
"""In which turns the template takes back what the model said, and what the divergence shows of that."""


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    name = request.param
    folder = embedded.fetch(cache_dir, progress=print)
    model = save(tmp_path_factory.mktemp("families") / "tiny", folder, FAMILIES[name])
    forced = InOrder(end_id=2)
    with live(settings(model, None, block_tokens=BLOCK), functools.partial(startup.opened, choose=forced)) as server:
        yield name, server, forced


def say_next(server: Live, forced: InOrder, text: str) -> None:
    ids = server.gateway.chat.plain_ids(text)
    server.call(lambda: forced.say_next([ids]))


@pytest.mark.parametrize("named", [True, False], ids=["by-id", "by-text"])
def test_ten_turns_with_tools(family: tuple[str, Live, InOrder], named: bool) -> None:
    name, server, forced = family
    of: Family = FAMILIES[name]
    diverges, shows = DIVERGES[name]
    fields: dict[str, Any] = {"session_id": "ten"} if named else {}
    if name == "qwen3":
        fields["reasoning_effort"] = "none"
    messages: list[Any] = []
    history = 0
    with client(server) as http:
        for turn in range(1, TURNS + 1):
            is_question = turn % 2 == 1
            if is_question:
                messages.append({"role": "user", "content": f"What is the weather on day {turn} {named}?"})
            text = of.call(turn) + of.call_end if is_question else of.answer(turn) + of.answer_end
            say_next(server, forced, text)
            body = {"model": "tiny", "messages": messages, "tools": TOOLS, **fields}
            response = http.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            answer = response.json()
            session, prompt = answer["session"], answer["usage"]["prompt_tokens"]
            reused = sum(session["reused_tokens"].values())
            if turn > 1:
                assert session["turn"] == turn, session
                if diverges(turn):
                    assert session["miss_reason"] == "prompt_diverged", session
                    assert shows in session["diverged"]["stored"], session
                    assert reused == session["diverged_at"] // BLOCK * BLOCK
                else:
                    assert (session["miss_reason"], session["recomputed_tokens"] < BLOCK) == (None, True), session
                    assert reused >= (min(history, prompt) - 1) // BLOCK * BLOCK
            history = answer["usage"]["total_tokens"]
            messages += said(answer, turn, is_question)
    server.check_idle()


def said(answer: dict[str, Any], turn: int, is_question: bool) -> list[Any]:
    """The answer as a client sends it back that sorts keys, and what its tool found."""
    (choice,) = answer["choices"]
    message = {name: value for name, value in choice["message"].items() if value is not None}
    if not is_question:
        assert choice["finish_reason"] == "stop"
        assert message["content"].endswith("the sun shines later.")
        return [message]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = message["tool_calls"]
    found = json.loads(call["function"]["arguments"])
    assert found == {"days": turn, "city": "Paris"}
    call["function"]["arguments"] = json.dumps(dict(sorted(found.items())), separators=(",", ":"))
    return [message, {"role": "tool", "tool_call_id": call["id"], "content": f"Rain, then sun on day {turn}."}]
