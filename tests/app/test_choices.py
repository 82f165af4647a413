"""Several answers to one prompt: each its own turn, one prompt computed, one branch recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.app.conftest import BLOCK_TOKENS, Scripted
from tests.app.live import client
from tests.app.scripted import WORDS
from tests.app.test_answers import ANSWER, URL, body, events, turns

if TYPE_CHECKING:
    from kvstore.types import TurnSpec

Serve = Callable[..., Scripted]
LONG = "one two three four five six seven eight nine ten " * 6


def by_seed(spec: TurnSpec) -> list[str]:
    """Choice i of a request with seed 0 says its words from the i-th on."""
    params: Any = spec.payload
    return WORDS[params.seed % 2 :]


def test_choices_are_numbered_and_each_is_drawn_with_a_seed_of_its_own(serve: Serve) -> None:
    server = serve()
    server.engine.script = by_seed
    with client(server.server) as http:
        answer = http.post(URL, json=body(n=3, seed=0)).json()
    ChatCompletion.model_validate(answer, strict=True)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in answer["choices"]] == [ANSWER, "".join(WORDS[1:]), ANSWER]
    seeds: list[Any] = [spec.payload for spec in server.engine.specs]
    assert [params.seed for params in seeds] == [0, 1, 2]


def test_further_choices_find_the_prompts_blocks(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        answer = http.post(URL, json=body(LONG, n=4)).json()
        metrics = http.get("/metrics").text
    usage = answer["usage"]
    assert usage["completion_tokens"] == 4 * (len(WORDS) + 1)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    whole = (usage["prompt_tokens"] - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert f'dormouse_reused_tokens_total{{tier="hbm"}} {3.0 * whole}' in metrics
    assert turns(server) == {"stop": 4}


def test_the_branch_remembers_choice_0_and_nothing_of_the_others_stays_in_its_way(serve: Serve) -> None:
    server = serve()
    server.engine.script = by_seed
    messages = body(LONG)["messages"]
    with client(server.server) as http:
        first = http.post(URL, json=body(LONG, n=2, seed=0, session_id="a")).json()
        messages += [first["choices"][0]["message"], {"role": "user", "content": "more"}]
        second = http.post(URL, json={**body(), "messages": messages, "session_id": "a"}).json()["session"]
        (session,) = http.get("/v1/sessions").json()["data"]
    assert (second["turn"], second["miss_reason"], second["diverged"]) == (2, None, None)
    assert len(session["branches"]) == 1


def test_streamed_choices_say_what_whole_ones_say(serve: Serve) -> None:
    server = serve()
    server.engine.script = by_seed
    with client(server.server) as http:
        response = http.post(URL, json=body(n=3, seed=0, stream=True, stream_options={"include_usage": True}))
    *chunks, usage, done = events(response.text)
    assert done == "[DONE]"
    assert usage["usage"]["completion_tokens"] == 3 * len(WORDS) + 2
    texts, reasons, roles = ["", "", ""], [], []
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        roles += [choice["index"]] if "role" in choice["delta"] else []
        reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert texts == [ANSWER, "".join(WORDS[1:]), ANSWER]
    assert sorted(roles) == [0, 1, 2]
    assert reasons == ["stop"] * 3
    assert ["session" in chunk for chunk in (chunks[0], chunks[-1])] == [True, True]
    assert sum("timings" in chunk for chunk in chunks) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_choice_that_fails_fails_the_request_and_frees_every_slot(serve: Serve, stream: bool) -> None:
    server = serve()
    server.engine.fail, server.engine.fail_after_steps = "RuntimeError: no", 2
    with client(server.server) as http:
        response = http.post(URL, json=body(n=3, stream=stream, session_id="a"))
        server.engine.fail = ""
        again = http.post(URL, json=body(session_id="a")).json()["session"]
    error = events(response.text)[-1]["error"] if stream else response.json()["error"]
    assert error["code"] == "turn_failed"
    assert again["turn"] == 1


def test_a_client_that_leaves_stops_all_its_choices(serve: Serve) -> None:
    server = serve()
    server.engine.pause_after_steps = 3
    with client(server.server) as http, http.stream("POST", URL, json=body(n=3, stream=True)) as response:
        assert any(" two" in line for line in response.iter_lines())
    server.server.check_idle()
    assert turns(server) == {"cancelled": 3}
