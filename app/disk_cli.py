"""`dormouse store`: what is kept on disk, and its upkeep.

Where a server holds the directory it is asked over HTTP, and goes on serving; else the directory is taken for as long
as the command runs, so that no server starts on it meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote, urlsplit

import typer

from app.configuration import load
from app.units import format_bytes
from kvstore.errors import SettingInvalid

if TYPE_CHECKING:
    import httpx

    from app.disk import Progress
    from app.disk_address import Address
    from kvstore.catalog import Catalog
    from kvstore.nvme_dir import NvmeDirectory

store = typer.Typer(no_args_is_help=True, help="Sessions that are kept on disk: list, verify, clean up, remove.")

NvmeDir = Annotated[Path | None, typer.Option("--nvme-dir", metavar="DIR", help="The directory; as for serve.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

API = "/admin/api/store"


@store.command("path")
def show_path(nvme_dir: NvmeDir = None, as_json: AsJson = False) -> None:
    """Print the directory, and who holds it."""
    from kvstore.nvme_dir import holder

    root = _root(nvme_dir)
    if as_json:
        print(json.dumps({"path": str(root), "exists": root.is_dir(), "held_by": holder(root)}))
    else:
        print(root)


@store.command("holder")
def show_holder(nvme_dir: NvmeDir = None, as_json: AsJson = False) -> None:
    """Print the process id of the server that holds the directory; exit status 1 where none does."""
    from kvstore.nvme_dir import holder

    root = _root(nvme_dir)
    pid = holder(root)
    if as_json:
        print(json.dumps({"path": str(root), "held_by": pid}))
    elif pid:
        print(pid)
    else:
        print(f"dormouse: no server that can be named holds {root}", file=sys.stderr)
    if not pid:
        raise typer.Exit(1)


@store.command("ls")
def ls(nvme_dir: NvmeDir = None, as_json: AsJson = False) -> None:
    """List models and sessions, the latest first."""

    def offline(directory: NvmeDirectory, catalog: Catalog) -> dict[str, Any]:
        from app import disk

        return asdict(disk.report(directory, catalog.path))

    found = _ask(_root(nvme_dir), "GET", "", offline)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _show(found)


@store.command()
def verify(nvme_dir: NvmeDir = None, as_json: AsJson = False) -> None:
    """Read every history and every block on disk; exit status 1 where one is not as it was written."""

    def offline(directory: NvmeDirectory, catalog: Catalog) -> dict[str, Any]:
        from app import disk

        with _progress(not as_json) as tell:
            return disk.verify(directory, catalog.path, tell=tell).as_json()

    found = _ask(_root(nvme_dir), "POST", "/verify", offline)
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        for fault in found["faults"]:
            print(fault)
        blocks, histories = sum(found["blocks"].values()), sum(found["histories"].values())
        outcome = "all as they were written" if found["sound"] else f"{len(found['faults'])} faults"
        print(f"{blocks} blocks and {histories} histories read: {outcome}")
    if not found["sound"]:
        raise typer.Exit(1)


@store.command()
def gc(nvme_dir: NvmeDir = None, as_json: AsJson = False, yes: Yes = False) -> None:
    """Erase blocks that no session has, and remove what start-ups set aside because they could not use it."""

    def offline(directory: NvmeDirectory, catalog: Catalog) -> dict[str, Any]:
        from app import disk

        erased = disk.collect(directory, catalog, catalog.swept)
        aside = disk.set_aside(directory)
        if aside and not yes:
            names = "\n  ".join(map(str, aside))
            question = f"These hold what an earlier version or a damaged catalog had:\n  {names}\nRemove them?"
            aside = aside if typer.confirm(question) else []
        removed = disk.remove_aside(aside)
        catalog.compact()
        return {"erased": erased, "removed": [str(path) for path in removed]}

    found = _ask(_root(nvme_dir), "POST", "/gc", offline)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for model, count in found["erased"].items():
        print(f"{model}: {count} blocks erased")
    for path in found.get("removed", ()):
        print(f"removed {path}")
    if not found["erased"] and not found.get("removed"):
        print("nothing to do")


@store.command()
def rm(
    session: Annotated[str | None, typer.Argument(metavar="ID", help="The session to remove.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Remove every session of every model.")] = False,
    nvme_dir: NvmeDir = None,
    as_json: AsJson = False,
    yes: Yes = False,
) -> None:
    """Remove a session, or all: its text and ids, and its blocks as far as no other session shares them."""
    if (session is None) is not every:
        raise typer.BadParameter("name one session, or give --all")
    root = _root(nvme_dir)
    what = "every session" if session is None else f"session {session!r}"
    if not yes and not typer.confirm(f"Remove {what} under {root}, for good?"):
        raise typer.Exit(1)

    def offline(directory: NvmeDirectory, catalog: Catalog) -> dict[str, Any]:
        from app import disk
        from kvstore import catalog_reading as reading

        serials = reading.serials(catalog.path, session)
        catalog.drop_sessions(serials)
        if serials:
            disk.collect(directory, catalog, catalog.swept)
        return {"removed": len(serials), "settled": True}

    path = "/sessions" if session is None else f"/sessions/{quote(session, safe='', errors='surrogatepass')}"
    found = _ask(root, "DELETE", path, offline)
    if as_json:
        print(json.dumps(found))
    elif found["removed"]:
        print(f"{found['removed']} removed" + ("" if found["settled"] else "; the disk has not confirmed it yet"))
    else:
        print(f"dormouse: there is no {what} on disk", file=sys.stderr)
    if not found["removed"] and session is not None:
        raise typer.Exit(1)


def _root(given: Path | None) -> Path:
    return load({} if given is None else {"nvme_dir": given}).settings.nvme_dir


def _ask(
    root: Path, method: str, path: str, offline: Callable[[NvmeDirectory, Catalog], dict[str, Any]]
) -> dict[str, Any]:
    """Of the server that holds `root`, or of its files where none does.

    Raises:
        SettingInvalid: there is nothing there, or the server that holds it cannot be asked.
    """
    from app import disk_address
    from kvstore.nvme_dir import NvmeDirectory, holder

    if not root.is_dir():
        raise SettingInvalid("--nvme-dir", f"nothing is kept under {root}: there is no such directory")
    pid = holder(root)
    if pid is not None:
        address = disk_address.find(root, pid)
        if address is None:
            raise SettingInvalid("--nvme-dir", f"process {pid} holds {root} and does not say where it answers yet")
        return _over_http(address, method, path)
    directory = NvmeDirectory(root)
    directory.open()
    with contextlib.closing(directory), _catalog(directory) as catalog:
        return offline(directory, catalog)


@contextmanager
def _catalog(directory: NvmeDirectory) -> Iterator[Catalog]:
    from kvstore.catalog import Catalog

    catalog = Catalog.open(directory.catalog, time.time())
    if catalog.loss is not None:
        where = "" if catalog.loss.kept_as is None else f": it is kept as {catalog.loss.kept_as}"
        print(f"dormouse: the catalog could not be used{where}", file=sys.stderr)
    try:
        yield catalog
    finally:
        catalog.close(0.0)


def _over_http(address: Address, method: str, path: str) -> dict[str, Any]:
    import httpx

    url, headers = address.url, {"authorization": f"Bearer {address.key}"}
    local = urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")
    try:
        with httpx.Client(
            base_url=url, headers=headers, timeout=httpx.Timeout(3600, connect=10), trust_env=not local
        ) as http:
            reply = http.request(method, f"{API}{path}")
        return _read(reply)
    except (httpx.HTTPError, ValueError) as exc:
        raise SettingInvalid("--nvme-dir", f"the server at {url}, which holds it, does not answer: {exc}") from exc


def _read(reply: httpx.Response) -> dict[str, Any]:
    body: dict[str, Any] = reply.json()
    if reply.is_error:
        raise ValueError(body.get("error", {}).get("message", reply.status_code))
    return body


@contextmanager
def _progress(is_shown: bool) -> Iterator[Progress]:
    """A bar on stderr, where a person watches."""
    from rich.console import Console
    from rich.progress import Progress as Bars

    with Bars(console=Console(stderr=True), transient=True, disable=not is_shown or not sys.stderr.isatty()) as bars:
        tasks: dict[str, Any] = {}

        def tell(what: str, done: int, whole: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=whole)
            bars.update(tasks[what], completed=done)

        yield tell


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    models = Table("model", "sessions", "blocks", "on disk", "last used", title=found["path"], title_justify="left")
    for each in found["folders"]:
        models.add_row(
            f"{each['model']} {each['model_key'][:12]}",
            str(each["sessions"]),
            str(each["blocks"]),
            format_bytes(each["bytes"]),
            _ago(each["last_used"]),
        )
    console.print(models)
    sessions = Table("session", "model", "branches", "turns", "tokens", "last active")
    for each in found["sessions"]:
        name = json.dumps(each["id"])[1:-1] + (" (salted)" if each["is_salted"] else "")
        row = (each["model"], str(each["branches"]), str(each["turns"]), str(each["tokens"]), _ago(each["last_active"]))
        sessions.add_row(name, *row)
    console.print(sessions)
    for path in found["set_aside"]:
        console.print(f"set aside: {path} (`dormouse store gc` removes it)", markup=False)


def _ago(unix: float) -> str:
    seconds = max(0.0, time.time() - unix)
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
