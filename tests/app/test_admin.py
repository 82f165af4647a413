"""`/admin`: what it shows, that nothing a client sends becomes markup, and the same as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import pytest

from app.admin import numbers
from app.admin.state import snapshot_object
from app.admin.views import SESSIONS_SHOWN, bar, misses
from kvstore.snapshot import Snapshot
from tests.app.conftest import NAME, Scripted
from tests.app.live import client

if TYPE_CHECKING:
    import httpx

Serve = Callable[..., Scripted]
EVIL = ("<script>alert(1)</script>", '"><img/src=x/onerror=alert(1)>', "&lt;b&gt;", "{{7*7}}", "'onload='alert(1)")


def say(http: httpx.Client, session_id: str, text: str = "hello there, little one " * 8, **fields: object) -> None:
    body = {"model": NAME, "messages": [{"role": "user", "content": text}], "session_id": session_id, **fields}
    assert http.post("/v1/chat/completions", json=body).status_code == 200


class Outline(HTMLParser):
    """The elements of a page that could do something, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.scripts: list[dict[str, str | None]] = []
        self.handlers: list[str] = []
        self.elements: set[str] = set()
        self.text = ""
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        if tag == "script":
            self.scripts.append(dict(attrs))
        self.handlers += [name for name, _ in attrs if name.startswith("on") or name == "style"]
        self.addresses += [value or "" for name, value in attrs if name in {"src", "href"}]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_shows_tiers_turns_sessions_and_why_history_was_lost(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        for number in range(3):
            say(http, f"run/{number}", session={"keep_seconds": 60, "expire_seconds": 3600})
        say(http, "salty", cache_salt="very secret")
        http.patch("/v1/sessions/run%2F0", json={"pinned": True})
        http.post("/v1/sessions/run%2F0/fork", json={"session_id": "fork"})
        server.server.flush()
        say(http, "run/1")
        page = http.get("/admin")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    text = " ".join(Outline(page.text).text.split())
    for words in ("HBM", NAME, "run/2", "fork", "of run/0", "pinned", "keep 1 min", "expires in 59 min", "evicted"):
        assert words in text
    assert "salted" in text
    assert "secret" not in page.text
    assert "little one" not in page.text


def test_nothing_that_a_client_sends_becomes_markup(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        for session_id in EVIL:
            say(http, session_id, parent_session_id=session_id + "p")
        pages = [http.get(path) for path in ("/admin", "/admin/live")]
    for page in pages:
        outline = Outline(page.text)
        assert all(session_id in outline.text for session_id in EVIL)
        assert outline.handlers == []
        assert "img" not in outline.elements
    assert Outline(pages[0].text).scripts == [{"src": "/admin/admin.js", "defer": None}]
    assert Outline(pages[1].text).scripts == []


def test_the_page_needs_nothing_from_elsewhere_and_says_so(serve: Serve) -> None:
    with client(serve().server) as http:
        page = http.get("/admin")
        own = [address for address in Outline(page.text).addresses if not address.startswith("data:")]
        assert all(address.startswith("/") and not address.startswith("//") for address in own)
        assert all(http.get(address).status_code == 200 for address in own)
        assets = [http.get(f"/admin/{name}") for name in ("admin.css", "admin.js")]
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert [asset.headers["content-type"] for asset in assets] == [
        "text/css; charset=utf-8",
        "text/javascript; charset=utf-8",
    ]
    assert "prefers-color-scheme: dark" in assets[0].text
    assert not any(re.search(r"https?://|@import|url\(", asset.text) for asset in assets)


def test_sessions_come_in_pages(serve: Serve) -> None:
    server = serve()
    with client(server.server) as http:
        for number in range(SESSIONS_SHOWN + 2):
            say(http, f"s-{number:03d}", "hi")
        first, second, beyond = (http.get(f"/admin?page={page}").text for page in (1, 2, 9))
        live = http.get("/admin/live?page=2").text
        assert http.get("/admin?page=0").status_code == 400
    assert 's-026"' in first
    assert 's-001"' not in first
    assert 's-001"' in second
    assert 's-001"' in live
    assert 'href="/admin?page=2"' in first
    assert 'href="/admin?page=1"' in second
    assert "not that many pages" in beyond


def test_an_empty_server_has_a_page(serve: Serve) -> None:
    with client(serve().server) as http:
        assert "No session yet" in http.get("/admin").text


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


def test_parts_of_a_bar_lie_side_by_side() -> None:
    parts = bar([("a", "A", 1), ("b", "B", 0), ("c", "C", 3)])
    assert [(part.start, part.width) for part in parts] == [(0.0, 250.0), (250.0, 0.0), (250.0, 750.0)]
    assert bar([("a", "A", 0)])[0].width == 0.0
    assert bar([("a", "A", 1)], 4)[0].width == 250.0


def test_beginnings_are_no_losses() -> None:
    assert misses({"new_session": 50, "evicted": 2, "load_timeout": 8, "corrupt": 0}) == [
        ("load timeout", 8, 1000.0),
        ("evicted", 2, 250.0),
    ]


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
    [(-3, "0 s"), (59.9, "59 s"), (60, "1 min"), (7200, "2 h"), (172_800, "2 d")],
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
