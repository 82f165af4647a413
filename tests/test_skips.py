"""The rule of tests/conftest.py: under CI a skip is a failure, except for `gpu`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SKIPPED = "import pytest\ndef test_it(): pytest.skip('no chromium')\n"
MARKED = "import pytest\n@pytest.mark.skip(reason='no fio')\ndef test_it(): pass\n"
WHOLE_FILE = "import pytest\npytest.importorskip('no_such_module')\n"
EXPECTED_FAILURE = "import pytest\n@pytest.mark.xfail(strict=True)\ndef test_it(): assert False\n"
GPU = "import pytest\n@pytest.mark.gpu\ndef test_it(): pytest.skip('no CUDA device')\n"
PASSES = "def test_it(): pass\n"


def outcome(folder: Path, source: str, ci: str) -> tuple[int, str]:
    """Exit status and output of a suite of this one file under our conftest, beside a test that passes."""
    shutil.copy(Path(__file__).with_name("conftest.py"), folder)
    (folder / "test_passes.py").write_text(PASSES)
    (folder / "test_other.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    got = subprocess.run(
        command, cwd=folder, env=os.environ | {"CI": ci}, capture_output=True, text=True, timeout=60, check=False
    )
    return got.returncode, got.stdout


@pytest.mark.parametrize("source", [SKIPPED, MARKED, WHOLE_FILE], ids=["skipped", "marked", "whole file"])
def test_a_skip_fails_under_ci_and_only_there(tmp_path: Path, source: str) -> None:
    status, said = outcome(tmp_path, source, ci="true")
    assert status != 0
    assert "a skip there is a failure" in said
    assert outcome(tmp_path, source, ci="")[0] == 0


@pytest.mark.parametrize("source", [EXPECTED_FAILURE, GPU, PASSES], ids=["expected failure", "gpu", "passes"])
def test_what_is_no_skip_or_needs_a_gpu_passes_under_ci(tmp_path: Path, source: str) -> None:
    assert outcome(tmp_path, source, ci="true")[0] == 0
