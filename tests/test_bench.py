"""The benchmarks measure what they say: against a server whose every figure is known, and once on a real engine."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer
from typer.testing import CliRunner

from app.settings import Settings
from bench import client, stats, steps, words
from bench.cli import cli
from bench.errors import BenchFailed
from models import embedded

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TEMPLATE_TOKENS = 20
CACHED_TOKENS = 32


class CountingServer(ThreadingHTTPServer):
    """Answers with as many tokens as are asked for; a word of a prompt is a token, a system message seen is cached."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[dict[str, Any]] = []
        self.knows_ignore_eos = True
        self.refuses_ignore_eos = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: CountingServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._head(200, "application/json")
        self.wfile.write(b'{"data": [{"id": "counting"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.server.refuses_ignore_eos and "ignore_eos" in body:
            self._head(422, "application/json")
            self.wfile.write(b'{"detail": "Unexpected fields in the request: {\'ignore_eos\'}"}')
            return
        if body["model"] != "counting":
            self._head(404, "application/json")
            self.wfile.write(b'{"error": {"message": "no such model"}}')
            return
        system = body["messages"][0]["content"]
        seen = any(system == earlier["messages"][0]["content"] for earlier in self.server.bodies)
        self.server.bodies.append(body)
        count = sum(len(message["content"].split()) for message in body["messages"])
        tokens = body["max_tokens"] if self.server.knows_ignore_eos else 1
        self._head(200, "text/event-stream")
        for index in range(tokens):
            self._event({"choices": [{"delta": {"content": f"w{index} "}, "finish_reason": None}]})
        self._event({"choices": [{"delta": {}, "finish_reason": "length"}]})
        usage = {
            "prompt_tokens": TEMPLATE_TOKENS + count,
            "completion_tokens": tokens,
            "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS if seen else 0},
        }
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _head(self, status: int, media_type: str) -> None:
        self.send_response(status)
        self.send_header("content-type", media_type)
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True

    def _event(self, chunk: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


@pytest.fixture
def server() -> Iterator[CountingServer]:
    with CountingServer() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def bench_chat(server: CountingServer, *flags: str) -> dict[str, Any]:
    """The only result of `bench chat` with few and short rounds."""
    command = ["chat", "--url", server.url, "--contexts", "140,300", "--streams", "3", "--repeats", "2"]
    done = CliRunner().invoke(cli, [*command, "--tokens", "5", "--no-calibrate", "--json", "-", *flags])
    assert done.exit_code == 0, done.output
    (result,) = json.loads(done.stdout)["results"]
    return result  # type: ignore[no-any-return]


def test_chat_measures_prompts_of_the_lengths_asked_for_cold_and_then_warm(server: CountingServer) -> None:
    result = bench_chat(server)

    assert (result["model"], result["doubts"]) == ("counting", [])
    for context, each in zip((140, 300), result["contexts"], strict=True):
        assert each["prompt_tokens"] == [context, context]
        assert each["cold_cached_tokens"] == [0, 0]
        assert each["next_cached_tokens"] == [CACHED_TOKENS, CACHED_TOKENS]
        assert each["output_tokens"] == each["pieces"] == [5, 5]
        assert each["summary"]["decode_seconds_per_token"]["samples"] == 2
    (streams,) = result["streams"]
    assert streams["output_tokens"] == [15, 15]
    assert [round(rate * seconds) for rate, seconds in _rates(streams)] == [15, 15]


def _rates(streams: dict[str, Any]) -> list[tuple[float, float]]:
    return list(zip(streams["output_tokens_per_second"], streams["seconds"], strict=True))


def test_prompts_share_nothing_but_their_conversation(server: CountingServer) -> None:
    bench_chat(server)

    # 32 tokens are a block of ours, and sixteen are one of vLLM's: nothing may be found by accident.
    beginnings = [" ".join(body["messages"][0]["content"].split()[:12]) for body in server.bodies]
    turns = [len(body["messages"]) for body in server.bodies]
    assert turns.count(4) == 4  # two contexts, twice
    assert len(set(beginnings)) == turns.count(2)


def test_the_same_seed_on_a_server_that_remembers_is_said_to_be_doubtful(server: CountingServer) -> None:
    bench_chat(server, "--seed", "1")
    doubts = bench_chat(server, "--seed", "1")["doubts"]

    assert any("were not cold" in doubt for doubt in doubts)


def test_answers_that_end_early_are_said_to_be_doubtful(server: CountingServer) -> None:
    server.knows_ignore_eos = False

    assert any("not 5" in doubt for doubt in bench_chat(server)["doubts"])


def test_a_server_that_refuses_ignore_eos_is_asked_in_transformers_words(server: CountingServer) -> None:
    server.refuses_ignore_eos = True

    assert bench_chat(server)["doubts"] == []
    assert all("min_new_tokens" in body["generation_config"] for body in server.bodies)


def test_a_refusal_is_told_in_the_servers_words(server: CountingServer) -> None:
    done = CliRunner().invoke(cli, ["chat", "--url", server.url, "--model", "other", "--no-calibrate"])

    assert done.exit_code == 1
    assert "bench: the server answered 404" in done.stderr
    assert "no such model" in done.stderr


def _line(text: str | None, finish_reason: str | None = None) -> bytes:
    delta = {} if text is None else {"content": text}
    return b"data: " + json.dumps({"choices": [{"delta": delta, "finish_reason": finish_reason}]}).encode() + b"\n\n"


def test_a_piece_has_come_when_its_line_is_whole() -> None:
    whole = _line("a")
    reply = client.read(1.0, [(2.0, whole[:9]), (3.0, whole[9:] + b": keep-alive\n\n"), (4.0, _line("b"))])

    assert (reply.text, reply.text_at, reply.ttft_seconds) == ("ab", [3.0, 4.0], 2.0)
    assert (reply.output_tokens, reply.seconds_per_token) == (2, 1.0)


def test_a_last_token_without_text_is_timed_by_the_end_of_the_answer() -> None:
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 4}}\n\n'
    stream = [(1.0, _line("a")), (2.0, _line("b")), (4.0, _line(None, "length")), (4.5, usage)]

    reply = client.read(0.0, stream)

    assert (reply.prompt_tokens, reply.last_token_at, reply.seconds_per_token) == (7, 4.0, 1.0)


