from __future__ import annotations

from pathlib import Path

import pytest

from app.cgroup import Group, tightest

UNLIMITED_V1 = 9223372036854771712


def group(folder: Path, version: int, limit: int | str, usage: int, reclaimable: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}[version]
    key = {1: "total_inactive_file", 2: "inactive_file"}[version]
    for name, value in zip(names, (limit, usage), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{key} {reclaimable}\n")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return tmp_path / "own"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "fs"


def test_the_tightest_limit_above_us_holds(root: Path, own: Path) -> None:
    own.write_text("0::/a/b\n")
    group(root / "a/b", 2, "max", 10)
    group(root / "a", 2, 1000, 900)
    group(root, 2, 5000, 1000)
    assert tightest(root, own) == Group(1000, 100)


def test_page_cache_counts_as_free(root: Path, own: Path) -> None:
    own.write_text("0::/\n")
    group(root, 2, 1000, 900, reclaimable=300)
    assert tightest(root, own) == Group(1000, 400)


def test_version_one_is_read_under_its_controller(root: Path, own: Path) -> None:
    own.write_text("5:cpu:/x\n4:memory:/x\n0::/\n")
    group(root / "memory/x", 1, 2000, 500)
    group(root / "memory", 1, UNLIMITED_V1, 500)
    assert tightest(root, own) == Group(2000, 1500)


def test_a_host_path_seen_from_a_container_falls_back_to_the_top(root: Path, own: Path) -> None:
    own.write_text("0::/docker/0123\n")
    group(root, 2, 700, 100)
    assert tightest(root, own) == Group(700, 600)


def test_without_limits_there_is_none(root: Path, own: Path) -> None:
    own.write_text("0::/a\n")
    group(root / "a", 2, "max", 10)
    assert tightest(root, own) is None
    assert tightest(root, own.with_name("missing")) is None


def test_usage_over_the_limit_leaves_nothing_rather_than_less(root: Path, own: Path) -> None:
    own.write_text("0::/\n")
    group(root, 2, 1000, 1200)
    assert tightest(root, own) == Group(1000, 0)
