"""The settings as options of a typer command, made from the fields, so that help, parsing and tree cannot differ.

Values stay text here: `configuration.load` checks all sources alike and names a bad one the way it was written.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.configuration import load
from app.settings import FLAGGED, Settings, flag, metavar, panel

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

CONFIG = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="TOML file with settings; without it ./dormouse.toml, then ~/.config/dormouse/dormouse.toml.",
    ),
]


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """`command(configuration, ...)` as a command that takes every setting as a flag beside its own parameters."""

    def run(**given: Any) -> None:
        config = given.pop("config")
        flags = {field: value for field in FLAGGED if (value := given.pop(field)) not in (None, [])}
        command(load(flags, config), **given)

    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    parameters = [_parameter("config", CONFIG, None), *map(_option, FLAGGED)]
    parameters += [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _option(field: str) -> inspect.Parameter:
    info = Settings.model_fields[field]
    kind: Any = bool if info.annotation is bool else list[str] if info.default == () else str
    option = typer.Option(
        flag(field),
        help=f"{info.description}{_default(info)}",
        metavar=None if kind is bool else metavar(field),
        show_default=False,
        rich_help_panel=panel(field),
    )
    return _parameter(field, Annotated[kind | None, option], None)


def _default(info: FieldInfo) -> str:
    said = info.default is False or info.default_factory is not None or info.default in ((), None)
    return "" if said else f" Default: {info.default}."


def _parameter(name: str, annotation: object, default: object) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
