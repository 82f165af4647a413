"""A server on the tiny model with every tier, for what the docs say of a running one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from models import embedded
from tests.faults import tiny
from tests.faults.server import Server, serving, settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Path:
    return tiny.save(tmp_path_factory.mktemp("models") / "tiny", embedded.fetch(cache_dir, progress=print))


@pytest.fixture
def server(tiny_model: Path, tmp_path: Path) -> Iterator[Server]:
    with serving(settings(tiny_model, tmp_path / "nvme")) as running:
        yield running
