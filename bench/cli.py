"""`dormouse bench` and `python -m bench`: figures of a machine, of any OpenAI-compatible server, and of ours.

Nothing but tables goes to stdout, nothing but JSON with `--json -`; progress is on stderr. What a command needs is
imported when it runs, so that `--help` and the rest of `dormouse` do not wait for it.
"""

from __future__ import annotations

import sys

import typer
from typer.core import TyperGroup

from bench.commands import engines, peers, results, servers, tiers
from bench.errors import BenchFailed


class BenchGroup(TyperGroup):
    """Says in a line why no figure came of a command."""

    def invoke(self, ctx: typer.Context) -> object:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        except BenchFailed as exc:
            print(f"bench: {exc}", file=sys.stderr)
            raise typer.Exit(1) from exc


cli = typer.Typer(
    name="bench",
    cls=BenchGroup,
    help="Figures of this machine and of a server on it, measured from outside wherever that can be done.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for part in (servers, tiers, results, peers, engines):
    part.register(cli)


def run() -> None:
    """Entry point of a checkout: what a person can mend is said in a line or two."""
    from app.configuration import SettingsRefused
    from kvstore.errors import SettingInvalid
    from models.errors import ModelError

    try:
        cli()
    except (SettingsRefused, SettingInvalid, ModelError) as exc:
        print(f"bench: {exc}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
