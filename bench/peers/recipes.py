"""How each server is started, with the same weights and budgets; docs of the flags are in bench/peers.md."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bench.convert_weights import FILE_NAME
from bench.errors import BenchFailed
from bench.machine import num_cores
from bench.server import ROOT, free_port, running

if TYPE_CHECKING:
    from bench.server import Server

PEERS = ("llama-server", "vllm", "transformers")
READY_SECONDS = 900.0
CONTEXT_TOKENS = 8192
"""Of one conversation: more than any line has."""

BUDGETED_TOKENS = 2048
"""The same of the line with a budget."""

LLAMA_SLOTS = 16
GIB = 1024**3
MIB = 1024**2


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes of K/V in memory, for whoever can be told; ours splits them into HBM and DRAM."""

    memory_bytes: int
    hbm_share: float = 0.25


@dataclass(frozen=True, slots=True)
class Recipe:
    """One server. `program` is the peer's executable; ours has none."""

    name: str
    kind: str
    program: str = ""
    weights: Path = Path()
    flags: tuple[str, ...] = ()
    """After those made here."""
    attention: str = field(default="")

    @property
    def is_ours(self) -> bool:
        return self.kind == "dormouse"

    @contextmanager
    def started(self, kept: Path, budget: Budget | None = None) -> Iterator[Server]:
        """Running, on a free port; what it keeps on disk, if it does, is in `kept`.

        Raises:
            BenchFailed: it did not get ready.
        """
        port = free_port()
        command, ready_path, variables = self.command(port, kept, budget)
        with running(
            self.name,
            command,
            f"http://127.0.0.1:{port}",
            ready_path,
            cwd=ROOT if self.is_ours else None,
            variables=variables,
            ready_seconds=READY_SECONDS,
        ) as server:
            yield server

    def command(self, port: int, kept: Path, budget: Budget | None) -> tuple[list[str], str, dict[str, str]]:
        """Its words, where it says that it is ready, and its variables.

        Raises:
            BenchFailed: there is no such peer.
        """
        where = ["--host", "127.0.0.1", "--port", str(port)]
        match self.kind:
            case "dormouse":
                command = [sys.executable, "-m", "dormouse_gateway", "serve", *where, "--nvme-dir", str(kept)]
                return [*command, "--attention", self.attention, *_ours(budget), *self.flags], "/readyz", {}
            case "llama-server":
                command = [self.program, "-m", str(self.weights / FILE_NAME), *where, *_llama(budget)]
                return [*command, *self.flags], "/health", {}
            case "vllm":
                command = [self.program, "serve", str(self.weights / "hf"), *where]
                fixed = ["--dtype", "bfloat16", "--max-model-len", str(CONTEXT_TOKENS), "--enable-prefix-caching"]
                gib = 4 if budget is None else max(1, round(budget.memory_bytes / GIB))
                variables = {"VLLM_CPU_KVCACHE_SPACE": str(gib), "VLLM_NO_USAGE_STATS": "1"}
                return [*command, *fixed, *self.flags], "/health", variables
            case "transformers":
                command = [self.program, "serve", str(self.weights / "hf"), *where]
                return [*command, "--dtype", "bfloat16", *self.flags], "/health", {}
            case _:
                raise BenchFailed(f"no peer {self.kind!r}: there are {', '.join(PEERS)}")


def _ours(budget: Budget | None) -> list[str]:
    if budget is None:
        return ["--hbm-bytes", "4GiB"]
    hbm = round(budget.memory_bytes * budget.hbm_share)
    return ["--hbm-bytes", str(hbm), "--dram-bytes", str(budget.memory_bytes - hbm)]


def _llama(budget: Budget | None) -> list[str]:
    """Its slots have memory of their own beside the cache that the budget is for: with a budget no more than needed."""
    cache = 8192 if budget is None else budget.memory_bytes // MIB
    context = CONTEXT_TOKENS if budget is None else BUDGETED_TOKENS
    fixed = ["-c", str(LLAMA_SLOTS * context), "-np", str(LLAMA_SLOTS), "-t", str(num_cores())]
    return [*fixed, "-fa", "on", "--cache-ram", str(cache), "--no-webui", "--jinja"]


def ours(attention: Sequence[str], flags: Sequence[str]) -> list[Recipe]:
    """One for each way of attention."""
    return [Recipe(f"dormouse {mode}", "dormouse", flags=tuple(flags), attention=mode) for mode in attention]
