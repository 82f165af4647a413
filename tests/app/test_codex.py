"""What Codex sends: whole inputs with `store: false`, threads by header, calls, compaction. No turn meets another's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from tests.app.conftest import BLOCK_TOKENS, Scripted
from tests.app.test_responses import events_of, post
from tests.app.test_tools import speak

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerFast

INSTRUCTIONS = "You are a coding agent that runs in a terminal and changes files with the tools it has. " * 4
SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "array", "items": {"type": "string"}}, "workdir": {"type": "string"}},
        "required": ["command"],
        "additionalProperties": False,
    },
}
FOREIGN = [
    {"type": "web_search", "external_web_access": False},
    {
        "type": "custom",
        "name": "apply_patch",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
    },
]
CALL = '<tool_call>\n{"name": "shell", "arguments": {"command": ["ls", "-l"]}}\n</tool_call>'


class Thread:
    """One thread of an agent; the whole of it goes out with every turn."""

    def __init__(self, server: Scripted, name: str, parent: str | None = None) -> None:
        self.server = server
        self.headers = {"thread-id": name, "session-id": "window-1", "originator": "codex_cli_rs"}
        if parent is not None:
            self.headers["x-codex-parent-thread-id"] = parent
        self.items: list[Any] = [
            said("developer", "<permissions instructions>Ask first.</permissions instructions>"),
            said("user", f"<environment_context>{name}</environment_context>"),
        ]
        self.last: dict[str, Any] = {}

    def turn(self) -> dict[str, Any]:
        """Send it; the answer's items go on it."""
        response = post(
            self.server,
            self.items,
            headers=self.headers,
            instructions=INSTRUCTIONS,
            tools=[SHELL, *FOREIGN],
            tool_choice="auto",
            parallel_tool_calls=False,
            reasoning={"effort": "medium", "summary": "auto"},
            store=False,
            stream=True,
            include=["reasoning.encrypted_content"],
            prompt_cache_key="window-1",
            client_metadata={"x-codex-installation-id": "i"},
        )
        assert response.status_code == 200, response.text
        *events, done = events_of(response.text)
        assert done["type"] == "response.completed"
        self.items += [event["item"] for event in events if event["type"] == "response.output_item.done"]
        self.last = done["response"]
        return self.last

    def ask(self, text: str) -> dict[str, Any]:
        self.items.append(said("user", text))
        return self.turn()

    def result(self, output: str) -> dict[str, Any]:
        call = self.items[-1]
        self.items.append({"type": "function_call_output", "call_id": call["call_id"], "output": output})
        return self.turn()

    @property
    def reusable(self) -> int:
        return int((self.last["usage"]["total_tokens"] - 1) // BLOCK_TOKENS * BLOCK_TOKENS)


def said(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def cached(response: dict[str, Any]) -> int:
    return int(response["usage"]["input_tokens_details"]["cached_tokens"])


def test_a_thread_with_calls_computes_only_what_is_new(
    serve: Callable[..., Scripted], tokenizer: PreTrainedTokenizerFast
) -> None:
    server = serve(hbm_slots=512)
    thread = Thread(server, "t-1")
    speak(server, tokenizer, CALL)
    thread.ask("List the files.")
    for turn in range(2, 5):
        before = thread.reusable
        answer = thread.result(f"total {turn}")
        session = answer["session"]
        assert (session["id"], session["id_source"], session["turn"]) == ("t-1", "header:thread-id", turn)
        assert session["miss_reason"] is None, session
        assert cached(answer) == before
    assert [tool["name"] for tool in thread.last["tools"]] == ["shell"]


def test_threads_at_once_are_sessions_of_their_own_and_share_what_is_alike(serve: Callable[..., Scripted]) -> None:
    server = serve(hbm_slots=1024)
    main = Thread(server, "main")
    main.ask("Plan it.")
    threads = [Thread(server, f"sub-{number}", parent="main") for number in range(3)]
    for turn in range(1, 4):
        before = [thread.reusable for thread in threads] if turn > 1 else []
        server.pause()
        with ThreadPoolExecutor(3) as pool:
            waiting = [pool.submit(thread.ask, f"Step {turn}.") for thread in threads]
            server.server.wait_until(lambda: server.server.gateway.manager.snapshot().turns.granted == 3)
            server.go_on()
            answers = [each.result() for each in waiting]
        for thread, answer in zip(threads, answers, strict=True):
            session = answer["session"]
            assert (session["id"], session["parent_id"]) == (thread.headers["thread-id"], "main")
            assert (session["turn"], session["branch"]) == (turn, 0)
        if turn > 1:
            assert [cached(answer) for answer in answers] == before
    before_main = main.reusable
    assert cached(main.ask("Go on.")) == before_main


def test_a_compacted_thread_begins_anew_under_its_id_and_then_goes_on(serve: Callable[..., Scripted]) -> None:
    server = serve(hbm_slots=1024)
    thread = Thread(server, "t-1")
    for question in ("One?", "Two?", "Three?"):
        thread.ask(question)
    before = thread.reusable
    compacting = Thread(server, "t-1")
    compacting.items = [*thread.items]
    summary = compacting.ask("Summarise what was done.")  # as an ordinary turn of the thread
    assert cached(summary) == before
    thread.items = [*thread.items[:2], said("user", "Summary: three questions.")]
    first = thread.turn()
    assert (first["session"]["id"], first["session"]["branch"]) == ("t-1", 1)
    assert first["session"]["miss_reason"] == "new_branch"
    assert 0 < cached(first) < before  # its instructions and tools are the same
    before = thread.reusable
    second = thread.ask("Four?")
    assert (second["session"]["branch"], second["session"]["miss_reason"]) == (1, None)
    assert cached(second) == before
