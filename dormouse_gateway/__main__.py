"""`dormouse` and `python -m dormouse_gateway`: find the code, then hand over to `app.cli`, with `bench` beside it.

In a wheel `app`, `bench`, `kvstore` and `models` lie under `_private/`; in a checkout beside this package. Either
folder goes first on sys.path, so that an `app` of somebody else's (in the working directory, or installed) is not met.
"""

from __future__ import annotations

import sys
from pathlib import Path


def code_root() -> Path:
    """Folder that holds `app`, `bench`, `kvstore` and `models`."""
    here = Path(__file__).resolve().parent
    private = here / "_private"
    return private if private.is_dir() else here.parent


def main() -> None:
    sys.path.insert(0, str(code_root()))
    from app.cli import cli, run
    from bench.cli import cli as bench

    # Here and not there: what measures the server knows it, and the server does not know what measures it.
    cli.add_typer(bench, name="bench")
    run()


if __name__ == "__main__":
    main()
