"""The kernels are compiled once, and where they cannot be the reason is said."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

import pytest

from models import loader
from models.errors import KernelsUnavailable
from models.native import compiler

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path, cache_dir: Path) -> Path:
    """An empty cache folder, on a machine that has kernels in its own."""
    try:
        compiler.library(cache_dir)
    except compiler.NoKernels as error:
        pytest.skip(f"no kernels here: {error}")
    return tmp_path / "cache"


def compiler_that(folder: Path, does: str) -> str:
    """A search path with a `cc` of our own first."""
    script = folder / "cc"
    script.write_text(f"#!/bin/sh\n{does}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return f"{folder}{os.pathsep}{os.defpath}"


def test_without_a_compiler_there_are_no_kernels(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(compiler.NoKernels, match="no C compiler"):
        compiler.library(folder)


def test_what_a_failing_compiler_says_is_the_reason_and_nothing_is_left(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", compiler_that(tmp_path, "echo out of patience >&2; exit 1"))
    with pytest.raises(compiler.NoKernels, match="out of patience"):
        compiler.library(folder)
    assert list((folder / "kernels").iterdir()) == []


def test_a_file_that_is_no_library_is_no_crash(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", compiler_that(tmp_path, 'while [ "$1" != -o ]; do shift; done; echo hello > "$2"'))
    with pytest.raises(compiler.NoKernels, match="cannot be loaded"):
        compiler.library(folder)


def test_a_second_start_compiles_nothing(folder: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    compiler.library(cache_dir)


def test_a_model_without_kernels_says_why_and_is_refused_where_they_are_a_must(cache_dir: Path) -> None:
    told: list[str] = []
    loader.load("embedded", dtype="fp32", cache_dir=cache_dir, progress=told.append)
    assert [line for line in told if "float32" in line] == [
        "not compiled, so steps take longer: the kernels compute in bf16 on a CPU, and this is float32 on cpu"
    ]
    with pytest.raises(KernelsUnavailable, match="--compile on cannot be had: the kernels compute in bf16"):
        loader.load("embedded", dtype="fp32", cache_dir=cache_dir, compile="on")
