"""Public clients, unchanged, each in an environment of its own: none notices that this is not OpenAI.

What they say they were told of the cache is held against what a turn has to compute: less than a block of history.
"""

from __future__ import annotations

import functools
import itertools
import json
import sqlite3
from typing import TYPE_CHECKING, Any

import pytest

from app import startup
from app.settings import Settings
from models.embedded import NAME
from tests.app.forced import InOrder
from tests.app.live import Live, live
from tests.clients.environments import DRIVERS, node_with, python_with, run, told

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.clients.conftest import Server

pytestmark = [pytest.mark.clients, pytest.mark.timeout(3600)]

BLOCK = 32
FORCED = InOrder(end_id=2)


@pytest.fixture(scope="module")
def forced(cache_dir: Path) -> Iterator[Live]:
    """The embedded model behind the whole server, in this process: what it says is set here and nowhere else."""
    opened = functools.partial(startup.opened, choose=FORCED)
    with live(Settings(model="embedded", hbm_bytes=128 * 1024**2, cache_dir=cache_dir, drain_seconds=5), opened) as it:
        yield it
        it.check_idle()


def call(name: str, **arguments: object) -> str:
    """A call as the embedded model is told to write it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def say_next(server: Live, texts: Sequence[str]) -> None:
    scripts = [server.gateway.chat.plain_ids(text) for text in texts]
    server.call(lambda: FORCED.say_next(scripts))


def whole(tokens: int) -> int:
    return tokens // BLOCK * BLOCK


def assert_all_but_the_tail_is_cached(usages: Sequence[tuple[int, int, int]]) -> None:
    """`usages` are (prompt, output, cached) tokens of one conversation's turns.

    An answer's last token was sampled and never computed, so of what stands before a turn that one has no K/V.
    """
    assert len(usages) > 1
    for (prompt, output, _), (_, _, cached) in itertools.pairwise(usages):
        assert cached >= whole(prompt + output - 1) > 0  # more where an earlier conversation began alike


def test_langchain_streams_usage_metadata_with_the_cached_tokens(server: Server) -> None:
    python = python_with("langchain-openai", "langchain-openai==1.7.4") / "python"
    turns = told(python, DRIVERS / "langchain_chat.py", f"{server.url}/v1", NAME)
    assert len(turns) == 4
    assert all(turn["text"] and turn["chunks"] > 3 for turn in turns)
    usages = [turn["usage"] for turn in turns]
    assert all(usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] for usage in usages)
    assert_all_but_the_tail_is_cached(
        [(u["input_tokens"], u["output_tokens"], u["input_token_details"].get("cache_read", 0)) for u in usages]
    )


@pytest.mark.parametrize("stream", ["whole", "stream"])
def test_an_unchanged_agent_runs_its_tools_and_its_conversation_is_found_by_its_prefix(
    forced: Live, stream: str
) -> None:
    python = python_with("openai-agents", "openai-agents==0.24.0") / "python"
    said = [
        "Let me look.\n" + call("get_weather", city="Paris", days=3),
        call("get_weather", days=4, city="Paris"),
        f"Yes, take one, the {stream} week.",
        call("get_time", zone="CET"),
        "It is noon.",
    ]
    say_next(forced, said)
    got = told(python, DRIVERS / "agents_run.py", f"{forced.url}/v1", NAME, stream)
    assert FORCED.is_done
    assert got["said"] == [said[2], said[4]]
    assert got["ran"] == ["get_weather Paris 3", "get_weather Paris 4", "get_time CET"]
    assert len(got["usages"]) == 5
    assert_all_but_the_tail_is_cached([(u["input"], u["output"], u["cached"]) for u in got["usages"]])


def test_litellm_chats_and_tells_its_errors_apart(server: Server) -> None:
    python = python_with("litellm", "litellm==1.110.2") / "python"
    got = told(python, DRIVERS / "litellm_chat.py", f"{server.url}/v1", NAME)
    assert all(turn["text"] and turn["finish_reason"] in {"stop", "length"} for turn in got["turns"])
    usages = [turn["usage"] for turn in got["turns"]]
    assert_all_but_the_tail_is_cached(
        [(u["prompt_tokens"], u["completion_tokens"], u["prompt_tokens_details"]["cached_tokens"]) for u in usages]
    )
    assert got["error"] == "ContextWindowExceededError"


def test_the_node_package_chats_streams_and_calls_tools(server: Server, forced: Live) -> None:
    modules = node_with("openai-node", "openai@6.49.0")
    yes = "Yes, you will."
    say_next(forced, [call("get_weather", city="Paris", days=2), yes] * 2)
    driver = DRIVERS / "openai_node.cjs"
    got = told("node", driver, f"{server.url}/v1", f"{forced.url}/v1", NAME, env={"NODE_PATH": str(modules)})
    assert got["models"] == [NAME]
    for turns in (got["whole"], got["streamed"]):
        assert [turn["session"]["turn"] for turn in turns] == [1, 2, 3, 4]
        assert [turn["session"]["miss_reason"] for turn in turns] == ["new_session", None, None, None]
        assert all(turn["text"] and turn["reason"] in {"stop", "length"} for turn in turns)
        usages = [turn["usage"] for turn in turns]
        assert_all_but_the_tail_is_cached(
            [(u["prompt_tokens"], u["completion_tokens"], u["prompt_tokens_details"]["cached_tokens"]) for u in usages]
        )
    assert [turn["text"] for turn in got["whole"]] == [turn["text"] for turn in got["streamed"]]
    for tools in (got["tools"], got["toolsStreamed"]):
        assert (tools["said"], tools["ran"]) == (yes, [{"city": "Paris", "days": 2}])
    assert got["held"]["nut"] in {"hazel", "beech"}
    assert got["refused"] == {"name": "NotFoundError", "status": 404, "code": "model_not_found", "param": "model"}


def test_llm_continues_a_conversation_from_its_own_log(server: Server, tmp_path: Path) -> None:
    llm = python_with("llm", "llm==0.36") / "llm"
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: sleepy\n  model_name: {NAME}\n  api_base: {server.url}/v1\n"
    )
    where = {"LLM_USER_PATH": str(tmp_path)}
    limits = ("-o", "temperature", "0", "-o", "max_tokens", "20")
    texts = [run(llm, "-m", "sleepy", *limits, "How long does a dormouse sleep?", env=where)]
    texts += [run(llm, "-c", *limits, question, env=where) for question in ("And a bear?", "Who sleeps longer?")]
    assert all(text.strip() for text in texts)
    texts.append(run(llm, "-c", "--no-stream", *limits, "Thank you.", env=where))
    with sqlite3.connect(tmp_path / "logs.db") as log:
        rows = log.execute("select input_tokens, output_tokens, token_details from responses order by id").fetchall()
    details: list[dict[str, Any]] = [json.loads(row[2]) for row in rows]
    cached = [each.get("prompt_tokens_details", {}).get("cached_tokens", 0) for each in details]
    assert_all_but_the_tail_is_cached([(row[0], row[1], tokens) for row, tokens in zip(rows, cached, strict=True)])
