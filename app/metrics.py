"""What `/metrics` tells, in a registry of its own.

Every series is there at zero before its first event, so that rates and alerts work from the start; label values
come from closed sets, never from a request. The store's own counters are read at the moment of a scrape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from app.disk_health import quota_bytes
from app.report import reuse, woke_from
from kvstore.events import TierHealth, WakeStatus
from kvstore.former import Gone
from kvstore.types import Tier

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from app.admin.board import Board
    from app.disk import Disk
    from app.report import Figures, Standing
    from kvstore.sessions import SessionBook
    from kvstore.snapshot import Snapshot, Totals
    from kvstore.transfer import Traffic

OUTCOMES = ("stop", "length", "cancelled", "failed", "queue_full", "context_too_long", "shutting_down")
"""How a turn that reached the store ended: an answer, no answer (`cancelled`: the client left), or a refusal."""

# Seconds: a warm short turn on an accelerator takes tens of milliseconds, a cold long one on a CPU tens of seconds, and
# behind a queue of such minutes.
LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300)

# From a small model on an accelerator to a busy CPU; a turn that was suspended in between takes longer still.
TOKEN_BUCKETS = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)

# From a warm session of a few blocks on an accelerator to a long one from a disk on a busy machine.
WAKE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
WAKE_TRIGGERS = ("hint", "arrival", "queue")
LOWER_TIERS = (Tier.DRAM, Tier.NVME)

GIVEN_HINTS = (WakeStatus.AWAKE.value, WakeStatus.WAKING.value)
DECLINED_HINTS = (
    *(status.value for status in WakeStatus if status.value not in GIVEN_HINTS),
    *(gone.value for gone in Gone),
    *("rate_limited", "unknown_branch"),
)
"""What hints were told: all that app.wakes can say, so that a new reason is an error and not a new series."""

DIRECTIONS = tuple((source, target) for source in Tier for target in Tier if source is not target)
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
        self.output_token_seconds = Histogram(
            "dormouse_output_token_seconds",
            "A turn's mean time for each output token after the first.",
            buckets=TOKEN_BUCKETS,
            registry=registry,
        )
        self.wake_seconds = Histogram(
            "dormouse_wake_seconds",
            "What turns waited for blocks that slept, by what set that off and the deepest tier they came from.",
            ["trigger", "source"],
            buckets=WAKE_BUCKETS,
            registry=registry,
        )
        self.hints = Counter(
            "dormouse_hints",
            "Hints by whether they were given to the store, and by what they were told.",
            ["outcome", "reason"],
            registry=registry,
        )
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
        for trigger in WAKE_TRIGGERS:
            for tier in LOWER_TIERS:
                self.wake_seconds.labels(trigger, tier.name.lower())
        for reason in GIVEN_HINTS:
            self.hints.labels("given", reason)
        for reason in DECLINED_HINTS:
            self.hints.labels("declined", reason)

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
        if figures.wake_trigger is not None:
            self.wake_seconds.labels(figures.wake_trigger, woke_from(figures.reused)).observe(figures.wake_seconds)
        if figures.first_token_at is not None:
            self.first_token_seconds.observe(figures.first_token_at)
            if figures.output_tokens > 1:
                decoding = figures.last_token_at - figures.first_token_at
                self.output_token_seconds.observe(decoding / (figures.output_tokens - 1))
        self.turn_seconds.observe(seconds)

    def count_hint(self, reason: str) -> None:
        """Count one hint that was answered with this status, or declined for this reason."""
        assert reason in GIVEN_HINTS or reason in DECLINED_HINTS, reason
        self.hints.labels("given" if reason in GIVEN_HINTS else "declined", reason).inc()

    def misses_by_reason(self) -> dict[str, int]:
        """Every reason, those that never came up included."""
        return _values(self.misses, "reason")

    def turns_by_outcome(self) -> dict[str, int]:
        """Turns that have ended, by how."""
        return _values(self.turns, "outcome")

    def prompt_tokens(self) -> dict[str, int]:
        """Where the tokens of all prompts came from: a tier, or computing, for the first time or again."""
        reused = _values(self.reused, "tier")
        return {**reused, "computed": _value(self.computed), "recomputed": _value(self.recomputed)}

    def watch_store(self, snapshot: Callable[[], Snapshot]) -> None:
        """Include the store's counters in every scrape from now on."""
        self.registry.register(StoreCollector(snapshot))

    def watch_sessions(self, book: SessionBook) -> None:
        """Include what the book remembers in every scrape from now on."""
        self.registry.register(SessionCollector(book))

    def watch_transfers(self, traffic: Mapping[tuple[Tier, Tier], Traffic]) -> None:
        """Include the copies between tiers, as counted in `traffic`, in every scrape from now on."""
        self.registry.register(TransferCollector(traffic))

    def watch_disk(self, disk: Disk) -> None:
        """Include the files of the NVMe tier and their catalog in every scrape from now on."""
        self.registry.register(DiskCollector(disk))

    def watch_board(self, board: Board) -> None:
        """Include the number of the state that /admin tells at the moment of a scrape."""
        self.registry.register(BoardCollector(board))

    def describe_model(self, labels: dict[str, str]) -> None:
        """A series that is always one and whose labels name what is served."""
        self.registry.register(_Constant(InfoMetricFamily("dormouse_model", "What is served.", value=labels)))


