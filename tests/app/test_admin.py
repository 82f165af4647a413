"""`/admin`: its shell and its files, the state as JSON, and numbers as people read them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import pytest

from app.admin import numbers
from app.admin.page import ASSETS
from app.admin.state import snapshot_object
from kvstore.snapshot import Snapshot
from tests.app.conftest import NAME, Scripted
from tests.app.live import client

if TYPE_CHECKING:
    import httpx

Serve = Callable[..., Scripted]


def say(http: httpx.Client, session_id: str, text: str = "hello there, little one " * 8, **fields: object) -> None:
    body = {"model": NAME, "messages": [{"role": "user", "content": text}], "session_id": session_id, **fields}
    assert http.post("/v1/chat/completions", json=body).status_code == 200


class Outline(HTMLParser):
    """The elements of a page that could do something, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.handlers: list[str] = []
        self.text = ""
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "script":
            self.scripts.append(dict(attrs)["src"] or "inline")
        self.handlers += [name for name, _ in attrs if name.startswith("on") or name == "style"]
        self.addresses += [value or "" for name, value in attrs if name in {"src", "href"}]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_a_shell_without_data_inline_script_or_style(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        say(http, "run/1")
        page = http.get("/admin")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    outline = Outline(page.text)
    assert outline.handlers == []
    assert outline.scripts == ["admin/static/vendor/uPlot.iife.min.js", "admin/static/app.js"]
    assert NAME in outline.text
    assert "run/1" not in page.text


def test_the_page_needs_nothing_from_elsewhere_and_says_so(serve: Serve) -> None:
    with client(serve().server) as http:
        page = http.get("/admin")
        own = [each for each in Outline(page.text).addresses if not each.startswith(("data:", "#"))]
        assert all(re.match(r"[a-z]+/|metrics$", address) for address in own), "relative, for proxies with a prefix"
        assert all(http.get(f"/{address}").status_code == 200 for address in own)
        assets = {name: http.get(f"/admin/static/{name}") for name in ASSETS}
        assert http.get("/admin/static/../page.py").status_code == 404
        assert http.get("/admin/static/admin.css/..%2f..%2fpage.py").status_code == 404
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert "require-trusted-types-for 'script'" in policy
    assert {"admin.css", "app.js", "login.js", "vendor/uPlot.LICENSE"} <= set(assets)
    written = {name: asset.text for name, asset in assets.items() if not name.startswith("vendor/")}
    assert not [
        name for name, text in written.items() if re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import", text)
    ]
    assert not [name for name, text in written.items() if re.search(r"innerHTML|outerHTML|insertAdjacent|eval\(", text)]


def test_the_state_is_the_snapshot_whole_with_sessions_and_misses(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        say(http, "s")
        say(http, "s", cache_prompt=False)
        told = http.get("/admin/api/state").json()
    snapshot = server.server.call(server.server.gateway.manager.snapshot)
    assert told["sessions"] == 1
    assert told["model"] == NAME
    assert told["misses"]["new_session"] == told["misses"]["cache_disabled"] == 1
    assert told["misses"]["load_timeout"] == 0
    assert told["turns_ended"]["stop"] == 2
    assert sum(told["tokens"].values()) > 0
    plain = json.loads(json.dumps(snapshot_object(snapshot)))
    assert {name: told[name] for name in plain} == plain
    hbm = told["tiers"][0]
    assert hbm["tier"] == "hbm"
    assert hbm["capacity"] == sum(hbm[state] for state in ("free", "open", "filling", "valid", "quarantined"))
    assert set(Snapshot.__slots__) <= set(told)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (9_999, "9,999"),
        (10_000, "10k"),
        (56_700, "56.7k"),
        (999_999, "1M"),
        (8_940_000, "8.94M"),
        (4e9, "4G"),
    ],
)
def test_counts_are_short(value: float, text: str) -> None:
    assert numbers.count(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (999, "999 B"), (4096, "4 KiB"), (737_280, "720 KiB"), (3 * 1024**4, "3 TiB")]
)
def test_sizes_are_short(value: float, text: str) -> None:
    assert numbers.size(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0 s"), (59.9, "59 s"), (60, "1 min"), (7200, "2 h"), (9661, "2 h 41 min"), (172_800, "2 d")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert numbers.duration(seconds) == text


def test_a_percentage_is_all_or_nothing_only_where_it_is() -> None:
    assert [numbers.percent(*pair) for pair in ((0, 0), (0, 9), (1, 9999), (9998, 9999), (9, 9), (1, 3))] == [
        0,
        0,
        1,
        99,
        100,
        33,
    ]
