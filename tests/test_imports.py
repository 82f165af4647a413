"""Who may import whom: bench -> app -> models -> kvstore, and modules that decide know neither clock, loop nor disk.

Read from the syntax trees, so that nothing need be importable: an import inside a function counts as any other.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("app", "bench", "dormouse_gateway", "kvstore", "models")

ALLOWED = {
    "bench": {"bench", "app", "models", "kvstore", "dormouse_gateway"},
    "app": {"app", "models", "kvstore", "dormouse_gateway"},
    "models": {"models", "kvstore"},
    "kvstore": {"kvstore"},
    "dormouse_gateway": {"app", "bench", "dormouse_gateway"},
}

PURE = {
    *(
        f"kvstore.{name}"
        for name in ("types", "errors", "events", "chain", "codec", "rows", "pool", "policy", "planner")
    ),
    *(
        f"kvstore.{name}"
        for name in ("sessions", "session", "history", "terms", "text_index", "former", "deadlines", "reuse")
    ),
    *(f"kvstore.{name}" for name in ("admission", "branches", "cleaner", "config", "frontier", "hints")),
    *(f"kvstore.{name}" for name in ("laws", "lookahead", "residency", "room", "roster", "snapshot", "store")),
    *(f"kvstore.{name}" for name in ("tables", "tails", "traffic", "transfers", "turns", "upkeep", "wakes")),
    *(f"kvstore.{name}" for name in ("clocks", "catalog_rows", "catalog_pending", "returns", "tips")),
    *(f"kvstore.{name}" for name in ("budget", "cost", "dirty", "found", "health", "ledger", "sinking")),
    *("kvstore.shares", "kvstore.tenancy", "models.contention", "models.scheduler"),
    *(f"app.admin.{name}" for name in ("numbers", "prefetches", "verdict")),
}
IMPURE_LIBRARY = {
    *("asyncio", "concurrent", "io", "logging", "multiprocessing", "os", "pathlib", "random", "secrets", "select"),
    *("signal", "socket", "sqlite3", "subprocess", "tempfile", "threading", "time", "uuid"),
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


@cache
def imports(module: str) -> frozenset[str]:
    """Every module that `module` imports, by its full name; `from package import module` names the module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import, which this test and grep cannot follow"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found.update(name if name in MODULES else str(node.module) for name in inner)
    return frozenset(found)


def top(module: str) -> str:
    return module.partition(".")[0]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_lies_below_it(package: str) -> None:
    wrong = {
        f"{module} imports {name}"
        for module in MODULES
        if top(module) == package
        for name in imports(module)
        if top(name) in PACKAGES and top(name) not in ALLOWED[package]
    }
    assert not wrong


@pytest.mark.parametrize("module", sorted(PURE))
def test_a_pure_module_imports_only_pure_ones(module: str) -> None:
    """Transitively: what a pure module imports of ours is held to the same, or the rule could be walked round."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        current = waiting.pop()
        seen.add(current)
        for name in imports(current) - {"__future__"}:
            if top(name) in PACKAGES:
                waiting += [name] if name not in seen else []
            else:
                assert top(name) in sys.stdlib_module_names, f"{current}, which {module} needs, imports {name}"
                assert top(name) not in IMPURE_LIBRARY, f"{current}, which {module} needs, imports {name}"


def test_only_the_settings_read_the_environment() -> None:
    """A variable that is read elsewhere is a setting that `dormouse config` does not show."""
    # bench.server hands it on, whole, to the servers of others.
    readers = {module for module, path in MODULES.items() if "os.environ" in path.read_text()} - {"bench.server"}
    assert readers <= {"app.settings", "app.configuration"}


def test_every_package_that_is_imported_is_declared_and_explained() -> None:
    """What only comes along with something else goes away with its next release."""
    third_party = {
        top(name).replace("_", "-")
        for module in MODULES
        for name in imports(module)
        if top(name) not in PACKAGES and top(name) not in sys.stdlib_module_names
    } - {"pydantic-core", "matplotlib"}  # pydantic's other half, pinned by it; the extra `bench`
    assert "opentelemetry" in third_party
    assert {module for module in MODULES if any(top(name) == "opentelemetry" for name in imports(module))} == {
        "app.traces"
    }
    third_party -= {"opentelemetry"}  # an extra: imported where it is asked for
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[<>=;\[ ]", requirement)[0] for requirement in project["dependencies"]}
    assert third_party <= declared
    explained = (ROOT / "docs/dependencies.md").read_text()
    assert {name for name in declared if name not in explained} == set()