def _values(counter: Counter, label: str) -> dict[str, int]:
    samples = (sample for family in counter.collect() for sample in family.samples if sample.name.endswith("_total"))
    return {sample.labels[label]: int(sample.value) for sample in samples}


def _value(counter: Counter) -> int:
    return sum(int(sample.value) for family in counter.collect() for sample in family.samples)


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
        yield _health(
            "dormouse_tier_health",
            "1 for the state a tier is in: suspect takes nothing new, off is not read either.",
            "tier",
            {counts.tier.name.lower(): counts.health for counts in snapshot.tiers},
        )
        yield _gauge(
            "dormouse_dirty_blocks", "Blocks that are to be on NVMe some time and are not.", snapshot.dirty_blocks
        )
        yield _gauge("dormouse_sinking_blocks", "Dirty blocks to be copied to NVMe now.", snapshot.sinking_blocks)
        yield _gauge(
            "dormouse_erasing_slots",
            "Slots of NVMe whose bytes have to go before they are used again.",
            sum(counts.erasing for counts in snapshot.tiers),
        )
        yield _gauge("dormouse_turns_waiting", "Turns in the queue.", snapshot.turns.waiting)
        yield _gauge("dormouse_turns_suspended", "Turns whose slots were needed elsewhere.", snapshot.turns.suspended)
        yield _gauge("dormouse_turns_running", "Turns that hold slots.", snapshot.turns.granted)
        totals = snapshot.totals
        yield CounterMetricFamily("dormouse_suspensions", "Turns suspended.", totals.turns_suspended)
        yield CounterMetricFamily("dormouse_blocks_published", "Blocks made reusable.", totals.published)
        yield CounterMetricFamily("dormouse_blocks_evicted", "Last copies of blocks that gave way.", totals.evicted)
        yield CounterMetricFamily(
            "dormouse_blocks_released", "HBM copies that gave way and had another below.", totals.released
        )
        yield from self._bytes(totals)
        yield CounterMetricFamily("dormouse_blocks_found", "Blocks on NVMe from an earlier process.", totals.found)
        unread = CounterMetricFamily(
            "dormouse_blocks_unsound", "Blocks read below that were not what was written there.", labels=["reason"]
        )
        unread.add_metric(["corrupt"], totals.corrupt)
        unread.add_metric(["stale"], totals.stale)
        yield unread
        unsound = CounterMetricFamily(
            "dormouse_transfers_unsound", "Copies between tiers that failed or came late.", labels=["kind", "reason"]
        )
        unsound.add_metric(["load", "failed"], totals.loads_failed)
        unsound.add_metric(["load", "late"], totals.loads_late)
        unsound.add_metric(["down", "failed"], totals.demotions_failed)
        unsound.add_metric(["down", "late"], totals.demotions_late)
        yield unsound

    def _bytes(self, totals: Totals) -> Iterator[Metric]:
        """What lower tiers have taken and NVMe has given, whole blocks."""
        written = CounterMetricFamily("dormouse_written_bytes", "Blocks written to a tier.", labels=["tier"])
        written.add_metric(["dram"], totals.dram_bytes_written)
        written.add_metric(["nvme"], totals.nvme_bytes_written)
        read = CounterMetricFamily("dormouse_read_bytes", "Blocks read from a tier.", labels=["tier"])
        read.add_metric(["nvme"], totals.nvme_bytes_read)
        yield from (written, read)


