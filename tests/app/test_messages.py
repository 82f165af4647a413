"""`/v1/messages` over real sockets with a scripted engine: bodies, events, tools, thoughts, and what is reused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from models.chat import ChatTemplate
from tests.app.anthropic_http import URL, ask, body, events, post, put_together, streamed
from tests.app.conftest import BLOCK_TOKENS, NAME, Scripted
from tests.app.live import client
from tests.app.scripted import WORDS
from tests.app.test_tools import CALL, CALLS, speak
from tests.models.test_tool_templates import ARGUMENTS, QWEN, TOOLS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Serve = Callable[..., Scripted]
Say = Callable[..., Scripted]
ANSWER = "".join(WORDS)
ASK: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
FUNCTIONS: list[Any] = [tool["function"] for tool in TOOLS]
USABLE = [
    {"name": each["name"], "description": each.get("description", ""), "input_schema": each["parameters"]}
    for each in FUNCTIONS
]


@pytest.fixture
def say(serve: Serve, tokenizer: PreTrainedTokenizerFast) -> Say:
    """A server whose model says a text, token by token; `template` is its chat template."""

    def start(text: str, template: str | None = None) -> Scripted:
        server = serve()
        speak(server, tokenizer, text)
        if template is not None:
            other = copy.deepcopy(tokenizer)
            other.chat_template = template
            server.server.gateway.chat = ChatTemplate(other)
        return server

    return start


def told(answer: dict[str, Any]) -> dict[str, Any]:
    """What must be the same whole and streamed: all but ids and times."""
    blocks = [{name: value for name, value in block.items() if name != "id"} for block in answer["content"]]
    return {"content": blocks, "stop": (answer["stop_reason"], answer["stop_sequence"]), "model": answer["model"]}


def test_a_whole_answer_is_a_message(serve: Serve) -> None:
    server = serve()
    response = post(server, session_id="a/b")
    answer = ask(server)
    assert answer["content"] == [{"type": "text", "text": ANSWER}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    assert (answer["model"], answer["role"], answer["type"]) == (NAME, "assistant", "message")
    assert answer["id"].startswith("msg_")
    assert answer["session"]["miss_reason"] == "new_session"
    assert answer["timings"]["predicted_n"] == answer["usage"]["output_tokens"] == len(WORDS) + 1
    assert response.headers["x-session-id"] == "a/b"
    assert response.headers["request-id"] == response.headers["x-request-id"]


def test_a_stream_is_named_events_and_makes_the_same_message(serve: Serve) -> None:
    server = serve()
    kinds = [event["type"] for event in streamed(server)]
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * len(WORDS),
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    server.server.flush()
    whole, made = ask(server, "once more"), put_together(streamed(server, "once again"))
    assert told(made) == told(whole)
    assert made["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert "stored_tokens" in made["session"]


def test_a_ping_follows_the_start_of_a_message(serve: Serve) -> None:
    text = post(serve(), stream=True).text
    assert text.split("\n\n")[1] == 'event: ping\ndata: {"type":"ping"}'


def test_a_stream_that_is_silent_for_long_is_kept_alive_by_pings(serve: Serve) -> None:
    server = serve(sse_keepalive_seconds=0.02)
    server.pause()
    with client(server.server) as http, http.stream("POST", URL, json=body(stream=True)) as response:
        lines = response.iter_lines()
        pings = (line for line in lines if line == "event: ping")
        assert [next(pings) for _ in range(3)]  # the first of them comes with the message's start
        server.go_on()
        rest = "\n".join(lines)
    assert "event: message_stop" in rest


def test_the_three_numbers_of_input_tokens_are_the_prompt(serve: Serve) -> None:
    server = serve()
    first = ask(server, "hello there " * 30, session_id="a")
    more = [*body("hello there " * 30)["messages"], {"role": "assistant", "content": first["content"]}]
    second = ask(server, [*more, {"role": "user", "content": "and now? " * 30}], session_id="a")
    counted = post(server, path=f"{URL}/count_tokens", messages="hello there " * 30).json()
    for answer in (first, second):
        usage, timings = answer["usage"], answer["timings"]
        assert usage["cache_read_input_tokens"] == timings["cache_n"]
        assert usage["input_tokens"] + usage["cache_creation_input_tokens"] == timings["prompt_n"]
        assert usage["input_tokens"] < BLOCK_TOKENS
    assert first["timings"]["prompt_n"] == counted["input_tokens"]
    assert second["usage"]["cache_read_input_tokens"] >= counted["input_tokens"] // BLOCK_TOKENS * BLOCK_TOKENS
    assert (second["session"]["turn"], second["session"]["miss_reason"]) == (2, None)
    start = put_together(streamed(server, "something else " * 20, cache_prompt=False))["usage"]
    assert (start["cache_read_input_tokens"], start["cache_creation_input_tokens"]) == (0, 0)


def test_the_limit_that_ended_an_answer_is_named(serve: Serve) -> None:
    server = serve(max_context=64)
    assert ask(server, max_tokens=2)["stop_reason"] == "max_tokens"
    server.engine.script = lambda _spec: WORDS * 20
    assert ask(server, max_tokens=1000)["stop_reason"] == "model_context_window_exceeded"


def test_no_tokens_at_all_prewarm_the_prompt(serve: Serve) -> None:
    answer = ask(serve(), max_tokens=0)
    assert (answer["content"], answer["usage"]["output_tokens"]) == ([], 0)
    assert answer["stop_reason"] == "max_tokens"


# --- tools and thoughts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [None, QWEN], ids=["described", "native"])
def test_calls_are_blocks_whole_and_streamed_alike(say: Say, template: str | None) -> None:
    server = say(CALLS, template)
    whole = ask(server, ASK, tools=USABLE)
    text, weather, time = whole["content"]
    assert text == {"type": "text", "text": "Let me look."}
    assert (weather["name"], weather["input"]) == ("get_weather", json.loads(ARGUMENTS))
    assert (time["name"], time["input"]) == ("get_time", {})
    assert whole["stop_reason"] == "tool_use"
    parts = streamed(server, ASK, tools=USABLE)
    assert told(put_together(parts)) == told(whole)
    assert sum(event.get("delta", {}).get("type") == "input_json_delta" for event in parts) > 4


@pytest.mark.parametrize("template", [None, QWEN], ids=["described", "native"])
@pytest.mark.parametrize("named", [True, False], ids=["by-id", "by-text"])
def test_the_next_turn_reuses_the_call_that_the_client_sends_back(
    say: Say, tokenizer: PreTrainedTokenizerFast, template: str | None, named: bool
) -> None:
    server = say(CALL, template)
    fields: dict[str, Any] = {"tools": USABLE, **({"session_id": "a"} if named else {})}
    first = ask(server, ASK, **fields)
    (call,) = first["content"]
    call["input"] = dict(sorted(call["input"].items(), reverse=True))
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "Rain."}]}
    messages = [*ASK, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    speak(server, tokenizer, "It rains.")
    second = ask(server, messages, **fields)
    session = second["session"]
    assert (session["turn"], session["miss_reason"], session["diverged"]) == (2, None, None)
    assert session["recomputed_tokens"] < BLOCK_TOKENS
    assert session["id_source"] == ("body" if named else "text")
    assert second["content"] == [{"type": "text", "text": "It rains."}]
    more = [*messages, {"role": "assistant", "content": second["content"]}, {"role": "user", "content": "Thanks."}]
    assert ask(server, more, **fields)["session"]["miss_reason"] is None


def test_without_a_choice_to_call_the_answer_is_text(say: Say) -> None:
    answer = ask(say(CALL), ASK, tools=USABLE, tool_choice={"type": "none"})
    assert (answer["content"], answer["stop_reason"]) == ([{"type": "text", "text": CALL}], "end_turn")


def test_without_parallel_use_one_call_is_told(say: Say) -> None:
    server = say(CALLS)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    whole = ask(server, ASK, tools=USABLE, tool_choice=choice)
    assert [block["type"] for block in whole["content"]] == ["text", "tool_use"]
    assert told(put_together(streamed(server, ASK, tools=USABLE, tool_choice=choice))) == told(whole)


def test_a_call_cut_off_by_the_limit_has_what_is_there_of_its_input(say: Say) -> None:
    answer = ask(say(CALL), ASK, tools=USABLE, max_tokens=24)
    (call,) = answer["content"]
    assert answer["stop_reason"] == "max_tokens"
    assert call["input"].items() <= json.loads(ARGUMENTS).items()


def test_a_line_break_within_an_argument_is_json_in_the_stream(say: Say) -> None:
    server = say('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa\nris"}}\n</tool_call>')
    whole = ask(server, ASK, tools=USABLE)
    assert whole["content"][0]["input"] == {"city": "Pa\nris"}
    assert told(put_together(streamed(server, ASK, tools=USABLE))) == told(whole)


def test_thoughts_are_blocks_of_their_own_and_counted(say: Say) -> None:
    server = say("<think>\nHm, what now?\n</think>\n\nRain.", QWEN)
    whole = ask(server, ASK, thinking={"type": "enabled", "budget_tokens": 1024})
    thought, text = whole["content"]
    assert (thought["type"], thought["thinking"], text["text"]) == ("thinking", "Hm, what now?", "Rain.")
    assert thought["signature"]
    assert 5 <= whole["usage"]["output_tokens_details"]["thinking_tokens"] < whole["usage"]["output_tokens"]
    made = put_together(streamed(server, ASK, thinking={"type": "enabled", "budget_tokens": 1024}))
    assert told(made) == told(whole)


def test_thoughts_and_a_call_within_one_turn_are_reused_when_the_client_returns_both(
    say: Say, tokenizer: PreTrainedTokenizerFast
) -> None:
    server = say(f"<think>\nI must look.\n</think>\n\n{CALL}", QWEN)
    fields: Any = {"tools": USABLE, "session_id": "a", "thinking": {"type": "adaptive"}}
    first = ask(server, ASK, **fields)
    assert [block["type"] for block in first["content"]] == ["thinking", "tool_use"]
    result = {"type": "tool_result", "tool_use_id": first["content"][1]["id"], "content": "Rain."}
    messages = [*ASK, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    speak(server, tokenizer, "Rain.")
    assert ask(server, messages, **fields)["session"]["miss_reason"] is None


@pytest.mark.parametrize(
    ("thinking", "is_on"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "enabled", "budget_tokens": 2000}, True),
        ({"type": "adaptive"}, True),
    ],
)
def test_thinking_is_what_the_templates_switch_makes_of_it(
    say: Say, thinking: dict[str, Any] | None, is_on: bool
) -> None:
    switch = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    server = say("Rain.", QWEN + switch)
    fields = {} if thinking is None else {"thinking": thinking}
    ask(server, ASK, **fields)
    (spec,) = server.engine.specs
    prompt = server.server.gateway.chat.given(spec.token_ids).text
    assert ("<think>\n\n</think>" not in prompt) == is_on


def test_an_effort_is_no_error_where_the_model_has_no_switch(serve: Serve) -> None:
    thinking = {"type": "enabled", "budget_tokens": 9000, "display": "omitted"}
    ask(serve(), thinking=thinking, output_config={"effort": "max"})


# --- what makes the prompt ------------------------------------------------------------------------------------------


def prompt_of(server: Scripted, messages: Any, **fields: Any) -> str:
    ask(server, messages, **fields)
    return server.server.gateway.chat.given(server.engine.specs[-1].token_ids).text


def test_a_last_assistants_message_is_continued(serve: Serve) -> None:
    server = serve()
    prompt = prompt_of(server, [*ASK, {"role": "assistant", "content": "It is"}])
    assert prompt.endswith("<|im_start|>assistant\nIt is")
    assert prompt_of(server, [*ASK, {"role": "assistant", "content": ""}]).endswith("<|im_start|>assistant\n")


def test_neighbouring_messages_of_one_side_are_one(serve: Serve) -> None:
    texts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "user", "content": texts}, {"role": "user", "content": "three"}]
    assert "user\none\ntwo\nthree<|im_end|>" in prompt_of(serve(), messages)


def test_the_line_that_says_whom_to_bill_is_not_for_the_model(serve: Serve) -> None:
    server = serve()
    asked: list[str] = []
    sessions = []
    messages = list(ASK)
    for turn in range(3):
        line = f"x-anthropic-billing-header: cc_version=2.1.42.{turn}; cc_entrypoint=cli; cch={turn:05x};"
        system = [{"type": "text", "text": line}, {"type": "text", "text": "You are a patient gardener. " * 9}]
        answer = ask(server, messages, system=system)
        sessions.append(answer["session"])
        asked.append(server.server.gateway.chat.given(server.engine.specs[-1].token_ids).text)
        messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": f"More {turn}"}]
    assert not any("billing" in prompt for prompt in asked)
    assert "You are a patient gardener." in asked[0]
    assert [session["miss_reason"] for session in sessions] == ["new_session", None, None]


def test_the_systems_later_words_and_texts_behind_results_are_folded_where_a_template_refuses_them(
    say: Say, tokenizer: PreTrainedTokenizerFast
) -> None:
    strict = (
        "{%- for m in messages -%}"
        "{%- if m.role == 'system' and not loop.first -%}{{ raise_exception('system comes first') }}{%- endif -%}"
        "{%- if m.role == 'user' and loop.previtem is defined and loop.previtem.role in ['user', 'tool'] -%}"
        "{{ raise_exception('they must alternate') }}{%- endif -%}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%- endfor -%}<|im_start|>assistant\n"
    )
    server = say("Rain.", strict)
    messages = [
        *ASK,
        {"role": "assistant", "content": [{"type": "text", "text": "Hm."}]},
        {"role": "system", "content": "Today is Monday."},
        {"role": "user", "content": "Well?"},
    ]
    folded = "user\n<system-reminder>\nToday is Monday.\n</system-reminder>\n\nWell?<|im_end|>"
    assert folded in prompt_of(server, messages)
    assert "system\nToday is Monday.<|im_end|>" in prompt_of(say("Rain."), messages)


def test_a_mark_to_cache_says_how_long_the_session_is_worth_keeping(serve: Serve) -> None:
    server = serve()
    marked = [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    ask(server, [{"role": "user", "content": marked}], system=system, session_id="a")
    ask(server, system=system, session_id="b")
    ask(server, system=system, session_id="c", session={"keep_seconds": 7})
    ask(server, session_id="d")
    with client(server.server) as http:
        kept = [http.get(f"/v1/sessions/{name}").json()["branches"][0]["keep_seconds"] for name in "abcd"]
    assert kept == [3600, 300, 7, 0]


def test_tokens_are_counted_and_nothing_is_run_or_remembered(serve: Serve) -> None:
    server = serve()
    long = post(server, path=f"{URL}/count_tokens", system="Be brief.", tools=USABLE).json()
    assert list(long) == ["input_tokens"]
    assert ask(server, system="Be brief.", tools=USABLE)["timings"]["prompt_n"] == long["input_tokens"]
    assert len(server.engine.specs) == 1
    with client(server.server) as http:
        without = {name: value for name, value in body().items() if name != "max_tokens"}
        assert http.post(f"{URL}/count_tokens", json=without).json()["input_tokens"] < long["input_tokens"]
        assert len(http.get("/v1/sessions").json()["data"]) == 1


def test_why_the_cache_was_missed_is_told_in_anthropics_words(serve: Serve) -> None:
    server = serve()
    wanted: Any = {"diagnostics": {"previous_message_id": None}, "session_id": "a", "system": "Be a gardener. " * 9}
    first = ask(server, ASK, **wanted)
    assert first["diagnostics"] == {"cache_miss_reason": {"type": "previous_message_not_found"}}
    more = [*ASK, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": "And? " * 20}]
    assert ask(server, more, **wanted)["diagnostics"] == {"cache_miss_reason": None}
    changed = [*more[:2], {"role": "user", "content": "Or? " * 40}]
    reason = put_together(streamed(server, changed, **wanted))["diagnostics"]["cache_miss_reason"]
    assert (reason["type"], reason["cache_missed_input_tokens"] > 0) == ("messages_changed", True)
    assert ask(server, more)["diagnostics"] is None


# --- Claude Code ----------------------------------------------------------------------------------------------------


class Agent:
    """One of Claude Code's conversations as it sends them: a new checksum in each system prompt, its ids in headers."""

    def __init__(self, server: Scripted, session: str, agent: str | None, by_header: bool = True) -> None:
        self.server = server
        self.headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219"}
        self.metadata = {"user_id": json.dumps({"device_id": "d", "account_uuid": "", "session_id": session})}
        if by_header:
            self.headers["x-claude-code-session-id"] = session
            if agent is not None:
                self.headers["x-claude-code-agent-id"] = agent
        self.who = f"You are Claude Code, and now you are {agent or 'the main thread'}. Be brief and precise. " * 4
        self.messages: list[dict[str, Any]] = []
        self.answers: list[dict[str, Any]] = []

    def ask(self, text: str) -> None:
        cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
        reminder = {"type": "text", "text": "<system-reminder>\nNothing to do.\n</system-reminder>"}
        said: list[dict[str, Any]] = [reminder, {"type": "text", "text": text, **cached}]
        self.messages.append({"role": "user", "content": said})
        checksum = f"{len(self.messages):03x}"
        line = f"x-anthropic-billing-header: cc_version=2.1.99.{checksum}; cc_entrypoint=cli; cch=74{checksum};"
        told = {
            "model": "claude-haiku-4-5-20251001",
            "max_tokens": 32000,
            "stream": True,
            "temperature": 1,
            "system": [{"type": "text", "text": line}, {"type": "text", "text": self.who, **cached}],
            "messages": self.messages,
            "tools": USABLE,
            "metadata": self.metadata,
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "medium"},
        }
        with client(self.server.server) as http:
            response = http.post(f"{URL}?beta=true", json=told, headers=self.headers)
        assert response.status_code == 200, response.text
        answer = put_together(events(response.text))
        self.answers.append(answer)
        self.messages[-1]["content"] = [{"type": "text", "text": block["text"]} for block in said]  # its mark moves
        self.messages.append({"role": "assistant", "content": answer["content"]})


