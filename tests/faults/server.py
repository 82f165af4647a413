"""A real server on the tiny model and a directory, and what tests of faults ask of it."""

from __future__ import annotations

import functools
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

from app import startup
from app.settings import Settings
from kvstore.types import Tier
from tests.app.live import Live, client, live

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import httpx

    from kvstore.tiers.file_io import FileIO

MIB = 1024**2
BLOCK_TOKENS = 16
WAIT_SECONDS = 20.0
USERS = (
    "Tell me of {name}, of mice, and of how they sleep through the winter. " * 8,
    "And then, when the snow is gone? " * 4,
    "And after that? " * 8,
    "Is that the end? " * 8,
    "And where is it now? " * 4,
    "Does it still sleep? " * 4,
)
"""What every conversation says; `name` tells them apart from their first block on."""


def settings(model: Path, root: Path | None, **more: Any) -> Settings:
    """Of a server whose NVMe directory is `root`; None: it keeps nothing on disk."""
    defaults: dict[str, Any] = {
        "model": str(model),
        "served_model_name": ("tiny",),
        "cache_dir": model.parent / "cache",
        "attention": "fast",
        "dtype": "fp32",
        "block_tokens": BLOCK_TOKENS,
        "hbm_bytes": 4 * MIB,
        "dram_bytes": 1 * MIB,
        "drain_seconds": 3,
        "tier_backoff_seconds": 0.2,
        "cost_gate": "off",
    }
    if root is not None:
        defaults |= {"nvme_dir": root, "nvme_bytes": 4 * MIB, "nvme_free_share": 0.0}
    return Settings(**(defaults | more))


@dataclass(slots=True)
class Talk:
    """One conversation: what its model has answered so far."""

    name: str
    texts: list[str] = field(default_factory=list)

    @property
    def id(self) -> str:
        """Of its session."""
        return self.name.replace(" ", "-")

    def messages(self) -> list[dict[str, str]]:
        said = [_message("system", f"{self.name}: that is whom you talk to.")]
        for user, text in zip(USERS, self.texts, strict=False):
            said += [_message("user", user.format(name=self.name)), _message("assistant", text)]
        return [*said, _message("user", USERS[len(self.texts)].format(name=self.name))]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


class Server:
    """See the module."""

    def __init__(self, http: httpx.Client, server: Live) -> None:
        self.http = http
        self.live = server

    def say(self, talk: Talk, **fields: Any) -> dict[str, Any]:
        """The talk's next turn; its `session` object."""
        body = {
            "model": "tiny",
            "messages": talk.messages(),
            "session_id": talk.id,
            "max_tokens": 8,
            "temperature": 0.0,
            **fields,
        }
        response = self.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        told = response.json()
        talk.texts.append(told["choices"][0]["message"]["content"])
        session: dict[str, Any] = told["session"]
        return session

    def sleep(self, talk: Talk, tier: str = "nvme") -> dict[str, Any]:
        told: dict[str, Any] = self.http.post(f"/v1/sessions/{talk.id}/sleep", params={"tier": tier}).json()
        return told

    def blocks(self, talk: Talk) -> dict[str, int]:
        """Of its latest branch, by tier."""
        branches = self.http.get(f"/v1/sessions/{talk.id}").json()["branches"]
        blocks: dict[str, int] = branches[-1]["blocks"]
        return blocks

    def asleep(self, talk: Talk) -> None:
        """Put it to sleep on NVMe, all of it, and nowhere else."""
        assert self.sleep(talk)["status"] == "asleep"
        blocks = self.blocks(talk)
        assert blocks["nvme"] > 0
        assert (blocks["hbm"], blocks["dram"]) == (0, 0), blocks

    def state(self) -> dict[str, Any]:
        told: dict[str, Any] = self.http.get("/admin/api/state").json()
        return told

    def metric(self, name: str, **labels: str) -> float:
        """One sample of /metrics."""
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return sample.value
        raise AssertionError(f"/metrics has no {name}{labels}")

    def health(self) -> dict[str, Any]:
        """What /healthz says; /readyz agrees, and neither is ever an error for what a disk does."""
        alive, ready = self.http.get("/healthz"), self.http.get("/readyz")
        assert (alive.status_code, ready.status_code) == (200, 200)
        told: dict[str, Any] = alive.json()
        return told

    def wait_for(self, what: Callable[[], bool]) -> None:
        """Until something that nothing announces has come about, such as a commit or a probe."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not what():
            assert time.monotonic() < deadline, f"never came true; {self.health()}, {self.live.gateway.manager!r}"
            time.sleep(0.02)

    def settle(self) -> None:
        """Everything that is to be on disk is."""
        self.wait_for(lambda: self.state()["dirty_blocks"] == 0)
        assert self.live.gateway.disk is not None
        assert self.live.gateway.disk.catalog.wait(WAIT_SECONDS)

    def check_missed(self, told: dict[str, Any], reason: str) -> None:
        """A turn was told that it missed, for `reason`, and so were the counters."""
        assert told["miss_reason"] == reason, f"{told} {self.state()}"
        assert self.metric("dormouse_misses_total", reason=reason) >= 1
        assert self.state()["misses"][reason] >= 1

    def check_sound(self) -> None:
        """Idle, nothing held, all laws hold."""
        self.wait_for(lambda: self.live.gateway.manager.snapshot().transfers == 0)
        self.live.check_idle()
        for tier in self.live.call(self.live.gateway.manager.snapshot).tiers:
            assert (tier.pinned, tier.open, tier.filling) == (0, 0, 0), tier
            assert tier.tier is Tier.NVME or tier.quarantined == 0


@contextmanager
def serving(configured: Settings, files: FileIO | None = None) -> Iterator[Server]:
    """Until the block ends; then as on SIGTERM."""
    with live(configured, functools.partial(startup.opened, files=files)) as server, client(server) as http:
        yield Server(http, server)
