"""Text completions: prompts of every form, echo, logprobs, sessions and streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from openai.types import Completion

from models import embedded
from tests.app.conftest import BLOCK_TOKENS, NAME, Scripted
from tests.app.live import client
from tests.app.scripted import WORDS
from tests.app.test_answers import ANSWER, events

if TYPE_CHECKING:
    from tests.app.live import Live

Serve = Callable[..., Scripted]
URL = "/v1/completions"


def body(prompt: Any = "Once upon a time", **fields: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": prompt, **fields}


def test_a_completion_is_one_and_its_stream_says_the_same(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        whole = http.post(URL, json=body(session_id="a"))
        streamed = http.post(URL, json=body(stream=True, stream_options={"include_usage": True}))
    answer = Completion.model_validate(whole.json(), strict=True)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (ANSWER, "stop")
    assert whole.headers["x-session-id"] == whole.json()["session"]["id"] == "a"
    *chunks, usage, done = events(streamed.text)
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == ANSWER
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert usage["usage"]["completion_tokens"] == len(WORDS) + 1
    assert "stored_tokens" in chunks[-1]["session"]


def test_a_text_that_goes_on_continues_its_session(serve: Serve) -> None:
    server = serve()
    story = "Once upon a time there was a small mouse that slept the winter through.\n" * 3
    with client(server.server) as http:
        http.post(URL, json=body(story, session_id="a"))
        session = http.post(URL, json=body(f"{story}{ANSWER} more", session_id="a")).json()["session"]
    assert (session["branch"], session["turn"], session["miss_reason"]) == (0, 2, None)
    assert session["recomputed_tokens"] < BLOCK_TOKENS


def test_prompts_may_be_several_and_may_be_token_ids(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        several = http.post(URL, json=body(["One", "Two"], n=2, echo=True)).json()
        ids = http.post(URL, json=body([1, 2, 3], echo=True)).json()
        lists = http.post(URL, json=body([[1, 2, 3], [4, 5]])).json()
    texts = [choice["text"] for choice in several["choices"]]
    assert texts == ["One" + ANSWER, "One" + ANSWER, "Two" + ANSWER, "Two" + ANSWER]
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    assert several["usage"]["prompt_tokens"] == 2
    assert ids["usage"]["prompt_tokens"] == 3
    assert ids["choices"][0]["text"].startswith("<|im_start|><|im_end|>")
    assert len(lists["choices"]) == 2
    assert [list(spec.token_ids) for spec in server.engine.specs[-2:]] == [[1, 2, 3], [4, 5]]


def test_special_tokens_in_a_prompt_count_as_such(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        http.post(URL, json=body("<|im_start|>user\nHi<|im_end|>"))
    token_ids = list(server.engine.specs[0].token_ids)
    assert (token_ids[0], token_ids[-1]) == (1, 2)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1, "two"]}, "prompt[0]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt[0][0]"),
        ({"prompt": [99_999_999]}, "prompt"),
        ({"prompt": "a\ud800"}, "prompt"),
        ({"prompt": "long " * 3000}, "prompt"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
        ({"suffix": "and so on"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": True}, "logprobs"),
    ],
)
def test_what_cannot_be_continued_is_refused_by_name(serve: Serve, fields: dict[str, Any], param: str) -> None:
    import json

    server = serve()
    content = json.dumps(body(**fields) if "prompt" not in fields else {"model": NAME, **fields})
    with client(server.server) as http:
        response = http.post(URL, content=content, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_embeddings_are_a_404_that_says_what_to_run(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        response = http.post("/v1/embeddings", json={"model": NAME, "input": "a"})
    assert response.status_code == 404
    assert "embedding model" in response.json()["error"]["message"]


def test_an_echoed_prompt_is_told_token_by_token(fresh: Live) -> None:
    ask = {"model": embedded.NAME, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 4}
    with client(fresh) as http:
        plain = http.post(URL, json=ask).json()
        told = http.post(URL, json={**ask, "echo": True, "logprobs": 2}).json()
        scored = http.post(URL, json={**ask, "echo": True, "logprobs": 0, "max_tokens": 0}).json()
        stream = events(http.post(URL, json={**ask, "echo": True, "logprobs": 2, "stream": True}).text)
    logprobs = told["choices"][0]["logprobs"]
    assert told["choices"][0]["text"] == ask["prompt"] + plain["choices"][0]["text"]
    assert "".join(logprobs["tokens"]) == told["choices"][0]["text"]
    assert logprobs["token_logprobs"][0] is None
    assert all(each <= 0 for each in logprobs["token_logprobs"][1:])
    assert logprobs["text_offset"] == [
        len("".join(logprobs["tokens"][:index])) for index in range(len(logprobs["tokens"]))
    ]
    count = told["usage"]["prompt_tokens"]
    assert scored["choices"][0]["logprobs"]["token_logprobs"] == logprobs["token_logprobs"][:count]
    assert scored["choices"][0]["text"] == ask["prompt"]
    streamed = [chunk["choices"][0] for chunk in stream if chunk != "[DONE]"]
    assert "".join(choice["text"] for choice in streamed) == told["choices"][0]["text"]
    parts = [choice["logprobs"]["token_logprobs"] for choice in streamed if choice["logprobs"]]
    assert [each for part in parts for each in part] == logprobs["token_logprobs"]
