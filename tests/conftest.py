"""What every test shares: a quiet environment, and the rule for skips.

A test that needs what a machine lacks skips and says so. Under CI (`CI=true`, as .ci/run sets it) such a skip is a
failure, except for `gpu`: otherwise a suite goes green by testing less.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

# Before torch is imported: two threads, however many cores there are, so that timings and the order of sums in one
# machine's suite are those of another's.
os.environ.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
# Waiting threads sleep soon: spinning, two threads on two busy cores wait for each other for whole time slices,
# and a suite that runs beside anything else takes ten times as long.
os.environ.setdefault("GOMP_SPINCOUNT", "20000")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A test that would reach for the network fails at once instead of after its retries.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Slow callbacks, coroutines never awaited and calls from the wrong thread are said.
os.environ.setdefault("PYTHONASYNCIODEBUG", "1")

NO_SKIPS = os.environ.get("CI") == "true"

# No deadline: a busy machine is no bug. Under CI the same examples each time; elsewhere every run looks further.
hypothesis.settings.register_profile("dormouse", deadline=None, derandomize=NO_SKIPS)
hypothesis.settings.load_profile("dormouse")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not _has_cuda():
        pytest.skip("no CUDA device")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if NO_SKIPS and report.skipped and not hasattr(report, "wasxfail") and item.get_closest_marker("gpu") is None:
        _fail(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if NO_SKIPS and report.skipped:
        _fail(report)
    return report


def _fail(report: pytest.TestReport | pytest.CollectReport) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"{report.nodeid}: {reason}; CI installs what a test needs, so a skip there is a failure"


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def cache_dir() -> Path:
    """Where `dormouse serve` keeps the model by default, so that one download serves both."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("DORMOUSE_CACHE_DIR") or base / "dormouse")
