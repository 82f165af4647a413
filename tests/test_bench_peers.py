"""`bench peers`: samples taken in turns, and what they come to against the project's bars."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from rich.console import Console
from typer.testing import CliRunner

from bench.cli import cli
from bench.errors import BenchFailed
from bench.peers.against import Against, AgainstPlan, AgainstSamples
from bench.peers.recipes import Budget, Recipe, ours
from bench.peers.tables import part, table, verdicts
from bench.server import Server, free_port, running

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LLAMA = Recipe("llama-server", "llama-server", "/opt/llama-server")
VLLM = Recipe("vllm", "vllm", "/opt/vllm")
OURS = ours(["exact"], [])[0]


def samples(taken: dict[str, dict[str, list[float]]]) -> AgainstSamples:
    return AgainstSamples(AgainstPlan(), [recipe.name for recipe in (OURS, LLAMA, VLLM)], taken)


def test_a_line_is_held_against_its_own_peers_floor_and_goal() -> None:
    taken = {"decode 2000": {OURS.name: [0.03, 0.02, 0.04], "llama-server": [0.02] * 3, "vllm": [0.1, 0.1, 0.1]}}

    found = {each["peer"]: each for each in verdicts(samples(taken), [OURS, LLAMA, VLLM])}

    assert found["llama-server"]["ratio"] == pytest.approx(1.5)
    assert found["llama-server"]["verdict"] == "floor"
    assert (found["llama-server"]["low"], found["llama-server"]["high"]) == (pytest.approx(1.0), pytest.approx(2.0))
    assert found["vllm"]["verdict"] == "goal"


def test_prefill_is_held_against_the_better_peer_and_restarts_count_how_much_faster_we_are() -> None:
    taken = {
        "prefill 2000": {OURS.name: [1300.0], "llama-server": [1000.0], "vllm": [1100.0]},
        "next turn 5500 after a restart": {OURS.name: [0.2], "llama-server": [3.0]},
    }

    prefill, restart = verdicts(samples(taken), [OURS, LLAMA, VLLM])

    assert (prefill["peer"], prefill["verdict"]) == ("vllm", "below the floor")
    assert prefill["ratio"] == pytest.approx(1300 / 1100)
    assert (restart["ratio"], restart["verdict"]) == (pytest.approx(15.0), "below the floor")


def test_the_table_and_the_json_have_every_line_that_was_taken() -> None:
    some = samples({"4 streams": {OURS.name: [150.0, 160.0], "llama-server": [180.0]}})
    some.failures.append("vllm, streams: it ended")
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table(some, [OURS, LLAMA, VLLM]))

    assert "160.0" in capture.get()
    assert "vllm, streams: it ended" in capture.get()
    first, rest = json.loads(json.dumps(part(some, [OURS, LLAMA, VLLM])))
    assert first["line"] == "4 streams"
    assert rest["failures"] == ["vllm, streams: it ended"]


class Failing(Recipe):
    """A server that never gets ready."""

    @contextmanager
    def started(self, kept: Path, budget: Budget | None = None) -> Iterator[Server]:
        if not self.program:
            raise BenchFailed("it ended")
        yield Server("", 0.0)


def test_a_server_that_fails_is_told_and_the_others_go_on() -> None:
    recipes = [Failing("one", "vllm"), Failing("other", "llama-server")]
    done: list[str] = []
    kept: list[int] = []
    plan = AgainstPlan(("restart", "sessions"), repeats=2, session_repeats=1)

    found = Against(recipes, plan, None, done.append, lambda some: kept.append(len(some.failures))).run()

    assert done == ["restart 1, one", "restart 1, other", "restart 2, other", "restart 2, one", *done[4:]]
    assert len(done) == plan.num_rounds * 2
    assert found.failures[0] == "one, restart 1: it ended"
    assert kept == [2, 4, 6]


def test_every_server_gets_the_same_budget() -> None:
    budget = Budget(2 * 1024**3)

    def told(recipe: Recipe) -> list[str]:
        command, _, variables = recipe.command(1, recipe.weights, budget)
        return [*command, *(f"{name}={value}" for name, value in variables.items())]

    def after(words: list[str], flag: str) -> int:
        return int(words[words.index(flag) + 1])

    mine = told(OURS)
    assert after(mine, "--hbm-bytes") + after(mine, "--dram-bytes") == budget.memory_bytes
    assert after(told(LLAMA), "--cache-ram") == 2048
    assert "VLLM_CPU_KVCACHE_SPACE=2" in told(VLLM)


def test_without_a_peer_there_is_nothing_to_compare_with(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["peers", "--weights", str(tmp_path)])

    assert done.exit_code == 1
    assert "name a peer" in done.stderr


def test_a_program_that_ends_before_it_answers_is_told_with_its_last_words() -> None:
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]

    with (
        pytest.raises(BenchFailed, match=r"peer ended with 3:\nno such model"),
        running("peer", command, f"http://127.0.0.1:{free_port()}", "/health"),
    ):
        pass


def test_a_program_that_is_not_there_is_told() -> None:
    with (
        pytest.raises(BenchFailed, match="peer cannot be started"),
        running("peer", ["/nowhere/llama-server"], "http://127.0.0.1:9", "/health"),
    ):
        pass