def test_an_error_within_a_stream_is_no_figure() -> None:
    with pytest.raises(BenchFailed, match="out of luck"):
        client.read(0.0, [(1.0, _line("a")), (2.0, b'data: {"error": {"message": "out of luck"}}\n\n')])


def test_the_ratio_of_tails_has_an_interval_round_it() -> None:
    pairs = [
        ([2.0 * (index + step) for step in range(9)], [1.0 * (index + step) for step in range(9)]) for index in range(5)
    ]

    ratio = stats.p95_ratio(pairs, seed=1)

    assert ratio.value == pytest.approx(2.0)
    assert ratio.low <= ratio.value <= ratio.high


def test_every_word_is_one_token_of_the_embedded_model(cache_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(embedded.fetch(cache_dir, progress=print) / "tokenizer.json"))

    assert {word for word in words.WORDS if len(tokenizer.encode(f" {word}").ids) != 1} == set()
    assert len(set(words.WORDS)) == len(words.WORDS)


def test_steps_are_compared_with_http_and_without(cache_dir: Path) -> None:
    settings = Settings(cache_dir=cache_dir, attention="fast", hbm_bytes=64 * 1024**2)
    plan = steps.StepPlan(streams=2, prompt_tokens=60, tokens=24, pairs=1)
    told: list[str] = []

    samples = steps.run(settings, plan, told.append)

    assert told == ["pair 1"]
    ((http,), (plain,)) = samples.http, samples.plain
    # The first token comes with the prompt; turns that arrive one after the other share fewer steps than that.
    assert all(2 <= len(window.seconds) <= 23 and min(window.seconds) > 0 for window in (http, plain))
    assert all(window.mean_interval_seconds > 0 for window in (http, plain))
    assert samples.http_bytes[0] > 0
