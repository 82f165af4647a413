"""Fingerprints: every byte counts, what is remembered is trusted only while the file stays the same."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

import pytest

from kvstore.types import KVLayout, LayerKV
from models.fingerprint import file_digest, fingerprint, model_key

if TYPE_CHECKING:
    from pathlib import Path

LAYOUT = KVLayout((LayerKV(3, 64),), 32, "bf16", 2)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(range(256)) * 100)
    return file


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_one_changed_byte_changes_the_fingerprint(weights: Path, cache: Path) -> None:
    before = fingerprint([weights], cache)
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert fingerprint([weights], cache) != before
    assert len(before) == 16


def test_order_and_folder_do_not_matter_but_names_do(tmp_path: Path, cache: Path) -> None:
    for folder, names in (("a", ("x", "y")), ("b", ("x", "y")), ("c", ("x", "z"))):
        (tmp_path / folder).mkdir()
        for name, content in zip(names, (b"one", b"two"), strict=True):
            (tmp_path / folder / name).write_bytes(content)
    here = fingerprint([tmp_path / "a" / "x", tmp_path / "a" / "y"], cache)
    assert here == fingerprint([tmp_path / "b" / "y", tmp_path / "b" / "x"], cache)
    assert here != fingerprint([tmp_path / "c" / "x", tmp_path / "c" / "z"], cache)


def test_a_digest_is_remembered_while_path_size_time_and_inode_are_the_same(weights: Path, cache: Path) -> None:
    file_digest(weights, cache)
    (entry,) = (cache / "fingerprints").iterdir()
    content = json.loads(entry.read_bytes())
    content["xxh3_128"] = "ab" * 16  # shows whether the file is read again
    entry.write_text(json.dumps(content))
    assert file_digest(weights, cache).hex() == "ab" * 16
    os.utime(weights, ns=(0, 12345))
    assert file_digest(weights, cache).hex() != "ab" * 16


@pytest.mark.parametrize("broken", [b"", b"{", b"[]", b'{"identity": 1}', b"\xff\xfe"])
def test_a_broken_cache_file_is_ignored_and_mended(weights: Path, cache: Path, broken: bytes) -> None:
    digest = file_digest(weights, cache)
    (entry,) = (cache / "fingerprints").iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(broken)
    assert file_digest(weights, cache) == digest
    assert entry.read_bytes() == whole


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(weights: Path, tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_bytes(b"")
    assert file_digest(weights, in_the_way) == file_digest(weights, tmp_path / "cache")


def test_the_embedded_models_fingerprint_takes_under_a_second(embedded_folder: Path, cache_dir: Path) -> None:
    files = list(embedded_folder.glob("*.safetensors"))
    first = fingerprint(files, cache_dir)
    start = time.perf_counter()
    assert fingerprint(files, cache_dir) == first
    assert time.perf_counter() - start < 1.0


def test_everything_that_shapes_kv_is_in_the_model_key() -> None:
    keys = {
        model_key(b"w" * 16, "bf16", LAYOUT, {"rope": 1.0}),
        model_key(b"v" * 16, "bf16", LAYOUT, {"rope": 1.0}),
        model_key(b"w" * 16, "fp32", LAYOUT, {"rope": 1.0}),
        model_key(b"w" * 16, "bf16", KVLayout((LayerKV(3, 64),), 16, "bf16", 2), {"rope": 1.0}),
        model_key(b"w" * 16, "bf16", LAYOUT, {"rope": 2.0}),
        model_key(b"w" * 16, "bf16", LAYOUT, {"rope": 1.0}, adapter="lora"),
    }
    assert len(keys) == 6
    assert {len(key) for key in keys} == {16}
    assert model_key(b"w" * 16, "bf16", LAYOUT, {"a": 1, "b": 2}) == model_key(
        b"w" * 16, "bf16", LAYOUT, {"b": 2, "a": 1}
    )
