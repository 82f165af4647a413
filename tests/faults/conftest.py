"""The tiny model, and what it says where nothing goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from models import embedded
from tests.faults import tiny
from tests.faults.server import USERS, Server, Talk, serving, settings

if TYPE_CHECKING:
    from pathlib import Path

Control = Callable[[str], list[str]]
"""What a conversation of that name hears where nothing goes wrong."""


@pytest.fixture(scope="session")
def embedded_folder(cache_dir: Path) -> Path:
    return embedded.fetch(cache_dir, progress=print)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, embedded_folder: Path) -> Path:
    return tiny.save(tmp_path_factory.mktemp("models") / "tiny", embedded_folder)


@pytest.fixture(scope="session")
def undisturbed(model: Path) -> Iterator[Server]:
    """A server with no disk at all."""
    with serving(settings(model, None)) as server:
        yield server


@pytest.fixture(scope="session")
def retold(undisturbed: Server) -> Callable[[Talk], str]:
    """The last answer of a talk, as a server gives it that knows no more of the talk than the request says."""

    def text(talk: Talk) -> str:
        again = Talk(talk.name, talk.texts[:-1])
        undisturbed.say(again, cache_prompt=False)
        return again.texts[-1]

    return text


@pytest.fixture(scope="session")
def control(undisturbed: Server) -> Control:
    """What a conversation of that name hears that never leaves HBM."""
    known: dict[str, list[str]] = {}

    def texts(name: str) -> list[str]:
        if name not in known:
            talk = Talk(name)
            for _ in USERS:
                undisturbed.say(talk)
            known[name] = talk.texts
        return known[name]

    return texts
