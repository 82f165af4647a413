"""Going on from an answer by its id, or under a conversation: nothing is told twice, and what was said is reused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tests.app.conftest import BLOCK_TOKENS, NAME, Scripted
from tests.app.live import client
from tests.app.test_auth import ALICE, BOB, TWO, bearer
from tests.app.test_responses import FLAT, ask, post, text_of
from tests.app.test_tools import CALL, say, speak
from tests.kvstore.shelf import Shelf

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from transformers import PreTrainedTokenizerFast

    Serve = Callable[..., Scripted]

__all__ = ["say"]

LONG = "Tell me of mice, of their sleep, and of what they dream of all winter long under the old floor."


def prompts(server: Scripted) -> list[str]:
    """What the model was given, turn by turn."""
    chat = server.server.gateway.chat
    return [chat.given(spec.token_ids).text for spec in server.engine.specs]


def go_on(server: Scripted, answer: dict[str, Any], asked: Any = "And then?", **fields: Any) -> dict[str, Any]:
    return ask(server, asked, previous_response_id=answer["id"], **fields)


def reusable(answer: dict[str, Any]) -> int:
    return int((answer["usage"]["total_tokens"] - 1) // BLOCK_TOKENS * BLOCK_TOKENS)


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["input_tokens_details"]["cached_tokens"])


def refused(response: Any, status: int, param: str, code: str) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert (error["param"], error["code"]) == (param, code)


def test_a_chain_sends_only_what_is_new_and_computes_only_that(serve: Serve) -> None:
    server = serve()
    answers = [ask(server, LONG)]
    for turn in range(2, 6):
        answers.append(go_on(server, answers[-1], f"Question {turn}?"))
        session = answers[-1]["session"]
        assert (session["turn"], session["branch"]) == (turn, 0)
        assert (session["id_source"], session["miss_reason"]) == ("previous_response_id", None)
        assert cached(answers[-1]) == reusable(answers[-2])
    assert len({answer["session"]["id"] for answer in answers}) == 1
    last = prompts(server)[-1]
    assert last.count("One two three four five") == 4
    assert LONG in last
    assert answers[-1]["previous_response_id"] == answers[-2]["id"]


def test_a_chain_says_what_the_same_messages_would(serve: Serve) -> None:
    server = serve()
    first = ask(server, LONG)
    go_on(server, first, "Why?")
    told = [{"role": "user", "content": LONG}, *first["output"], {"role": "user", "content": "Why?"}]
    ask(server, told, store=False, cache_prompt=False)
    chained, whole = prompts(server)[1:]
    assert chained == whole


def test_instructions_are_this_requests_only(serve: Serve) -> None:
    server = serve()
    first = ask(
        server,
        [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": LONG}],
        instructions="Be kind.",
    )
    go_on(server, first, instructions="Be stern.")
    before, after = prompts(server)
    assert "Be kind.\n\nBe brief." in before
    assert "Be stern.\n\nBe brief." in after
    assert "Be kind." not in after


def test_the_result_of_a_call_is_all_that_must_be_sent(
    say: Callable[..., Scripted], tokenizer: PreTrainedTokenizerFast
) -> None:
    server = say(CALL)
    first = ask(server, LONG, tools=FLAT)
    (call,) = first["output"]
    speak(server, tokenizer, "It rains.")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Rain."}
    second = go_on(server, first, [result], tools=FLAT)
    assert text_of(second) == "It rains."
    assert second["session"]["miss_reason"] is None
    assert cached(second) == reusable(first)


def test_every_answer_can_be_gone_on_from_however_often_others_were(serve: Serve) -> None:
    server = serve()
    first = ask(server, LONG)
    middle = go_on(server, first, "Left?")
    other = go_on(server, first, "Right?")
    go_on(server, middle, "Further?")
    assert "Left?" in prompts(server)[-1]
    assert "Right?" not in prompts(server)[-1]
    go_on(server, other, "Further?")
    assert "Right?" in prompts(server)[-1]
    assert "Left?" not in prompts(server)[-1]


def test_several_at_once_from_one_answer_each_go_on(serve: Serve) -> None:
    server = serve()
    first = ask(server, LONG)
    server.pause()
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(go_on, server, first, f"Way {way}?") for way in range(3)]
        server.server.wait_until(lambda: server.server.gateway.manager.snapshot().turns.granted == 3)
        server.go_on()
        answers = [each.result() for each in waiting]
    assert sorted(answer["session"]["branch"] for answer in answers) == [0, 1, 2]
    for way, answer in enumerate(answers):
        further = go_on(server, answer, "Further?")
        assert further["session"]["branch"] == answer["session"]["branch"]
        assert LONG in prompts(server)[-1]
        assert [f"Way {other}?" in prompts(server)[-1] for other in range(3)] == [other == way for other in range(3)]


def test_what_was_not_stored_is_not_known(serve: Serve) -> None:
    server = serve()
    unknown = "previous_response_not_found"
    refused(post(server, previous_response_id="resp_none"), 404, "previous_response_id", unknown)
    for fields in ({"store": False}, {"cache_prompt": False}, {"session": {"persist": "none"}}):
        answer = ask(server, LONG, **fields)
        refused(post(server, previous_response_id=answer["id"]), 404, "previous_response_id", unknown)


def test_an_answer_goes_with_its_session(serve: Serve) -> None:
    server = serve()
    answer = ask(server, LONG, session_id="s")
    with client(server.server) as http:
        assert http.delete("/v1/sessions/s").status_code == 200
    refused(post(server, previous_response_id=answer["id"]), 404, "previous_response_id", "previous_response_not_found")


def test_answers_of_others_and_under_other_salts_are_unknown(serve: Serve) -> None:
    server = serve(**TWO)
    mine = ask(server, LONG, headers=bearer(ALICE))
    salted = ask(server, LONG, headers=bearer(ALICE), cache_salt="pepper")
    for key, answer, salt in (
        (BOB, mine, None),
        (ALICE, salted, None),
        (ALICE, mine, "pepper"),
        (BOB, salted, "pepper"),
    ):
        response = post(server, headers=bearer(key), previous_response_id=answer["id"], cache_salt=salt)
        refused(response, 404, "previous_response_id", "previous_response_not_found")
    assert cached(ask(server, "On?", bearer(ALICE), previous_response_id=mine["id"])) == reusable(mine)
    with client(server.server, headers=bearer(ALICE)) as http:
        conversation = http.post("/v1/conversations", json={}).json()["id"]
    refused(post(server, headers=bearer(BOB), conversation=conversation), 404, "conversation", "conversation_not_found")


def test_a_turn_of_another_dialect_between_them_does_not_lose_them(serve: Serve) -> None:
    server = serve()
    first = ask(server, LONG, session_id="s")
    messages = [
        {"role": "user", "content": LONG},
        {"role": "assistant", "content": text_of(first)},
        {"role": "user", "content": "And?"},
    ]
    with client(server.server) as http:
        chat = http.post("/v1/chat/completions", json={"model": NAME, "messages": messages, "session_id": "s"}).json()
    assert (chat["session"]["branch"], chat["session"]["turn"]) == (0, 2)
    assert cached(go_on(server, first)) >= reusable(first)


def test_a_conversation_grows_by_each_answer(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        begun = http.post("/v1/conversations", json={"metadata": {"a": "b"}}).json()
        assert (begun["object"], begun["metadata"]) == ("conversation", {"a": "b"})
        first = ask(server, LONG, conversation=begun["id"], store=False)
        second = ask(server, "And?", conversation={"id": begun["id"]})
        assert first["conversation"] == second["conversation"] == {"id": begun["id"]}
        assert (second["session"]["id"], second["session"]["id_source"]) == (begun["id"], "conversation")
        assert cached(second) == reusable(first)
        assert http.delete(f"/v1/conversations/{begun['id']}").json()["deleted"] is True
        refused(post(server, conversation=begun["id"]), 404, "conversation", "conversation_not_found")
        refused(http.delete(f"/v1/conversations/{begun['id']}"), 404, "conversation", "conversation_not_found")
        refused(http.post("/v1/conversations", json={"items": [{}]}), 400, "items", "unsupported_parameter")
    refused(post(server, conversation="conv_none"), 404, "conversation", "conversation_not_found")
    refused(post(server, [], conversation="conv_none"), 404, "conversation", "conversation_not_found")


def test_a_conversation_deleted_before_its_first_turn_is_gone(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        begun = http.post("/v1/conversations").json()
        refused(post(server, [], conversation=begun["id"]), 400, "input", "missing_required_parameter")
        assert http.delete(f"/v1/conversations/{begun['id']}").status_code == 200
    refused(post(server, conversation=begun["id"]), 404, "conversation", "conversation_not_found")


def test_answers_and_conversations_outlive_the_process(serve: Serve, tmp_path: Path) -> None:
    server = serve(shelf=lambda: Shelf(tmp_path))
    first = ask(server, LONG)
    second = go_on(server, first, "Left?")
    with client(server.server) as http:
        conversation = http.post("/v1/conversations").json()["id"]
    ask(server, "In the conversation.", conversation=conversation)
    in_memory = ask(server, "Not on disk.", session={"persist": "memory"})
    assert go_on(server, in_memory)["status"] == "completed"
    server.server.stop()
    server.server.thread.join(30)
    again = serve(shelf=lambda: Shelf(tmp_path))
    answer = go_on(again, second, "Further?")
    assert (answer["session"]["id"], answer["session"]["turn"]) == (first["session"]["id"], 3)
    assert "Left?" in prompts(again)[-1]
    go_on(again, first, "Right?")
    assert "Left?" not in prompts(again)[-1]
    ask(again, "On.", conversation=conversation)
    assert "In the conversation." in prompts(again)[-1]
    gone = post(again, previous_response_id=in_memory["id"])
    refused(gone, 404, "previous_response_id", "previous_response_not_found")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, {"type": "cache_hit"}),
        ({"tools": FLAT[:1]}, {"type": "cache_miss", "reason": "tools_changed"}),
        ({"instructions": "Be stern."}, {"type": "cache_miss", "reason": "input_changed"}),
    ],
)
def test_a_comparison_says_what_became_of_the_cache(serve: Serve, changed: Any, expected: dict[str, Any]) -> None:
    server = serve()
    first = ask(server, LONG * 3, tools=FLAT)
    options = {"comparison_response_id": first["id"]}
    answer = go_on(server, first, "Why?", prompt_cache_options=options, **{"tools": FLAT, **changed})
    told = answer["prompt_cache_diagnostics"]
    assert {name: told[name] for name in expected} == expected
    if expected["type"] == "cache_miss":
        assert told["comparison_reusable_tokens"] == reusable(first)
        assert 0 < told["cache_missed_tokens"] <= answer["usage"]["input_tokens"]
        assert cached(answer) < reusable(first)


def test_a_comparison_without_its_answer_or_its_cache_says_so(serve: Serve) -> None:
    server = serve()
    first = ask(server, LONG * 3)
    none = ask(server, "Hm?", prompt_cache_options={"comparison_response_id": "resp_none"})
    assert none["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}
    server.server.flush()
    evicted = go_on(server, first, prompt_cache_options={"comparison_response_id": first["id"]})
    assert evicted["prompt_cache_diagnostics"] == {"type": "unavailable"}
    assert evicted["session"]["miss_reason"] == "evicted"
