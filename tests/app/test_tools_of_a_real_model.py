"""A conversation with tools through the whole server, the model's ids forced: its K/V are its own."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

import openai
import pytest

from app import startup
from app.settings import Settings
from models.embedded import NAME
from tests.app.forced import Forced
from tests.app.live import Live, live
from tests.app.test_openai_client import strict, sync_client
from tests.app.test_tools import CALL
from tests.models.test_tool_templates import TOOLS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FORCED = Forced(end_id=2)


@pytest.fixture(scope="module")
def server(cache_dir: Path) -> Iterator[Live]:
    opened = functools.partial(startup.opened, choose=FORCED)
    settings = Settings(model="embedded", hbm_bytes=64 * 1024**2, cache_dir=cache_dir, drain_seconds=5)
    with live(settings, opened) as running:
        yield running


def test_calls_in_a_row_compute_only_what_is_new(server: Live) -> None:
    ids = server.gateway.chat.plain_ids(CALL)
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    with sync_client(server) as client:
        for turn in range(1, 4):
            FORCED.scripts[turn] = ids
            answer = client.chat.completions.create(
                model=NAME,
                messages=messages,
                tools=TOOLS[:1],  # type: ignore[arg-type]
                seed=turn,
                temperature=0,
            )
            strict(answer)
            (choice,) = answer.choices
            assert choice.finish_reason == "tool_calls"
            assert choice.message.tool_calls is not None
            (call,) = choice.message.tool_calls
            assert isinstance(call, openai.types.chat.ChatCompletionMessageFunctionToolCall)
            arguments = json.loads(call.function.arguments)
            assert (call.function.name, arguments) == ("get_weather", {"city": "Paris", "days": 1})
            session: dict[str, Any] = answer.model_extra["session"]  # type: ignore[index]
            if turn > 1:
                assert session["miss_reason"] is None, session
                assert session["recomputed_tokens"] < 32
                assert session["turn"] == turn
            said = choice.message.model_dump(exclude_none=True)
            said["tool_calls"][0]["function"]["arguments"] = json.dumps(arguments, sort_keys=True)
            messages += [said, {"role": "tool", "tool_call_id": call.id, "content": f"Rain {turn}."}]
    server.check_idle()


def test_an_answer_that_leaves_its_grammar_fails_and_is_not_told_as_valid(server: Live) -> None:
    FORCED.scripts[99] = server.gateway.chat.plain_ids("no number")
    with sync_client(server) as client, pytest.raises(openai.InternalServerError) as failed:
        client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "A number."}],
            seed=99,
            extra_body={"guided_regex": "[0-9]+"},
        )
    assert failed.value.code == "turn_failed"
    server.check_idle()
