"""Does this machine compute the same bits however a prompt is cut and whatever else is in the batch?

The rules of attention.py make exactness possible; whether it holds depends on the matmul
library's kernels for the CPU or GPU at hand. So it is tried, on the very model to be served,
and the verdict is kept by everything it may depend on.
"""

from __future__ import annotations

import hashlib
import json
import platform
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from models.attention import TILE_TOKENS
from models.runner import Chunk, Runner

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from kvstore.types import KVLayout

PROMPT_TOKENS = 2 * TILE_TOKENS + 90
"""Three tiles, the last one partial, as in any conversation."""

RULES_VERSION = 3
"""Raise when attention.py computes anything differently: verdicts of older code are then forgotten."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether bits were equal, and if not, where they first differed."""

    is_exact: bool
    reason: str


def check(model: PreTrainedModel, layout: KVLayout, runner: type[Runner] = Runner) -> Verdict:
    """Compute one prompt in one pass, in chunks, token by token and among others; compare logits and K/V bitwise."""
    probe = _Probe(model, layout, runner)
    for name, differs in (
        ("in chunks of 37 tokens", probe.differs_in_chunks()),
        ("token by token", probe.differs_token_by_token()),
        ("among other sequences", probe.differs_in_company()),
    ):
        if differs:
            return Verdict(False, f"{differs} differed {name}")
    return Verdict(True, "logits and K/V were bit-equal in one pass, in chunks, token by token and among others")


def choose(
    mode: Literal["auto", "exact", "fast"],
    model: PreTrainedModel,
    layout: KVLayout,
    model_key: bytes,
    cache_dir: Path,
) -> tuple[bool, str]:
    """Whether to take the exact path, and a line that says why.

    `auto` is exact in bf16 where the check proves it; `exact` is honoured everywhere, and the
    line says what it is worth on this machine.
    """
    if mode == "fast":
        return False, "attention fast, as asked for: text may depend on how requests were batched"
    if mode == "auto" and model.dtype != torch.bfloat16:
        return False, f"attention fast: exact is proven in bf16 only, and this is {model.dtype}".replace("torch.", "")
    verdict = cached_check(model, layout, model_key, cache_dir)
    if verdict.is_exact:
        return True, f"attention exact: {verdict.reason}"
    if mode == "exact":
        return True, f"attention exact, as asked for, but this machine is not: {verdict.reason}"
    return False, f"attention fast: {verdict.reason} on this machine"


def mode_key(model_key: bytes, is_exact: bool) -> bytes:
    """`model_key` with the attention path in it: K/V of one path must not be taken for the other's."""
    return hashlib.blake2b(model_key, digest_size=len(model_key), person=b"exact" if is_exact else b"fast").digest()


def cached_check(model: PreTrainedModel, layout: KVLayout, model_key: bytes, cache_dir: Path) -> Verdict:
    """`check`, once per machine, torch, thread count and model; a few seconds where it was never run."""
    path = cache_dir / "exactness" / f"{_identity(model, model_key)}.json"
    try:
        kept = json.loads(path.read_text())
        return Verdict(bool(kept["is_exact"]), str(kept["reason"]))
    except (OSError, ValueError, KeyError, TypeError):
        pass  # never run, or not readable: run it
    verdict = check(model, layout)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"is_exact": verdict.is_exact, "reason": verdict.reason}))
    except OSError:
        pass  # a cache folder that cannot be written costs the next start a few seconds
    return verdict


def _identity(model: PreTrainedModel, model_key: bytes) -> str:
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else _cpu_flags()
    parts = [RULES_VERSION, torch.__version__, torch.get_num_threads(), torch.backends.mkldnn.enabled, device]
    digest = hashlib.blake2b(model_key, digest_size=12)
    for part in parts:
        digest.update(f"{part}\n".encode())
    return digest.hexdigest()


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


class _Probe:
    """One prompt and the bits it got in a single pass."""

    def __init__(self, model: PreTrainedModel, layout: KVLayout, runner: type[Runner]) -> None:
        self._blocks = layout.blocks_for(PROMPT_TOKENS)
        self._runner = runner(model, layout, slots=3 * self._blocks)
        vocabulary = int(model.config.get_text_config().vocab_size)
        generator = torch.Generator().manual_seed(0)
        self._prompt = _random_ids(PROMPT_TOKENS, vocabulary, generator)
        self._other = _random_ids(PROMPT_TOKENS, vocabulary, generator)
        self._expected = self._run([PROMPT_TOKENS], table=0)

    def differs_in_chunks(self) -> str:
        return self._compare(self._run([37] * (PROMPT_TOKENS // 37 + 1), table=1))

    def differs_token_by_token(self) -> str:
        return self._compare(self._run([PROMPT_TOKENS - 5, 1, 1, 1, 1, 1], table=1))

    def differs_in_company(self) -> str:
        return self._compare(self._run([PROMPT_TOKENS - 70, 64, 5, 1], table=1, company=True))

    def _slots(self, table: int) -> list[int]:
        return list(range(table * self._blocks, (table + 1) * self._blocks))

    def _run(self, sizes: list[int], table: int, *, company: bool = False) -> tuple[Tensor, Tensor]:
        """Logits after the last token, and the K/V of all full blocks."""
        position, logits = 0, torch.empty(0)
        for size in sizes:
            part = self._prompt[position : position + size]
            if not part:
                break
            chunks = [Chunk(part, position, self._slots(table), wants_logits=True)]
            if company:
                start = min(position // 2, PROMPT_TOKENS - 1)
                other = self._other[start : start + max(1, size // 2)]
                chunks.append(Chunk(other, start, self._slots(2), wants_logits=True))
            logits = self._runner.run(chunks)[0].clone()
            position += len(part)
        full = PROMPT_TOKENS // self._runner.layout.block_tokens
        return logits, torch.stack([self._runner.arena.slot(slot) for slot in self._slots(table)[:full]])

    def _compare(self, got: tuple[Tensor, Tensor]) -> str:
        for name, mine, expected in zip(("logits", "K/V"), got, self._expected, strict=True):
            if not torch.equal(mine, expected):
                return name
        return ""


def _random_ids(count: int, vocabulary: int, generator: torch.Generator) -> array[int]:
    return array("I", torch.randint(vocabulary, (count,), generator=generator).tolist())
