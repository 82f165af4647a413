"""A span for each turn, with queue, wake, prefill and decode as its children, for who asks for them.

    turn      arrival ............................................................ end
      queue     .......                                waiting for room
      wake              ........                       for blocks that slept
      prefill                   ........               from the grant to the first token
      decode                            ............   to the last token

Spans are made when a turn has ended, from what was counted of it; nothing here is on a token's way. OpenTelemetry is an
optional extra, and is imported only where an endpoint is named.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

from app.report import log_fields
from kvstore.errors import SettingInvalid

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from starlette.types import ASGIApp, Receive, Scope, Send

    from app.report import Figures, Standing
    from app.settings import Settings

TRACEPARENT = b"traceparent"
EXPORT_SECONDS = 2
"""A collector that does not answer in that time is not waited for, at the end least of all."""

parent: ContextVar[str | None] = ContextVar("traceparent", default=None)
"""Of the request that this runs for: what its caller's span is, as W3C's header has it."""


class Traces(Protocol):
    """Where turns that have ended are told."""

    def tell(self, outcome: str, standing: Standing, figures: Figures, seconds: float, within: str | None) -> None:
        """Of a turn that took `seconds` and has ended now, as part of the span `within`, if any."""

    def close(self) -> None:
        """Send what has not been sent; blocking, and soon over."""


class NoTraces:
    """Nobody asked for any."""

    def tell(self, outcome: str, standing: Standing, figures: Figures, seconds: float, within: str | None) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def phases(figures: Figures, seconds: float) -> Iterator[tuple[str, float, float]]:
    """What a turn did in [start, end), in seconds since its arrival; phases it never came to are left out."""
    granted = figures.granted_at
    if granted is None:
        yield "queue", 0.0, seconds
        return
    woken = max(0.0, granted - figures.wake_seconds)
    yield "queue", max(0.0, woken - figures.queue_seconds), woken
    if figures.wake_trigger is not None:
        yield "wake", woken, granted
    first = figures.first_token_at
    yield "prefill", granted, seconds if first is None else first
    if first is not None:
        yield "decode", first, max(first, figures.last_token_at)


class OpenTelemetry:
    """Spans for `provider`, under the names that OpenTelemetry has for generative models, and ours."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("dormouse")
        self._propagator = TraceContextTextMapPropagator()

    def tell(self, outcome: str, standing: Standing, figures: Figures, seconds: float, within: str | None) -> None:
        """See Traces."""
        from opentelemetry import trace

        end = time.time_ns()
        arrived = end - _nanoseconds(seconds)
        context = self._propagator.extract({"traceparent": within}) if within is not None else None
        turn = self._tracer.start_span(
            "turn", context, trace.SpanKind.SERVER, _attributes(outcome, standing, figures, seconds), start_time=arrived
        )
        inside = trace.set_span_in_context(turn)
        for name, start, stop in phases(figures, seconds):
            span = self._tracer.start_span(name, inside, start_time=arrived + _nanoseconds(start))
            span.end(arrived + _nanoseconds(stop))
        if outcome not in ("stop", "length", "cancelled"):
            turn.set_status(trace.StatusCode.ERROR, outcome)
        turn.end(end)

    def close(self) -> None:
        """See Traces."""
        self._provider.shutdown()


def _attributes(outcome: str, standing: Standing, figures: Figures, seconds: float) -> dict[str, str | int | float]:
    told = log_fields(outcome, standing, figures, seconds)
    ours = {f"dormouse.{name}": value for name, value in told.items() if isinstance(value, str | int | float)}
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "dormouse",
        "gen_ai.conversation.id": standing.session_id,
        "gen_ai.usage.input_tokens": standing.prompt_tokens,
        "gen_ai.usage.output_tokens": figures.output_tokens,
        **ours,
    }


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def open_traces(settings: Settings) -> Traces:
    """Where the settings say.

    Raises:
        SettingInvalid: OpenTelemetry is not installed; names --otel-endpoint.
    """
    if settings.otel_endpoint is None:
        return NoTraces()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as exc:
        advice = "install it with `pip install 'dormouse-gateway[otel]'`"
        raise SettingInvalid("--otel-endpoint", f"OpenTelemetry is not installed ({exc}); {advice}") from exc
    provider = TracerProvider(resource=Resource.create({"service.name": "dormouse"}), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(f"{settings.otel_endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_SECONDS)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return OpenTelemetry(provider)


class CallersSpan:
    """Keeps what a request says of its caller's span for whoever traces what is done for it (ASGI)."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == TRACEPARENT), None)
        token = parent.set(None if given is None else given.decode("latin-1"))
        try:
            await self.app(scope, receive, send)
        finally:
            parent.reset(token)
