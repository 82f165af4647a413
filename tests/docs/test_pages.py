"""What pages say can be followed: links, flags, targets, metrics; and their sums are right."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import typer

from app.cli import cli
from app.configuration import CLIENT_VARIABLES
from app.settings import Settings, variable
from tests.docs import pages

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
TOLD = sorted(
    path
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md"))
    if path.name != "CHANGELOG.md"
)
OTHERS = {
    "--profile",  # docker compose
    "--plots",  # dormouse bench
    "--help",
    "--version",
    "--tiny",  # of make readme
    "--strict",  # mypy
    "--install-completion",  # typer's own
    "--seed",  # of make torture
    "--rounds",
}
OTHER_COMMANDS = {"docs/performance.md", "docs/benchmarks.md", "docs/clients.md", "examples/README.md"}
"""Flags there are the benchmarks' and the examples'."""


def every_page(reason: set[str] = frozenset()) -> pytest.MarkDecorator:  # type: ignore[assignment]
    kept = [path for path in TOLD if str(path.relative_to(ROOT)) not in reason]
    return pytest.mark.parametrize("page", kept, ids=lambda path: str(path.relative_to(ROOT)))


def anchors(page: Path) -> set[str]:
    """As the usual renderers make them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page()
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def flags_of(command: typer.core.TyperCommand | typer.core.TyperGroup) -> Iterator[str]:
    for parameter in command.params:
        yield from (name for name in parameter.opts + parameter.secondary_opts if name.startswith("--"))
    for inner in getattr(command, "commands", {}).values():
        yield from flags_of(inner)


@every_page(OTHER_COMMANDS)
def test_flags_exist(page: Path) -> None:
    known = set(flags_of(typer.main.get_command(cli))) | OTHERS  # type: ignore[arg-type]
    text = re.sub(r"^.*(docker|pip|curl|openssl|ssh|promtool|git) .*$", "", page.read_text(), flags=re.MULTILINE)
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+[a-z]\b(?!-)", text)) - known == set()


@every_page()
def test_variables_exist(page: Path) -> None:
    known = {variable(field) for field in Settings.model_fields} | CLIENT_VARIABLES
    assert set(re.findall(r"\bDORMOUSE_[A-Z_]*[A-Z]\b", page.read_text())) - known == set()


@every_page()
def test_targets_of_make_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|[`|] ?)\s*make ([a-z]+)", page.read_text(), re.MULTILINE)) - targets == set()


@every_page()
def test_metrics_exist(page: Path) -> None:
    assert named_metrics(page.read_text()) - known_metrics() == set()


def named_metrics(text: str) -> set[str]:
    """Names of ours, as far as they end: `dormouse_nvme_...` is a prefix and means no metric."""
    found = re.findall(r"\b(dormouse_[a-z_]*[a-z])\b(?!\.\.\.|_)", text)
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in found} - {"dormouse_gateway", "dormouse_paged"}


def known_metrics() -> set[str]:
    """By docs/metrics.md, which test_metrics_page holds equal to what is exposed."""
    return set(re.findall(r"^\| `(\w+)`", pages.made("metrics.md")["metrics"], re.MULTILINE))


def test_the_sizes_of_sessions_follow_from_the_formula() -> None:
    rows = re.findall(r"^\| [^|]+ \|(.*B) \|$", (pages.DOCS / "sizing.md").read_text(), re.MULTILINE)
    assert len(rows) == 4
    for row in rows:
        layers, heads, size, dtype, token_bytes, short, long = (cell.strip() for cell in row.split("|"))
        assert dtype == "bf16"
        each = 2 * int(layers) * int(heads) * int(size) * 2
        assert each == int(token_bytes.replace(",", ""))
        slot = math.ceil(32 * each / 4096) * 4096
        for tokens, told in ((4096, short), (32768, long)):
            assert math.ceil(tokens / 32) * slot == int(told.removesuffix(" MiB").replace(",", "")) * 2**20