@pytest.mark.parametrize("by_header", [True, False], ids=["by-header", "by-metadata"])
def test_claude_code_with_three_agents_at_once_loses_no_conversations_blocks(serve: Serve, by_header: bool) -> None:
    server = serve(served_model_name=("*",), hbm_slots=1024)
    session = "0b6a2a4e-52a1-4d0c-9d3c-2f6d2f7e1c11"
    main = Agent(server, session, None, by_header)
    agents = [Agent(server, session, f"agent-{number}", by_header) for number in range(3)]
    with ThreadPoolExecutor(4) as threads:
        for turn in range(4):
            list(threads.map(Agent.ask, [main, *agents], [f"Step {turn} of the plan? " * 5] * 4))
    for agent in (main, *agents):
        reused = [answer["usage"]["cache_read_input_tokens"] for answer in agent.answers]
        lengths = [answer["timings"]["cache_n"] + answer["timings"]["prompt_n"] for answer in agent.answers]
        for turn in range(1, 4):
            told = agent.answers[turn]["session"]
            assert (told["turn"], told["miss_reason"]) == (turn + 1, None)
            assert reused[turn] >= (lengths[turn - 1] + len(WORDS)) // BLOCK_TOKENS * BLOCK_TOKENS
    sessions = [answer["session"] for each in (main, *agents) for answer in each.answers]
    ids = {(told["id"], told["branch"]) for told in sessions}
    assert len(ids) == 4
    if by_header:
        assert {name for name, _ in ids} == {session, "agent-0", "agent-1", "agent-2"}
        assert {answer["session"]["parent_id"] for answer in agents[0].answers} == {session}
    else:
        assert {name for name, _ in ids} == {session}
        assert main.answers[0]["session"]["id_source"] == "metadata.user_id"
