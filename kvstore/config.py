"""Sizes and limits of the planner: one frozen value (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvstore.events import WritePolicy


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """What the planner may use, and how long it waits.

    A waiter older than `age_limit_seconds` holds younger admissions back. A load that takes longer
    than `wake_deadline_seconds`, or a copy down longer than `demote_deadline_seconds`, is not waited
    for; a tier that failed at taking a block gets no more for `tier_backoff_seconds`. `ring_slots`
    pass blocks between HBM and NVMe, as many up as down: up [0, n), down [n, 2n).

    `slot_bytes` is what one block costs to write; without it bytes are counted as 0, and nothing is ever
    more than `nvme_rated_bytes_per_day` (0: no rating). A branch shorter than `nvme_min_tokens` is not kept on
    NVMe. After `late_reads_until_off` deadlines in a row on reads of a tier it is asked every `probe_seconds`
    whether it works, and not read until it does.
    """

    hbm_slots: int
    block_tokens: int
    max_running: int
    max_queue: int
    age_limit_seconds: float
    output_slice_tokens: int = 64
    dram_slots: int = 0
    nvme_slots: int = 0
    ring_slots: int = 8
    max_transfers: int = 8  # each direction between two tiers
    max_hints: int = 16
    look_ahead_turns: int = 4  # of the queue, whose blocks are brought up before they are admitted
    wake_deadline_seconds: float = 2.0
    demote_deadline_seconds: float = 2.0
    tier_backoff_seconds: float = 5.0
    slot_bytes: int = 0
    nvme_write_policy: WritePolicy = WritePolicy.AUTO
    nvme_rated_bytes_per_day: int = 0
    nvme_min_tokens: int = 0
    idle_to_nvme_seconds: float = 60.0
    late_reads_until_off: int = 3
    probe_seconds: float = 1.0
    cost_gate: Literal["auto", "off"] = "auto"
    # As start-up measured them; 0: not known, and then nothing is taken for cheaper to compute until it is.
    prefill_tokens_per_second: float = 0.0
    dram_blocks_per_second: float = 0.0
    nvme_blocks_per_second: float = 0.0
    predict_returns: bool = False
    predict_lead_seconds: float = 1.0  # how much earlier than expected a branch is woken
    clean_share: float = 0.25  # of HBM: that much is free or leaves without IO, as far as free DRAM allows
    # Shares of a tier that would need IO to be freed: above `high` the coldest are copied down until `low`.
    hbm_high: float = 0.90
    hbm_low: float = 0.80
    dram_high: float = 0.85
    dram_low: float = 0.75

    def __post_init__(self) -> None:
        assert self.hbm_slots > 0
        assert self.dram_slots >= 0
        assert self.nvme_slots >= 0
        assert self.ring_slots > 0 or not self.nvme_slots, "blocks pass between HBM and NVMe through ring slots"
        assert self.block_tokens > 0
        assert self.max_running > 0
        assert self.max_queue >= 0
        assert self.output_slice_tokens > 0
        assert self.look_ahead_turns >= 0
        assert 0.0 < self.hbm_low < self.hbm_high <= 1.0
        assert 0.0 < self.dram_low < self.dram_high <= 1.0

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens, the last one partial or not."""
        return -(-tokens // self.block_tokens)
