"""The page at `/admin`: a shell that holds no data, its files, and the headers that keep anything else out.

Its scripts fetch JSON and put it in as text, never as markup; the policy lets no script and no style run but the page's
own, and no script make markup from text (Trusted Types). All addresses are relative, so that the page works behind a
proxy under any prefix.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from dormouse_gateway import __version__

if TYPE_CHECKING:
    from app.gateway import Gateway

FOLDER = Path(__file__).parent
STATIC = FOLDER / "static"

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}

KINDS = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".LICENSE": "text/plain"}
ASSETS = {
    str(path.relative_to(STATIC)): KINDS[path.suffix]
    for path in sorted(STATIC.rglob("*"))
    if path.is_file() and path.suffix in KINDS
}

TEMPLATES = Environment(
    loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)


def page(gateway: Gateway) -> str:
    """The shell."""
    shell = TEMPLATES.get_template("page.html")
    return shell.render(
        model=gateway.names.first, version=__version__, has_login=gateway.settings.admin_key is not None
    )
