"""Logprobs of the real model, whole and streamed, and the parameters that change what is drawn."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from models.embedded import NAME
from tests.app.live import client
from tests.app.test_answers import URL, events

if TYPE_CHECKING:
    from tests.app.live import Live

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def ask(server: Live, **fields: Any) -> dict[str, Any]:
    with client(server) as http:
        response = http.post(URL, json={"model": NAME, "messages": QUESTION, "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    if fields.get("stream"):
        return {"chunks": events(response.text)[:-1]}
    body: dict[str, Any] = response.json()
    ChatCompletion.model_validate(body, strict=True)
    return body


def content(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def test_logprobs_spell_the_answer_token_by_token(fresh: Live) -> None:
    answer = ask(fresh, max_tokens=12, logprobs=True, top_logprobs=3)
    told = answer["choices"][0]["logprobs"]["content"]
    assert "".join(each["token"] for each in told) == content(answer)
    assert bytes(byte for each in told for byte in each["bytes"]).decode() == content(answer)
    for each in told:
        # Greedy: what was said is the likeliest alternative.
        assert [each["token"], each["logprob"]] == [each["top_logprobs"][0][key] for key in ("token", "logprob")]
        assert len(each["top_logprobs"]) == 3
        assert each["top_logprobs"][2]["logprob"] <= each["top_logprobs"][1]["logprob"] <= each["logprob"] <= 0


def test_streamed_logprobs_are_the_same_and_asking_changes_no_text(fresh: Live) -> None:
    whole = ask(fresh, max_tokens=12, logprobs=True, top_logprobs=2)
    chunks = ask(fresh, max_tokens=12, logprobs=True, top_logprobs=2, stream=True)["chunks"]
    told = []
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
        told += (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    assert told == whole["choices"][0]["logprobs"]["content"]
    assert content(ask(fresh, max_tokens=12)) == content(whole)


def test_logprobs_show_no_part_of_a_stop_string(fresh: Live) -> None:
    text = content(ask(fresh, max_tokens=12))
    stop = text[6:10]
    told = ask(fresh, max_tokens=12, stop=stop, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert text[: text.index(stop)].startswith("".join(each["token"] for each in told))


def test_a_bias_makes_a_token_certain_or_impossible(fresh: Live) -> None:
    first = ask(fresh, max_tokens=1, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"][0]
    said, other = (each["token"] for each in first["top_logprobs"])
    names = fresh.gateway.chat.names
    ids = {names.text(token_id): token_id for token_id in reversed(range(names.num_tokens))}
    assert content(ask(fresh, max_tokens=1, logit_bias={str(ids[said]): -100})) == other
    forced = ask(fresh, max_tokens=3, logit_bias={str(ids[other]): 100})
    assert content(forced) == other * 3
    # A penalty of 2 a time outweighs nothing here, so repetition goes on; the bias is what the answer shows.
    assert content(ask(fresh, max_tokens=3, logit_bias={str(ids[other]): 100}, frequency_penalty=2)) == other * 3


def test_penalties_keep_an_answer_from_repeating_itself(fresh: Live) -> None:
    plea: Any = [{"role": "user", "content": "Repeat the word yes: yes yes yes yes yes yes yes yes"}]
    plain = content(ask(fresh, messages=plea, max_tokens=24))
    varied = content(ask(fresh, messages=plea, max_tokens=24, frequency_penalty=2, presence_penalty=2))
    assert len(set(varied.split())) > len(set(plain.split()))


def test_a_token_id_beyond_the_vocabulary_is_refused_by_name(fresh: Live) -> None:
    with client(fresh) as http:
        response = http.post(URL, json={"model": NAME, "messages": QUESTION, "logit_bias": {"99999999": 1}})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "logit_bias")


def test_the_final_message_is_continued(fresh: Live) -> None:
    begun: Any = [*QUESTION, {"role": "assistant", "content": "The capital of France is"}]
    answer = ask(fresh, messages=begun, max_tokens=8, continue_final_message=True, session_id="go-on")
    assert "Paris" in content(answer)
    assert not content(answer).startswith("The capital of France is")
    whole = "The capital of France is" + content(answer)
    more: Any = [*QUESTION, {"role": "assistant", "content": whole}, {"role": "user", "content": "And of Spain?"}]
    session = ask(fresh, messages=more, max_tokens=4)["session"]
    assert (session["id"], session["id_source"], session["miss_reason"]) == ("go-on", "text", None)


@pytest.mark.parametrize(("effort", "status"), [("none", 200), ("medium", 200), ("high", 400)])
def test_an_effort_is_refused_where_the_template_has_no_switch_for_it(fresh: Live, effort: str, status: int) -> None:
    with client(fresh) as http:
        fields = {"model": NAME, "messages": QUESTION, "max_tokens": 1, "reasoning_effort": effort}
        response = http.post(URL, content=json.dumps(fields), headers={"content-type": "application/json"})
    assert response.status_code == status
    if status == 400:
        assert response.json()["error"]["param"] == "reasoning_effort"
