"""Which value is in force for each setting, and where it came from.

Flags win over the environment, the environment over a TOML file, the file over the defaults. A bad value, an unknown
key and an unknown `DORMOUSE_` variable stop start-up: a limit with a typing mistake in its name is a limit not set.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from pydantic_settings import EnvSettingsSource, TomlConfigSettingsSource

from app.settings import ENV_PREFIX, FLAGGED, SECRETS, Settings, flag, metavar, variable, xdg_folder
from kvstore.errors import SettingInvalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

CONFIG_VARIABLE = "DORMOUSE_CONFIG"
TEST_PREFIX = "DORMOUSE_TEST_"

CLIENT_KEY_VARIABLE = "DORMOUSE_CLIENT_KEY"
"""The API key that `dormouse chat` sends; nothing of the server's."""
CLIENT_URL_VARIABLE = "DORMOUSE_CLIENT_URL"
"""The server that `dormouse chat` and `dormouse top` talk to."""
USUAL_URL = "http://127.0.0.1:8000"


CLIENT_VARIABLES = {CONFIG_VARIABLE, CLIENT_KEY_VARIABLE, CLIENT_URL_VARIABLE}
"""Ours, and no settings."""


class Source(StrEnum):
    """Where a value came from, strongest first."""

    FLAG = "flag"
    ENV = "env"
    FILE = "file"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Origin:
    """A source, and the name that it gave the value there."""

    source: Source
    name: str


@dataclass(frozen=True, slots=True)
class Configuration:
    """The settings in force, and the origin of each of their fields."""

    settings: Settings
    origins: Mapping[str, Origin]
    file: Path | None


class SettingsRefused(Exception):
    """Start-up stops here; every problem found is in `problems`, named as it was written."""

    def __init__(self, problems: list[SettingInvalid]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


def load(flags: Mapping[str, object] | None = None, config: Path | None = None) -> Configuration:
    """The settings in force.

    `flags` holds the fields that were given on the command line; `config` a file that must exist.

    Raises:
        SettingsRefused: a bad value, an unknown key or variable, or a file that cannot be read.
    """
    file = _find_file(config)
    layers = [
        _layer(Source.FILE, _from_file(file), lambda field: f"{file}: {field}"),
        _layer(Source.ENV, _from_environment(), variable),
        _layer(Source.FLAG, flags or {}, flag),
    ]
    values = {field: value for layer in layers for field, (value, _) in layer.items()}
    origins = {field: origin for layer in layers for field, (_, origin) in layer.items()}
    try:
        settings = Settings(**values)
    except ValidationError as exc:
        raise SettingsRefused(_problems(exc, values, origins)) from None
    every = {field: origins.get(field, Origin(Source.DEFAULT, "")) for field in Settings.model_fields}
    return Configuration(settings, every, file)


def _layer(source: Source, values: Mapping[str, Any], name: Callable[[str], str]) -> dict[str, tuple[Any, Origin]]:
    return {field: (value, Origin(source, name(field))) for field, value in values.items()}


def _find_file(config: Path | None) -> Path | None:
    """The TOML file to read: the one asked for, else the first of the usual places that has one."""
    asked = config or (Path(os.environ[CONFIG_VARIABLE]) if os.environ.get(CONFIG_VARIABLE) else None)
    if asked is not None:
        return asked.expanduser()
    usual = (Path("dormouse.toml"), xdg_folder("XDG_CONFIG_HOME", ".config") / "dormouse" / "dormouse.toml")
    return next((path for path in usual if path.is_file()), None)


def _from_file(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    if not path.is_file():
        raise SettingsRefused([SettingInvalid("--config", f"there is no file {path}")])
    try:
        values = TomlConfigSettingsSource(Settings, toml_file=path).toml_data
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise SettingsRefused([SettingInvalid(str(path), f"cannot be read as TOML: {exc}")]) from exc
    unknown = [key for key in values if key not in FLAGGED]
    if unknown:
        raise SettingsRefused([SettingInvalid(f"{path}: {key}", _unknown(key, FLAGGED)) for key in unknown])
    return values


def _from_environment() -> dict[str, Any]:
    known = {variable(field) for field in Settings.model_fields} | CLIENT_VARIABLES
    problems = []
    for name in sorted(os.environ):
        if name.startswith(ENV_PREFIX) and not name.startswith(TEST_PREFIX) and name not in known:
            problems.append(SettingInvalid(name, _unknown(name, known)))
    if problems:
        raise SettingsRefused(problems)
    values = EnvSettingsSource(Settings, case_sensitive=False)()
    values.pop("hf_token", None)  # DORMOUSE_HF_TOKEN is no variable of ours
    if token := os.environ.get(SECRETS["hf_token"]):
        values["hf_token"] = token
    return values


def client_key() -> str | None:
    """The API key that commands which talk to a server send along."""
    return os.environ.get(CLIENT_KEY_VARIABLE) or None


def client_url() -> str:
    """Where those commands find the server, unless they are told."""
    return os.environ.get(CLIENT_URL_VARIABLE) or USUAL_URL


def _unknown(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return "is not a setting" + (f"; did you mean {near[0]}?" if near else "; `dormouse config` lists them")


def _problems(exc: ValidationError, values: Mapping[str, Any], origins: Mapping[str, Origin]) -> list[SettingInvalid]:
    """One problem per field, under the name that the value was given by."""
    found: dict[str, SettingInvalid] = {}
    for error in exc.errors(include_url=False, include_context=False):
        field = str(error["loc"][0])
        name = origins[field].name if field in origins else flag(field)
        shown = f"{values.get(field)!r} "
        if error["type"] == "value_error":
            text = error["msg"].removeprefix("Value error, ")
        elif field in found or error["type"] in ("string_pattern_mismatch", "literal_error"):
            # A union reports one problem per member ("should be 'auto'", "should be an integer").
            text = f"{shown}should be {metavar(field)}"
        else:
            text = shown + error["msg"].removeprefix("Input ")
        found[field] = SettingInvalid(name, text)
    return list(found.values())
