"""Where public clients are installed: each in an environment of its own, kept in the user's cache between runs.

Never in the environment that runs the tests, whose versions a client could change. A folder's name has a digest of
what was asked for, so that another version is another folder; one whose installation broke off has no stamp and is
made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

CHECKOUT = Path(__file__).parents[2]
DRIVERS = Path(__file__).parent / "drivers"
STAMP = ".installed"
INSTALL_SECONDS = 1800
RUN_SECONDS = 900


def folder_of(name: str, requirements: tuple[str, ...]) -> Path:
    """Where the environment `name` with these requirements is, or will be."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.blake2b("\n".join((sys.version, *requirements)).encode(), digest_size=6).hexdigest()
    return base / "dormouse-clients" / f"{name}-{digest}"


def python_with(name: str, *requirements: str) -> Path:
    """The `bin` of a virtual environment with these requirements, torch of the version we test with."""
    folder = folder_of(name, requirements)
    if not (folder / STAMP).exists():
        shutil.rmtree(folder, ignore_errors=True)
        _install(sys.executable, "-m", "venv", str(folder))
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
        constraint = folder / "torch.txt"
        lines = (CHECKOUT / "constraints.txt").read_text().splitlines()
        constraint.write_text("".join(f"{line}\n" for line in lines if line.startswith("torch==")))
        _install(*pip, "-c", str(constraint), *requirements)
        (folder / STAMP).touch()
    return folder / "bin"


def node_with(name: str, *packages: str) -> Path:
    """A `node_modules` with these packages; needs npm."""
    folder = folder_of(name, packages)
    if not (folder / STAMP).exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _install("npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *packages)
        (folder / STAMP).touch()
    return folder / "node_modules"


def _install(*command: str) -> None:
    got = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    assert got.returncode == 0, f"{' '.join(command)}\n{got.stdout}\n{got.stderr}"


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """What a client's process finds: nothing of ours, no key of the user's, and no report to anybody."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DORMOUSE_", "OPENAI_", "PY"))}
    quiet = {
        "NO_PROXY": "127.0.0.1,localhost",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "LANGSMITH_TRACING": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    return {**kept, **quiet, **more}


def run(*command: str | Path, cwd: Path | None = None, env: Mapping[str, str] = MappingProxyType({})) -> str:
    """What the command printed; fails with all it said where its exit status is not 0."""
    words = [str(word) for word in command]
    got = subprocess.run(
        words, cwd=cwd, env=environment(env), capture_output=True, text=True, timeout=RUN_SECONDS, check=False
    )
    assert got.returncode == 0, f"{' '.join(words)}\n{got.stdout}\n{got.stderr}"
    return got.stdout


def told(*command: str | Path, env: Mapping[str, str] = MappingProxyType({})) -> Any:
    """The JSON in the last line that a driver printed."""
    return json.loads(run(*command, env=env).splitlines()[-1])
