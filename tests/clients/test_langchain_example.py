"""The LangChain example, in an environment of its own: what it needs is no dependency of ours."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.clients.conftest import CHECKOUT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.clients.conftest import Server

pytestmark = pytest.mark.clients


def test_a_langchain_conversation_sleeps_and_goes_on(server: Server, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=120)
    python = str(tmp_path / "venv/bin/python")
    subprocess.run([python, "-m", "pip", "install", "-q", "langchain-openai"], check=True, timeout=600)
    command = [python, str(CHECKOUT / "examples" / "langchain_chat.py"), "--url", server.url]
    said = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout
    reused = [int(tokens) for tokens in re.findall(r"^  (\d+) tokens reused$", said, re.MULTILINE)]
    assert len(reused) == 3
    assert reused[0] == 0
    assert all(tokens > 0 for tokens in reused[1:]), said
    assert said.count("\n  asleep\n") == 3
