"""What `/metrics` tells, in a registry of its own.

Every series is there at zero before its first event, so that rates and alerts work from the start; label values
come from closed sets, never from a request. The store's own counters are read at the moment of a scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from app.report import reuse
from kvstore.types import Tier

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from app.report import Figures, Standing
    from kvstore.snapshot import Snapshot

OUTCOMES = ("stop", "length", "cancelled", "failed", "queue_full", "context_too_long", "shutting_down")
"""How a turn that reached the store ended: an answer, no answer (`cancelled`: the client left), or a refusal."""

# Seconds: a warm short turn on an accelerator takes tens of milliseconds, a cold long one on a CPU tens of seconds.
LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60)
STATES = ("free", "open", "filling", "valid", "quarantined")


class Metrics:
    """The counters that turns feed, and the registry that a scrape reads."""

    def __init__(self, miss_reasons: Iterable[str]) -> None:
        # They would double the page, and only OpenMetrics has a place for them.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        registry = self.registry
        self.turns = Counter("dormouse_turns", "Turns by how they ended.", ["outcome"], registry=registry)
        self.tokens = Counter("dormouse_tokens", "Tokens of prompts and answers.", ["kind"], registry=registry)
        self.reused = Counter(
            "dormouse_reused_tokens", "Prompt tokens whose K/V was there.", ["tier"], registry=registry
        )
        self.computed = Counter(
            "dormouse_computed_tokens", "Prompt tokens computed for the first time.", registry=registry
        )
        self.recomputed = Counter(
            "dormouse_recomputed_tokens", "Prompt tokens whose K/V had been there, computed again.", registry=registry
        )
        self.stored = Counter("dormouse_stored_tokens", "Tokens whose blocks were newly published.", registry=registry)
        self.misses = Counter(
            "dormouse_misses", "Turns by why history was computed again.", ["reason"], registry=registry
        )
        self.queue_seconds = _histogram("dormouse_queue_seconds", "From arrival to the grant.", registry)
        self.first_token_seconds = _histogram(
            "dormouse_first_token_seconds", "From arrival to the first token.", registry
        )
        self.turn_seconds = _histogram("dormouse_turn_seconds", "From arrival to the last token.", registry)
        self._show_zeroes(miss_reasons)

    def _show_zeroes(self, miss_reasons: Iterable[str]) -> None:
        for outcome in OUTCOMES:
            self.turns.labels(outcome)
        for kind in ("prompt", "output"):
            self.tokens.labels(kind)
        for tier in Tier:
            self.reused.labels(tier.name.lower())
        for reason in miss_reasons:
            self.misses.labels(reason)

    def count(self, outcome: str, standing: Standing, figures: Figures, seconds: float) -> None:
        """Count one turn that has ended; what was refused counts as an outcome and no more."""
        self.turns.labels(outcome).inc()
        if not figures.ran:
            return
        known = reuse(standing, figures)
        self.tokens.labels("prompt").inc(standing.prompt_tokens)
        self.tokens.labels("output").inc(figures.output_tokens)
        for tier, tokens in figures.reused.items():
            self.reused.labels(tier.name.lower()).inc(tokens)
        self.computed.inc(known.computed)
        self.recomputed.inc(known.recomputed)
        self.stored.inc(figures.stored_tokens)
        if known.miss_reason is not None:
            self.misses.labels(known.miss_reason).inc()
        self.queue_seconds.observe(figures.queue_seconds)
        if figures.first_token_at is not None:
            self.first_token_seconds.observe(figures.first_token_at)
        self.turn_seconds.observe(seconds)

    def watch_store(self, snapshot: Callable[[], Snapshot]) -> None:
        """Include the store's counters in every scrape from now on."""
        self.registry.register(StoreCollector(snapshot))

    def describe_model(self, labels: dict[str, str]) -> None:
        """A series that is always one and whose labels name what is served."""
        self.registry.register(_Constant(InfoMetricFamily("dormouse_model", "What is served.", value=labels)))


def _histogram(name: str, text: str, registry: CollectorRegistry) -> Histogram:
    return Histogram(name, text, buckets=LATENCY_BUCKETS, registry=registry)


class StoreCollector(Collector):
    """The planner's snapshot as metrics: slots by tier and state, turns by state, totals."""

    def __init__(self, snapshot: Callable[[], Snapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """One snapshot, so that the states of a tier add up to its capacity."""
        snapshot = self._snapshot()
        slots = GaugeMetricFamily("dormouse_tier_slots", "Slots of a tier by state.", labels=["tier", "state"])
        capacity = GaugeMetricFamily("dormouse_tier_capacity_slots", "Slots of a tier.", labels=["tier"])
        pinned = GaugeMetricFamily("dormouse_tier_pinned_slots", "Blocks that may not leave.", labels=["tier"])
        for counts in snapshot.tiers:
            name = counts.tier.name.lower()
            capacity.add_metric([name], counts.capacity)
            pinned.add_metric([name], counts.pinned)
            for state in STATES:
                slots.add_metric([name, state], getattr(counts, state))
        yield from (slots, capacity, pinned)
        yield _gauge("dormouse_turns_waiting", "Turns in the queue.", snapshot.turns.waiting)
        yield _gauge("dormouse_turns_suspended", "Turns whose slots were needed elsewhere.", snapshot.turns.suspended)
        yield _gauge("dormouse_turns_running", "Turns that hold slots.", snapshot.turns.granted)
        totals = snapshot.totals
        yield CounterMetricFamily("dormouse_suspensions", "Turns suspended.", totals.turns_suspended)
        yield CounterMetricFamily("dormouse_blocks_published", "Blocks made reusable.", totals.published)
        yield CounterMetricFamily("dormouse_blocks_evicted", "Blocks that gave way.", totals.evicted)


class _Constant(Collector):
    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value)