class DiskCollector(Collector):
    """What lies in the NVMe directory, as far as the process knows without asking the disk, which may hang."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def collect(self) -> Iterator[Metric]:
        """One look at each."""
        catalog = self._disk.catalog.health
        yield _gauge("dormouse_nvme_quota_bytes", "What all slabs may take.", quota_bytes(self._disk))
        yield _gauge("dormouse_nvme_file_bytes", "What this model's slabs take.", self._disk.store.bytes_on_disk)
        yield _health(
            "dormouse_catalog_health",
            "1 for the state the catalog's file is in: off cannot be written.",
            "file",
            {"catalog": catalog.state},
        )
        yield CounterMetricFamily("dormouse_catalog_faults", "Commits that failed.", catalog.faults)
        yield _gauge("dormouse_catalog_pending", "Changes still to be committed.", catalog.pending)


class SessionCollector(Collector):
    """Sessions and branches that are remembered now."""

    def __init__(self, book: SessionBook) -> None:
        self._book = book

    def collect(self) -> Iterator[Metric]:
        """The book keeps count, so a scrape costs the same however many there are."""
        yield _gauge("dormouse_sessions", "Sessions remembered.", len(self._book))
        yield _gauge("dormouse_branches", "Branches of all sessions.", self._book.num_branches)


class TransferCollector(Collector):
    """Copies that have ended, by direction; every direction is there, whichever tiers are."""

    def __init__(self, traffic: Mapping[tuple[Tier, Tier], Traffic]) -> None:
        self._traffic = traffic

    def collect(self) -> Iterator[Metric]:
        labels = ["source", "target"]
        runs = CounterMetricFamily("dormouse_transfers", "Runs of blocks copied between tiers.", labels=labels)
        blocks = CounterMetricFamily("dormouse_transfer_blocks", "Blocks copied soundly.", labels=labels)
        size = CounterMetricFamily("dormouse_transfer_bytes", "Bytes of blocks copied soundly.", labels=labels)
        seconds = CounterMetricFamily("dormouse_transfer_seconds", "Time spent copying between tiers.", labels=labels)
        for source, target in DIRECTIONS:
            seen, names = self._traffic.get((source, target)), [source.name.lower(), target.name.lower()]
            runs.add_metric(names, seen.transfers if seen else 0)
            blocks.add_metric(names, seen.blocks if seen else 0)
            size.add_metric(names, seen.bytes if seen else 0)
            seconds.add_metric(names, seen.seconds if seen else 0.0)
        yield from (runs, blocks, size, seconds)


class BoardCollector(Collector):
    """Which of the states of `/admin/api/state?snapshot=N` a scrape agrees with."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def collect(self) -> Iterator[Metric]:
        """Nothing runs between this and the other families of a scrape, so all are of one moment."""
        number = self._board.take()["snapshot"]
        assert isinstance(number, int)
        yield _gauge("dormouse_snapshot", "The number of /admin/api/state that tells the same numbers.", number)


class _Constant(Collector):
    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric


def _health(name: str, text: str, label: str, states: Mapping[str, TierHealth]) -> Metric:
    """One series for each state that it may be in, so that an alert can ask for any."""
    family = GaugeMetricFamily(name, text, labels=[label, "state"])
    for whose, state in states.items():
        for possible in TierHealth:
            family.add_metric([whose, possible], state is possible)
    return family


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value)
