"""What a user installs: sdist -> wheel -> a fresh environment, beside somebody else's `app`."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parent.parent
INNER = ("app", "bench", "kvstore", "models")


def run(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DORMOUSE_", "PYTHON"))}
    return subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the unpacked sdist: what the sdist lacks, the wheel would."""
    folder = tmp_path_factory.mktemp("dist")
    built = run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=CHECKOUT)
    assert built.returncode == 0, built.stderr
    (sdist,) = folder.glob("dormouse_gateway-*.tar.gz")
    assert run("tar", "-xzf", sdist, cwd=folder).returncode == 0
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    built = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=unpacked)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("dormouse_gateway-*-py3-none-any.whl")
    return wheel


def test_an_editable_install_holds_no_copy_of_the_code(tmp_path: Path) -> None:
    """A copy in site-packages would be what runs, or what mypy reads, long after the checkout has moved on."""
    build = "from hatchling.build import build_editable; import sys; print(build_editable(sys.argv[1]))"
    built = run(sys.executable, "-c", build, tmp_path, cwd=CHECKOUT)
    assert built.returncode == 0, built.stderr
    names = zipfile.ZipFile(tmp_path / built.stdout.splitlines()[-1]).namelist()
    assert [name for name in names if ".dist-info/" not in name] == ["_dormouse_gateway.pth"]


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment's bin folder, the wheel in it, its dependencies lent by this one's site-packages."""
    folder = tmp_path_factory.mktemp("venv")
    made = run(sys.executable, "-m", "venv", folder, cwd=folder)
    assert made.returncode == 0, made.stderr
    bin_folder = folder / "bin"
    pip = (bin_folder / "python", "-m", "pip", "install", "--no-deps", "--no-index", "-q", wheel)
    put = run(*pip, cwd=folder)
    assert put.returncode == 0, put.stderr
    own = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    # Named without processing its .pth files: the editable install among them would lend the checkout, too.
    (Path(own) / "lent.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return bin_folder


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A working directory with packages of its own under the same names."""
    for name in INNER:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('somebody else\\'s')\n")
    return tmp_path


def test_a_wheel_owns_one_name_and_carries_its_licence(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"dormouse_gateway", wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if "__pycache__" in name or "/tests/" in name]


def test_a_wheel_holds_every_module_of_the_checkout(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    sources = [path for name in INNER for path in (CHECKOUT / name).rglob("*.py")]
    sources += (CHECKOUT / "bench/traces").glob("*.jsonl.gz")
    assert sources
    assert {f"dormouse_gateway/_private/{path.relative_to(CHECKOUT).as_posix()}" for path in sources} <= held


@pytest.mark.parametrize("command", [["dormouse"], ["python", "-m", "dormouse_gateway"]])
def test_the_installed_command_runs_beside_a_foreign_app(installed: Path, foreign: Path, command: list[str]) -> None:
    got = run(installed / command[0], *command[1:], "config", "--json", "--port", "1234", cwd=foreign)
    assert got.returncode == 0, got.stderr
    assert json.loads(got.stdout)["settings"]["port"] == {"value": 1234, "source": "flag", "name": "--port"}


def test_the_installed_command_has_the_benchmarks_and_their_traces(installed: Path, foreign: Path) -> None:
    got = run(installed / "dormouse", "bench", "replay", "--url", "http://127.0.0.1:9", "--no-calibrate", cwd=foreign)
    assert got.returncode == 1
    assert "no server answers at http://127.0.0.1:9/v1/" in got.stderr


def test_the_installed_code_is_the_wheels(installed: Path, foreign: Path) -> None:
    got = run(installed / "python", "-c", "import dormouse_gateway.__main__ as m; print(m.code_root())", cwd=foreign)
    assert got.stdout.startswith(str(installed.parent))
    assert got.stdout.endswith("dormouse_gateway/_private\n")


@pytest.mark.parametrize("name", INNER)
def test_nothing_but_the_command_can_import_the_inner_packages(installed: Path, tmp_path: Path, name: str) -> None:
    got = run(installed / "python", "-c", f"import {name}", cwd=tmp_path)
    assert got.returncode != 0
    assert f"No module named '{name}'" in got.stderr
