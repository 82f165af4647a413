"""What tests of models share: the embedded model's folder, fetched once per machine into the user's cache."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@pytest.fixture(scope="session")
def cache_dir() -> Path:
    """Where `dormouse serve` keeps the model by default, so that one download serves both."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("DORMOUSE_CACHE_DIR") or base / "dormouse")


@pytest.fixture(scope="session")
def embedded_folder(cache_dir: Path) -> Path:
    from models import embedded

    return embedded.fetch(cache_dir, progress=print)


@pytest.fixture(scope="session")
def tokenizer(embedded_folder: Path) -> Tokenizer:
    """The embedded model's own tokenizer, without transformers round it."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(embedded_folder / "tokenizer.json"))
