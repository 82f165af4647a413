"""The page at `/admin`, drawn on the server.

One template draws what changes (live.html); the page holds it, and its script fetches it again every second and
puts in what differs. Whatever is shown is escaped by the template engine, and the page's policy allows no script
and no style but its own two files.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from app.admin import numbers
from app.admin.views import view

if TYPE_CHECKING:
    from app.gateway import Gateway

FOLDER = Path(__file__).parent

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {"content-security-policy": POLICY, "cache-control": "no-store", "referrer-policy": "no-referrer"}


def environment() -> Environment:
    """Templates that escape everything and know no undefined names."""
    made = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["count"] = numbers.count
    return made


TEMPLATES = environment()


def page(gateway: Gateway, number: int) -> str:
    """The whole page, with page `number` (from 1) of the sessions."""
    return TEMPLATES.get_template("page.html").render(view(gateway, number))


def live(gateway: Gateway, number: int) -> str:
    """Only what changes."""
    return TEMPLATES.get_template("live.html").render(view(gateway, number))
