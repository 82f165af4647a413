"""docs/configuration.md is what the settings are; `make docs` writes its tables."""

from __future__ import annotations

import re
import tomllib
from typing import TYPE_CHECKING

from app.configuration import Source, load
from tests.docs import pages

if TYPE_CHECKING:
    from pathlib import Path


def test_the_page_has_every_setting_as_it_is() -> None:
    assert pages.made("configuration.md") == pages.settings_tables()


def test_the_example_of_a_file_is_one_that_is_read(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", (pages.DOCS / "configuration.md").read_text(), re.DOTALL)
    file = tmp_path / "dormouse.toml"
    file.write_text(example)
    configuration = load({}, file)
    for field in tomllib.loads(example):
        assert configuration.origins[field].source in (Source.FILE, Source.ENV)
