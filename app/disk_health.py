"""How the NVMe tier does: what `/healthz`, `/readyz`, `/metrics` and `/admin/api/state` say of it.

A disk that fails costs reuse and never an answer, so it makes a server degraded, not unready. Everything here is
counted already: nothing is asked of a disk, which may hang.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.events import TierHealth
from kvstore.types import Tier

if TYPE_CHECKING:
    from app.disk import Disk
    from app.gateway import Gateway


@dataclass(frozen=True, slots=True)
class DiskHealth:
    """`reasons` say what the disk last answered, in words; empty where it does well."""

    blocks: TierHealth
    catalog: TierHealth
    reasons: tuple[str, ...]

    @property
    def is_degraded(self) -> bool:
        return self.blocks is not TierHealth.OK or self.catalog is not TierHealth.OK

    def as_json(self) -> dict[str, object]:
        return {"blocks": self.blocks, "catalog": self.catalog, "reasons": list(self.reasons)}


def disk_health(gateway: Gateway) -> DiskHealth | None:
    """As of now; None where nothing is kept on disk."""
    disk, tiers = gateway.disk, gateway.manager.snapshot().tiers
    if disk is None or len(tiers) <= Tier.NVME:
        return None
    blocks, catalog = tiers[Tier.NVME].health, disk.catalog.health
    reasons = [] if blocks is TierHealth.OK else list(disk.store.faults) or ["the disk does not answer in time"]
    if catalog.state is not TierHealth.OK:
        reasons.append(f"catalog: {catalog.reason}")
    return DiskHealth(blocks, catalog.state, tuple(reasons))


def standing(gateway: Gateway) -> dict[str, object]:
    """`status` for probes, and why where it is not the best one."""
    health = disk_health(gateway)
    if health is None or not health.is_degraded:
        return {"status": "ok"}
    return {"status": "degraded", "nvme": health.as_json()}


def disk_state(gateway: Gateway) -> dict[str, object] | None:
    """The tier in numbers, beside what the store's snapshot says of it; None where there is none."""
    health, disk = disk_health(gateway), gateway.disk
    if health is None or disk is None:
        return None
    catalog = disk.catalog.health
    return {
        "path": str(disk.directory.root),
        "io": disk.store.io,
        "health": health.as_json(),
        "quota_bytes": quota_bytes(disk),
        "file_bytes": disk.store.bytes_on_disk,
        "catalog_faults": catalog.faults,
        "catalog_pending": catalog.pending,
        "unreadable_histories": {fault.value: count for fault, count in gateway.keeper.unreadable.items()},
    }


def quota_bytes(disk: Disk) -> int:
    """What all slabs together may take; 0 is no limit."""
    return disk.directory.quota_bytes or 0
