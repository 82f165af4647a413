"""The command line: serve, chat, top, config, doctor, store, model, key.

torch and transformers take seconds to import; no command does so before its flags have been checked, and `--help`
never does.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from app.configuration import Configuration, SettingsRefused, client_key, client_url, load
from app.disk_cli import store
from app.flags import with_settings
from app.units import parse_tokens
from dormouse_gateway import __version__
from kvstore.errors import SettingInvalid
from models.errors import ModelError

cli = typer.Typer(
    name="dormouse",
    help="An OpenAI-compatible gateway: idle sessions fall asleep, and their next turn computes only its new tokens.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
model = typer.Typer(no_args_is_help=True, help="The embedded model: fetch it, or say where it is.")
cli.add_typer(store, name="store")
cli.add_typer(model, name="model")
key = typer.Typer(no_args_is_help=True, help="API keys.")
cli.add_typer(key, name="key")


def run() -> None:
    """Entry point: what a user can mend is said in a line or two, with exit status 2."""
    try:
        cli(prog_name="dormouse")  # also for `python -m`: completion goes by it
    except (SettingsRefused, SettingInvalid, ModelError) as exc:
        for line in str(exc).splitlines():
            print(f"dormouse: {line}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"dormouse {__version__}")
        raise typer.Exit


@cli.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


def serve(configuration: Configuration) -> None:
    """Load the model and answer on the OpenAI API until SIGTERM or Ctrl-C."""
    from app import announce, doors, keys, log, serving

    settings = configuration.settings
    log.set_up(settings.log_level, settings.log_format)
    has_keys = keys.load(settings).has_keys
    doors.check_binding(settings, has_keys)
    # Held before the model is loaded: a port in use is said in the first second, not after a minute.
    sock = serving.bind(settings.host, settings.port)
    announce.settings(configuration, has_keys)

    from app.main import create_app, end_streams

    app = create_app(settings)
    ready = functools.partial(announce.ready, app, sock, settings, has_keys)
    serving.serve(app, sock, settings, ready, functools.partial(end_streams, app))


def config(
    configuration: Configuration,
    as_json: AsJson = False,
) -> None:
    """Show every setting in force and where its value came from; takes the same flags as serve."""
    from app import config_view

    if as_json:
        print(json.dumps(config_view.as_json(configuration), indent=2))
    else:
        config_view.show(configuration)


def doctor(
    configuration: Configuration,
    sessions: Annotated[
        int | None, typer.Option("--sessions", min=1, metavar="N", help="Which flags would hold this many sessions?")
    ] = None,
    tokens: Annotated[str, typer.Option("--tokens", metavar="TOKENS", help="Tokens in each of them: 8192, 8k.")] = "4k",
    as_json: AsJson = False,
) -> None:
    """Show what this machine makes of the settings: device, exactness, copy rates, what the budgets hold."""
    from app import log

    try:
        num_tokens = parse_tokens(tokens)
    except ValueError as exc:
        raise SettingInvalid("--tokens", str(exc)) from None
    log.set_up("warning", configuration.settings.log_format)
    print("loading the model and measuring; the first time on a machine takes longer", file=sys.stderr)

    from app import doctor

    findings = doctor.examine(configuration.settings, sessions, num_tokens)
    if as_json:
        print(json.dumps(doctor.as_json(findings), indent=2))
    else:
        doctor.show(findings)
    if findings.wanted is not None and findings.wanted.problem:
        raise typer.Exit(1)


cli.command("serve")(with_settings(serve))
cli.command("config")(with_settings(config))
cli.command("doctor")(with_settings(doctor))


CacheDir = Annotated[
    Path | None, typer.Option("--cache-dir", metavar="DIR", help="Folder to keep it in; as for serve.")
]


@model.command()
def fetch(cache_dir: CacheDir = None, as_json: AsJson = False) -> None:
    """Download the embedded model, unless it is there already, and print its folder."""
    from models import embedded

    folder = embedded.fetch(_cache_dir(cache_dir), progress=lambda line: print(line, file=sys.stderr))
    print(json.dumps({"name": embedded.NAME, "path": str(folder)}) if as_json else folder)


@model.command()
def path(cache_dir: CacheDir = None, as_json: AsJson = False) -> None:
    """Print the embedded model's folder; exit status 1 where it has not been fetched."""
    from models import embedded

    found = embedded.path(_cache_dir(cache_dir))
    if as_json:
        print(json.dumps({"name": embedded.NAME, "path": None if found is None else str(found)}))
    elif found is not None:
        print(found)
    else:
        print("dormouse: the embedded model is not here yet; `dormouse model fetch` gets it", file=sys.stderr)
    if found is None:
        raise typer.Exit(1)


def _cache_dir(given: Path | None) -> Path:
    return load({} if given is None else {"cache_dir": given}).settings.cache_dir


@key.command()
def new(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Whose key it is.")] = None,
    admin: Annotated[bool, typer.Option("--admin", help="The key of /admin instead.")] = False,
) -> None:
    """Make a key. `dormouse key new NAME >> FILE` shows it, this once, and adds its hash to the file."""
    from app import keys

    if (name is None) != admin:
        raise SettingInvalid("NAME", "say whose key it is, or --admin")
    if name is not None and not keys.NAME.fullmatch(name):
        raise SettingInvalid("NAME", f"{name!r} has other characters than A-Z a-z 0-9 . _ -, or more than 64")
    made = keys.new_key()
    print(f"{made}\n\nThat is the key; it is shown only now. What follows is for the file:\n", file=sys.stderr)
    print(keys.lines(name, made))


Url = Annotated[
    str | None,
    typer.Option(metavar="URL", help="The server. Default: DORMOUSE_CLIENT_URL, or http://127.0.0.1:8000."),
]


@cli.command()
def chat(
    url: Url = None,
    session: Annotated[str | None, typer.Option(metavar="ID", help="Session id; by default a new one.")] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Model to ask for; by default the first one served.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, metavar="N", help="Most tokens of each answer.")] = None,
) -> None:
    """Chat with a running server; /help shows the commands. Lines from a pipe are turns, too.

    Where the server asks for an API key, the variable DORMOUSE_CLIENT_KEY has it.
    """
    from app import chat_client

    raise typer.Exit(chat_client.chat(url or client_url(), session, model, client_key(), max_tokens))


@cli.command()
def top(
    url: Url = None,
    window: Annotated[
        Literal["15m", "1h", "24h"], typer.Option("--window", help="How far back the numbers look.")
    ] = "1h",
    seconds: Annotated[float, typer.Option("--seconds", min=0.1, help="Between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The state as the server tells it, a line each.")] = False,
) -> None:
    """Watch a running server: its verdict, its numbers, its tiers and its last turns; Ctrl-C ends it.

    Where /admin asks for a key, the variable DORMOUSE_CLIENT_KEY has the admin key.
    """
    from app import top

    raise typer.Exit(top.top(url or client_url(), client_key(), window, seconds, once=once, as_json=as_json))
