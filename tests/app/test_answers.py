"""Answers over real sockets with a scripted engine: bytes, refusals, failures, and clients that go away."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.app.conftest import BLOCK_TOKENS, NAME, Scripted
from tests.app.live import client
from tests.app.scripted import WORDS

if TYPE_CHECKING:
    from collections.abc import Iterator

Serve = Callable[..., Scripted]
ANSWER = "".join(WORDS)
URL = "/v1/chat/completions"


def body(text: str = "hello there", **fields: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": [{"role": "user", "content": text}], **fields}


def events(text: str) -> list[Any]:
    """The data of every event, `[DONE]` as a string; fails on anything that is not `data: ...` and a blank line."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    data = [block[6:] for block in blocks]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


def turns(server: Scripted) -> dict[str, float]:
    metrics = server.server.gateway.metrics
    return {
        sample.labels["outcome"]: sample.value
        for family in metrics.turns.collect()
        for sample in family.samples
        if sample.name.endswith("_total") and sample.value
    }


def test_a_whole_answer_is_a_chat_completion(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        response = http.post(URL, json=body(session_id="a/b"))
    assert response.status_code == 200
    answer = ChatCompletion.model_validate(response.json(), strict=True)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert response.headers["x-session-id"] == "a/b"
    assert response.json()["session"]["id_source"] == "body"
    assert turns(server) == {"stop": 1}


def test_a_stream_is_chunks_of_one_completion_and_done(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        response = http.post(URL, json=body(stream=True))
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
        assert "usage" not in chunk
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert all("role" not in delta for delta in deltas[1:])
    assert "".join(delta.get("content", "") for delta in deltas) == ANSWER
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert chunks[0]["session"]["id"] == response.headers["x-session-id"]
    assert "stored_tokens" in chunks[-1]["session"]
    assert "timings" in chunks[-1]


def test_usage_comes_last_without_choices_and_only_when_asked_for(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        response = http.post(URL, json=body(stream=True, stream_options={"include_usage": True}))
    *chunks, usage, _done = events(response.text)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(WORDS) + 1


def test_a_follow_up_reuses_the_history_and_says_so(serve: Serve) -> None:
    server = serve()
    first = {"role": "user", "content": "hello there"}
    with client(server.server) as http:
        http.post(URL, json=body(session_id="a"))
        messages = [first, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "and now?"}]
        second = http.post(URL, json={"model": NAME, "messages": messages, "session_id": "a"}).json()
    session = second["session"]
    assert (session["branch"], session["turn"], session["miss_reason"]) == (0, 2, None)
    assert session["reused_tokens"]["hbm"] == second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert session["recomputed_tokens"] < BLOCK_TOKENS
    assert session["woke_from"] == "hbm"


def test_a_follow_up_without_an_id_is_known_by_its_text(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        first = http.post(URL, json=body()).json()["session"]
        assert first["id_source"] == "new"
        messages = [*body()["messages"], {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "more"}]
        second = http.post(URL, json={"model": NAME, "messages": messages}).json()["session"]
        salted = http.post(URL, json={"model": NAME, "messages": messages, "cache_salt": "other"}).json()["session"]
    assert (second["id"], second["id_source"], second["turn"]) == (first["id"], "text", 2)
    assert (salted["id_source"], salted["reused_tokens"]["hbm"]) == ("new", 0)
    assert salted["id"] != first["id"]


def test_cache_prompt_false_neither_reads_nor_keeps(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        http.post(URL, json=body(session_id="a"))
        off = http.post(URL, json=body(session_id="a", cache_prompt=False)).json()["session"]
        again = http.post(URL, json=body("something else entirely", session_id="b", cache_prompt=False)).json()[
            "session"
        ]
        later = http.post(URL, json=body("something else entirely", session_id="b")).json()["session"]
    assert (off["miss_reason"], off["reused_tokens"]["hbm"], off["stored_tokens"]) == ("cache_disabled", 0, 0)
    assert again["miss_reason"] == "cache_disabled"
    assert (later["miss_reason"], later["turn"]) == ("new_session", 1)


@pytest.mark.parametrize("fields", [{"max_tokens": 0}, {"prompt_cache_options": {"prewarm": True}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_can_be_computed_ahead_without_an_answer(serve: Serve, fields: dict[str, Any], stream: bool) -> None:
    server = serve()
    text = "a prompt of some length " * 4
    with client(server.server) as http:
        response = http.post(URL, json=body(text, session_id="a", stream=stream, **fields))
        session = http.post(URL, json=body(text, session_id="a")).json()["session"]
    last = events(response.text)[-2] if stream else response.json()
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["timings"]["predicted_n"] == 0
    assert session["reused_tokens"]["hbm"] > 0
    assert session["computed_tokens"] + session["recomputed_tokens"] <= BLOCK_TOKENS


def test_max_tokens_ends_an_answer_and_a_larger_one_is_cut_to_the_context(serve: Serve) -> None:
    server = serve(max_context=64)
    with client(server.server) as http:
        short = http.post(URL, json=body(max_tokens=2)).json()
        http.post(URL, json=body(max_completion_tokens=1_000_000))
        http.post(URL, json=body())
    assert short["choices"][0] | {"message": None} == {
        "index": 0,
        "message": None,
        "logprobs": None,
        "finish_reason": "length",
    }
    assert short["choices"][0]["message"]["content"] == "One two"
    left = [64 - len(spec.token_ids) for spec in server.engine.specs]
    assert [spec.max_new_tokens for spec in server.engine.specs] == [2, left[1], left[2]]


def test_a_prompt_that_can_never_fit_names_both_numbers(serve: Serve) -> None:
    server = serve(max_context=64)
    with client(server.server) as http:
        response = http.post(URL, json=body("long " * 100, stream=True))
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert "64" in error["message"]
    assert turns(server) == {"context_too_long": 1}


def test_a_full_queue_is_a_429_that_says_when_to_come_back(serve: Serve) -> None:
    server = serve(max_running=1, max_queue=1)
    server.pause()
    replies: list[httpx.Response] = []

    def ask() -> None:
        with client(server.server) as http:
            replies.append(http.post(URL, json=body()))

    waiting = [threading.Thread(target=ask) for _ in range(2)]
    for count, thread in enumerate(waiting, 1):
        thread.start()
        server.server.wait_until(lambda count=count: held(server) == count)  # type: ignore[misc]
    with client(server.server) as http:
        refused = http.post(URL, json=body(stream=True))
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "queue_full"
    assert int(refused.headers["retry-after"]) >= 1
    assert int(refused.headers["retry-after-ms"]) > 0
    server.go_on()
    for thread in waiting:
        thread.join()
    assert [reply.status_code for reply in replies] == [200, 200]
    assert turns(server) == {"stop": 2, "queue_full": 1}


def held(server: Scripted) -> int:
    """Turns in the store, waiting or granted; called on the server's loop."""
    counts = server.server.gateway.manager.snapshot().turns
    return counts.waiting + counts.granted


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_its_turn_runs_frees_every_slot(serve: Serve, stream: bool) -> None:
    server = serve()
    server.pause()
    with client(server.server) as http, pytest.raises(httpx.ReadTimeout):
        http.post(URL, json=body(stream=stream), timeout=httpx.Timeout(10, read=0.2))
    server.server.check_idle()
    assert turns(server) == {"cancelled": 1}
    assert server.engine.steps == 0


def test_a_client_that_leaves_a_stream_in_the_middle_frees_every_slot(serve: Serve) -> None:
    server = serve()
    server.engine.pause_after_steps = 2
    with client(server.server) as http, http.stream("POST", URL, json=body(stream=True)) as response:
        assert any(" two" in line for line in response.iter_lines())
    server.server.check_idle()
    assert turns(server) == {"cancelled": 1}
    with client(server.server) as http:
        server.go_on()
        assert http.post(URL, json=body(max_tokens=1)).json()["session"]["turn"] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_the_queue_is_forgotten_at_once(serve: Serve, stream: bool) -> None:
    server = serve(max_running=1)
    server.pause()
    with client(server.server) as http, http.stream("POST", URL, json=body(stream=True)):
        with client(server.server) as other, pytest.raises(httpx.ReadTimeout):
            other.post(URL, json=body(stream=stream), timeout=httpx.Timeout(10, read=0.2))
        server.server.wait_until(lambda: held(server) == 1)
    server.server.check_idle()
    assert turns(server) == {"cancelled": 2}


@pytest.mark.parametrize("stream", [False, True])
def test_a_step_that_fails_before_anything_was_said_is_a_500(serve: Serve, stream: bool) -> None:
    server = serve()
    server.engine.fail = "RuntimeError: secret of the inside"
    with client(server.server) as http:
        response = http.post(URL, json=body(stream=stream, session_id="a"))
        server.engine.fail = ""
        after = http.post(URL, json=body(session_id="a"))
    error = events(response.text)[-1]["error"] if stream else response.json()["error"]
    assert response.status_code == (200 if stream else 500)  # a stream began with the grant
    assert (error["code"], error["type"]) == ("turn_failed", "server_error")
    assert "secret" not in response.text
    assert after.json()["session"]["turn"] == 1


def test_a_failure_in_the_middle_of_a_stream_is_its_last_event(serve: Serve) -> None:
    server = serve()
    server.engine.fail, server.engine.fail_after_steps = "RuntimeError: no", 2
    with client(server.server) as http:
        *chunks, last = events(http.post(URL, json=body(stream=True)).text)
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks)
    assert text == "One two"
    assert last["error"]["code"] == "turn_failed"
    assert turns(server) == {"failed": 1}


def test_a_silent_stream_gets_comments_and_only_then(serve: Serve) -> None:
    server = serve(sse_keepalive_seconds=0.05)
    server.pause()
    with client(server.server) as http, http.stream("POST", URL, json=body(stream=True)) as response:
        lines = response.iter_lines()
        first = [next(lines) for _ in range(6)]
        server.go_on()
        rest = list(lines)
    assert first == [first[0], "", ": keep-alive", "", ": keep-alive", ""]
    assert "assistant" in first[0]
    assert rest[-2:] == ["data: [DONE]", ""]


def test_a_stream_that_waits_in_the_queue_is_kept_alive_and_then_answered(serve: Serve) -> None:
    server = serve(max_running=1, sse_keepalive_seconds=0.05)
    server.pause()
    with (
        client(server.server) as http,
        http.stream("POST", URL, json=body(stream=True)),
        http.stream("POST", URL, json=body(stream=True, session_id="a")) as waiting,
    ):
        lines = waiting.iter_lines()
        assert next(lines) == ": keep-alive"
        assert waiting.headers["x-session-id"] == "a"
        server.go_on()
        assert "data: [DONE]" in list(lines)


def test_two_turns_on_one_id_run_at_once_on_branches_of_their_own(serve: Serve) -> None:
    server = serve()
    server.pause()
    request = body(stream=True, session_id="a")
    with (
        client(server.server) as http,
        http.stream("POST", URL, json=request) as first,
        http.stream("POST", URL, json=request) as second,
    ):
        assert server.server.granted() == 2
        server.go_on()
        chunks = [list(json_lines(response)) for response in (first, second)]
    assert sorted(chunk[0]["session"]["branch"] for chunk in chunks) == [0, 1]
    assert turns(server) == {"stop": 2}


def json_lines(response: httpx.Response) -> Iterator[Any]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def test_sampling_parameters_reach_the_engine(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        http.post(
            URL,
            json=body(
                temperature=0.5, top_p=0, top_k=-1, min_p=0.1, repetition_penalty=1.1, seed=7, stop="END",
                min_tokens=3, ignore_eos=True, priority=-2,
            ),
        )  # fmt: skip
        http.post(URL, json=body())
        http.post(URL, json=body())
    wished, first, second = server.engine.specs
    params: Any = wished.payload
    assert (params.temperature, params.top_k, params.min_p, params.seed) == (0.5, 0, 0.1, 7)
    assert 0 < params.top_p < 1e-3
    assert (params.repetition_penalty, params.stop, params.min_tokens, params.ignore_eos) == (1.1, ("END",), 3, True)
    assert wished.priority == -2
    seeds: Any = (first.payload, second.payload)
    assert seeds[0].seed != seeds[1].seed


def test_served_names_are_listed_and_others_are_not_found(serve: Serve) -> None:
    server = serve(served_model_name=("one", "org/two"))
    with client(server.server) as http:
        listed = http.get("/v1/models").json()
        assert [model["id"] for model in listed["data"]] == ["one", "org/two"]
        assert listed["data"][0]["context_length"] == listed["data"][0]["max_model_len"] == 2048
        assert http.get("/v1/models/org/two").json()["id"] == "org/two"
        for missing in (http.get("/v1/models/three"), http.post(URL, json=body())):
            assert missing.status_code == 404
            assert missing.json()["error"]["code"] == "model_not_found"
        assert http.post(URL, json=body() | {"model": "org/two"}).json()["model"] == "org/two"


def test_a_star_takes_any_name_and_lists_the_models_own(serve: Serve) -> None:
    server = serve(served_model_name=("*",))
    with client(server.server) as http:
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == [NAME]
        assert http.post(URL, json=body() | {"model": "gpt-anything"}).json()["model"] == "gpt-anything"


def test_health_and_version_answer_get_and_head(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        assert http.get("/healthz").json() == http.get("/health").json() == {"status": "ok"}
        assert http.head("/healthz").status_code == http.head("/readyz").status_code == 200
        assert http.get("/version").json()["version"]
        assert http.get("/readyz").json() == {"status": "ready", "model": NAME}


def test_the_api_describes_itself(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        paths = http.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/models", "/v1/models/{name}", "/healthz", "/readyz", "/metrics"} <= set(paths)


def test_a_draining_server_is_not_ready_and_refuses_turns(serve: Serve) -> None:
    server = serve()
    gateway = server.server.gateway
    gateway.is_draining = True
    with client(server.server) as http:
        ready = http.get("/readyz")
    assert (ready.status_code, ready.json()["error"]["code"]) == (503, "shutting_down")
    assert "retry-after" in ready.headers


def test_metrics_count_turns_tokens_and_reuse(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        http.post(URL, json=body("hello " * 20, session_id="a"))
        http.post(URL, json=body("hello " * 20, session_id="a"))
        response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = dict(line.rsplit(" ", 1) for line in response.text.splitlines() if not line.startswith("#"))
    assert lines['dormouse_turns_total{outcome="stop"}'] == "2.0"
    assert float(lines['dormouse_reused_tokens_total{tier="hbm"}']) > 0
    assert lines['dormouse_misses_total{reason="new_session"}'] == "1.0"
    assert lines["dormouse_turns_running"] == "0.0"
    assert lines['dormouse_tier_capacity_slots{tier="hbm"}'] == "256.0"


def test_one_line_is_logged_a_turn_and_no_text(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    server = serve()
    with caplog.at_level("INFO", "dormouse.turns"), client(server.server) as http:
        http.post(URL, json=body("a secret question", session_id="a"))
    (line,) = [record for record in caplog.records if record.name == "dormouse.turns"]
    fields: Any = line.__dict__["fields"]
    assert fields["session"] == "a"
    assert fields["source"] == "body"
    assert fields["miss"] == "new_session"
    assert fields["ttft_ms"] > 0
    assert "secret" not in str(line.__dict__)
    assert "two" not in str(fields)
