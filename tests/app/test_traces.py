"""A span for each turn and its phases, told when it has ended; text of turns in the log only where asked for."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from app.log import JsonLines
from app.report import Figures, Standing
from app.settings import Settings
from app.traces import NoTraces, OpenTelemetry, open_traces, phases
from kvstore.types import Tier
from tests.app.conftest import NAME, Scripted
from tests.app.live import client

if TYPE_CHECKING:
    import httpx

Serve = Callable[..., Scripted]

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STANDING = Standing(
    session_id="run/1",
    id_source="body",
    parent_id=None,
    branch=0,
    turn=3,
    prompt_tokens=100,
    history_tokens=64,
    shared_tokens=64,
    is_known_session=True,
    block_tokens=16,
    cache=True,
    divergence=None,
)
FIGURES = Figures(
    reused={Tier.DRAM: 64},
    wake_seconds=0.25,
    wake_trigger="hint",
    queue_seconds=0.5,
    granted_at=1.0,
    first_token_at=1.5,
    last_token_at=2.0,
    output_tokens=9,
)


class Kept:
    """Spans that were told, by name; children beside their parent."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.traces = OpenTelemetry(provider)

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


@pytest.fixture
def kept() -> Iterator[Kept]:
    kept = Kept()
    yield kept
    kept.traces.close()


def say(http: httpx.Client, **headers: str) -> None:
    body = {"model": NAME, "messages": [{"role": "user", "content": "a secret, my dear"}], "session_id": "run/1"}
    assert http.post("/v1/chat/completions", json=body, headers=headers).status_code == 200


def test_a_turn_has_its_phases_one_after_the_other(kept: Kept) -> None:
    kept.traces.tell("stop", STANDING, FIGURES, 2.25, None)
    spans = kept.spans
    turn = spans["turn"]
    assert turn.start_time is not None

    def milliseconds(name: str) -> tuple[int, int]:
        span = spans[name]
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.parent is None or span.parent.span_id == turn.context.span_id
        return (span.start_time - turn.start_time) // 10**6, (span.end_time - turn.start_time) // 10**6  # type: ignore[operator]

    assert {name: milliseconds(name) for name in spans} == {
        "turn": (0, 2250),
        "queue": (250, 750),
        "wake": (750, 1000),
        "prefill": (1000, 1500),
        "decode": (1500, 2000),
    }
    assert turn.attributes is not None
    told = {name: turn.attributes[name] for name in ("gen_ai.conversation.id", "gen_ai.usage.input_tokens")}
    assert told == {"gen_ai.conversation.id": "run/1", "gen_ai.usage.input_tokens": 100}
    assert turn.attributes["dormouse.reused_dram"] == 64
    assert turn.status.is_ok or turn.status.is_unset


def test_a_turn_that_was_refused_only_waited_and_is_an_error(kept: Kept) -> None:
    kept.traces.tell("queue_full", STANDING, Figures(), 0.5, None)
    assert set(kept.spans) == {"turn", "queue"}
    assert not kept.spans["turn"].status.is_ok
    assert kept.spans["turn"].status.description == "queue_full"


def test_phases_a_turn_never_came_to_are_left_out() -> None:
    cut = Figures(queue_seconds=0.5, granted_at=1.0)
    assert list(phases(cut, 3.0)) == [("queue", 0.5, 1.0), ("prefill", 1.0, 3.0)]


def test_a_turn_belongs_to_its_callers_span_and_carries_no_text(serve: Serve, kept: Kept) -> None:
    server = serve(otel_endpoint="http://127.0.0.1:9")
    server.server.gateway.traces = kept.traces
    with client(server.server) as http:
        say(http, traceparent=CALLER)
        say(http)
    turns = [span for span in kept.exporter.get_finished_spans() if span.name == "turn"]
    assert len(turns) == 2
    assert turns[0].parent is not None
    assert f"{turns[0].parent.trace_id:032x}-{turns[0].parent.span_id:016x}" == CALLER[3:52]
    assert turns[1].parent is None
    assert "secret" not in "".join(span.to_json() for span in kept.exporter.get_finished_spans())
    server.check()


def test_what_is_no_traceparent_is_no_ones_span(kept: Kept) -> None:
    kept.traces.tell("stop", STANDING, FIGURES, 2.25, "00-nonsense")
    assert kept.spans["turn"].parent is None


def test_nobody_is_told_where_no_endpoint_is_named() -> None:
    assert isinstance(open_traces(Settings()), NoTraces)


class Collector(HTTPServer):
    """Takes what an exporter sends."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Taking)
        self.got: list[tuple[str, bytes]] = []


class Taking(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Collector)
        self.server.got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


def test_a_collector_gets_what_was_told_before_the_server_ends() -> None:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        traces = open_traces(Settings(otel_endpoint=f"http://127.0.0.1:{collector.server_port}/"))
        traces.tell("stop", STANDING, FIGURES, 2.25, CALLER)
        traces.close()
        collector.shutdown()
        thread.join()
    ((path, body),) = collector.got
    assert path == "/v1/traces"
    (of_resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    service = {each.key: each.value.string_value for each in of_resource.resource.attributes}["service.name"]
    names = [span.name for scope in of_resource.scope_spans for span in scope.spans]
    assert (service, sorted(names)) == ("dormouse", ["decode", "prefill", "queue", "turn", "wake"])


@pytest.mark.parametrize("url", ["127.0.0.1:4318", "grpc://host:4317", "http://", "http://host/?a=b"])
def test_what_is_no_endpoint_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="4318"):
        Settings(otel_endpoint=url)


@pytest.mark.parametrize("log_prompts", [False, True])
def test_text_is_in_the_log_only_where_it_was_asked_for(serve: Serve, log_prompts: bool) -> None:
    server = serve(log_prompts=log_prompts)
    lines, logger = io.StringIO(), logging.getLogger("dormouse.turns")
    handler = logging.StreamHandler(lines)
    handler.setFormatter(JsonLines())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with client(server.server) as http:
            say(http)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    (line,) = [json.loads(each) for each in lines.getvalue().splitlines()]
    assert line["session"] == "run/1"
    assert ("a secret, my dear" in line.get("prompt_text", "")) is log_prompts
    assert ("answer_text" in line) is log_prompts
    assert log_prompts or "secret" not in lines.getvalue()
