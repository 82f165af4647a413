"""Public benchmarks, unmodified, the embedded model's folder their tokenizer: they count what the server counts.

Their commands are those of docs/benchmarks.md, but for the numbers.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from models.embedded import NAME
from tests.clients.environments import CHECKOUT, python_with, run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.clients.conftest import Server

pytestmark = [pytest.mark.clients, pytest.mark.timeout(3600)]

TURNS = 3
CONVERSATIONS = 2
PROMPT_TOKENS = 48
OUTPUT_TOKENS = 12


@pytest.fixture(scope="module")
def tokenizer_folder() -> str:
    """What `dormouse model path` prints."""
    return run(sys.executable, "-m", "dormouse_gateway", "model", "path", cwd=CHECKOUT).strip()


class Counted:
    """The server's counters since this was made."""

    def __init__(self, server: Server) -> None:
        self._url = f"{server.url}/metrics"
        self._before = self._counters()

    def _counters(self) -> dict[str, float]:
        text = httpx.get(self._url, trust_env=False).text
        return {
            "/".join([sample.name, *sample.labels.values()]): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.endswith("_total")
        }

    def __call__(self, name: str) -> int:
        """How much the counters of this name, or of this name and label, grew."""
        now = self._counters()
        return round(
            sum(value - self._before.get(key, 0) for key, value in now.items() if key == name or key.startswith(name))
        )


def test_guidellm_counts_what_the_server_counts(server: Server, tokenizer_folder: str, tmp_path: Path) -> None:
    guidellm = python_with("guidellm", "guidellm==0.8.1") / "guidellm"
    since = Counted(server)
    report = tmp_path / "report.json"
    data = {"kind": "synthetic_text", "prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS, "turns": TURNS}
    run(
        *(guidellm, "run", "--disable-progress"),
        *("--backend", f"kind=openai_http,target={server.url},model={NAME}"),
        *("--tokenizer", f"kind=huggingface_auto,model={tokenizer_folder}"),
        *("--data", ",".join(f"{key}={value}" for key, value in data.items())),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", f"kind=max_requests,count={TURNS * CONVERSATIONS}"),
        *("--output", f"kind=json,path={report}"),
        cwd=tmp_path,
        env={"HF_HUB_OFFLINE": "1"},
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests: dict[str, list[dict[str, Any]]] = benchmark["requests"]
    assert len(requests["successful"]) == since("dormouse_turns_total") == TURNS * CONVERSATIONS
    assert not requests["errored"]
    assert not requests["incomplete"]
    told = [(each["input_metrics"], each["output_metrics"]) for each in requests["successful"]]
    assert sum(into["text_tokens"] for into, _ in told) == since("dormouse_tokens_total/prompt")
    assert sum(out["text_tokens"] for _, out in told) == since("dormouse_tokens_total/output")
    assert sum(into["cached_tokens"] or 0 for into, _ in told) == since("dormouse_reused_tokens_total") > 0


def test_aiperf_counts_what_the_server_counts(server: Server, tokenizer_folder: str, tmp_path: Path) -> None:
    aiperf = python_with("aiperf", "aiperf==0.13.0") / "aiperf"
    since = Counted(server)
    run(
        *(aiperf, "profile", "--model", NAME, "--url", server.url, "--endpoint-type", "chat", "--streaming"),
        *("--tokenizer", tokenizer_folder, "--use-server-token-count"),
        *("--conversation-num", str(CONVERSATIONS), "--conversation-turn-mean", str(TURNS)),
        *("--conversation-turn-stddev", "0", "--concurrency", "2"),
        *("--isl", str(PROMPT_TOKENS), "--isl-stddev", "0", "--osl", str(OUTPUT_TOKENS), "--osl-stddev", "0"),
        *("--session-header", "X-Session-ID", "--ui", "none", "--export-level", "records"),
        *("--artifact-dir", tmp_path),
        cwd=tmp_path,
        env={"HF_HUB_OFFLINE": "0"},  # offline it takes a folder for the name of a repository
    )
    (export,) = tmp_path.rglob("profile_export.jsonl")
    records = [json.loads(line) for line in export.read_text().splitlines()]
    assert len(records) == since("dormouse_turns_total") == TURNS * CONVERSATIONS

    def total(metric: str) -> int:
        return sum(int(record["metrics"][metric]["value"]) for record in records)

    assert total("usage_prompt_tokens") == since("dormouse_tokens_total/prompt")
    assert total("usage_completion_tokens") == since("dormouse_tokens_total/output")
    assert since("dormouse_reused_tokens_total") > 0
