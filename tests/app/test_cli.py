"""The command as a user types it, in a process of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Protocol

import pytest

from app.keys import load
from app.settings import Settings
from dormouse_gateway import __version__
from kvstore.nvme_dir import NvmeDirectory

CHECKOUT = Path(__file__).parents[2]


class Command(Protocol):
    """`dormouse ARGS` with extra variables, and text for its stdin."""

    def __call__(self, *args: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]: ...


@pytest.fixture
def dormouse(tmp_path: Path) -> Command:
    """Run `dormouse ARGS` in an empty folder with an empty home."""

    def run(*args: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("DORMOUSE_", "XDG_"))}
        clean |= {"HOME": str(tmp_path), "COLUMNS": "200", "NO_COLOR": "1"} | environment
        clean["PYTHONPATH"] = str(CHECKOUT)
        command = [sys.executable, "-m", "dormouse_gateway", *args]
        return subprocess.run(
            command, cwd=tmp_path, env=clean, input=stdin, capture_output=True, text=True, timeout=60, check=False
        )

    return run


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["serve"],
        ["config"],
        ["doctor"],
        ["chat"],
        ["top"],
        ["model"],
        ["model", "fetch"],
        ["model", "path"],
        ["key", "new"],
        ["bench"],
    ],
)
def test_every_command_has_help(dormouse: Command, command: list[str]) -> None:
    got = dormouse(*command, "--help")
    assert got.returncode == 0
    assert "Usage:" in got.stdout
    assert got.stderr == ""


def test_help_imports_neither_torch_nor_transformers(
    dormouse: Command,
) -> None:
    """They take seconds; `dormouse --help` must not."""
    got = dormouse("--help", PYTHONVERBOSE="1")
    assert got.returncode == 0
    imported = {line.split("'")[1].partition(".")[0] for line in got.stderr.splitlines() if line.startswith("import '")}
    assert "typer" in imported
    assert imported.isdisjoint({"torch", "transformers", "numpy", "fastapi", "httpx"})


def test_the_version_is_the_packages(dormouse: Command) -> None:
    assert dormouse("--version").stdout == f"dormouse {__version__}\n"


def test_config_shows_each_value_and_where_it_came_from(dormouse: Command, tmp_path: Path) -> None:
    (tmp_path / "dormouse.toml").write_text("max_queue = 7\n")
    got = dormouse("config", "--json", "--hbm-bytes", "1GiB", DORMOUSE_PORT="9000", HF_TOKEN="hf_secret")
    shown = json.loads(got.stdout)
    assert shown["file"] == "dormouse.toml"
    assert {name: tuple(shown["settings"][name].values()) for name in ("hbm_bytes", "port", "max_queue", "host")} == {
        "hbm_bytes": (2**30, "flag", "--hbm-bytes"),
        "port": (9000, "env", "DORMOUSE_PORT"),
        "max_queue": (7, "file", "dormouse.toml: max_queue"),
        "host": ("127.0.0.1", "default", None),
    }
    assert shown["settings"]["hf_token"]["value"] == "set"
    table = dormouse("config", "--hbm-bytes", "1GiB", HF_TOKEN="hf_secret").stdout
    assert "hbm_bytes 1073741824 (1 GiB) --hbm-bytes" in " ".join(table.split())
    assert "hf_secret" not in table + got.stdout


@pytest.mark.parametrize("command", ["serve", "config", "doctor"])
def test_a_bad_setting_stops_with_status_two_and_names_itself(dormouse: Command, command: str) -> None:
    got = dormouse(command, "--hbm-bytes", "20G", DORMOUSE_PORT="x")
    assert got.returncode == 2
    assert got.stdout == ""
    assert sorted(line.split(":")[1].strip() for line in got.stderr.splitlines()) == ["--hbm-bytes", "DORMOUSE_PORT"]


def test_a_port_in_use_is_said_before_the_model_is_loaded(
    dormouse: Command,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        got = dormouse("serve", "--port", str(port), "--model", "no/such-model")
    assert got.returncode == 2
    assert got.stderr == f"dormouse: --port: {port} is in use on 127.0.0.1; stop what listens there or take another\n"


def test_a_host_that_is_not_ours_is_named(dormouse: Command) -> None:
    got = dormouse("serve", "--host", "192.0.2.1", "--allow-no-auth")
    assert got.returncode == 2
    assert got.stderr.startswith("dormouse: --host: cannot listen on 192.0.2.1")


def test_chat_without_a_server_says_how_to_start_one(
    dormouse: Command,
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        got = dormouse("chat", "--url", f"http://127.0.0.1:{unused.getsockname()[1]}", stdin="hello\n")
    assert got.returncode == 1
    assert "start one with `dormouse serve`" in got.stderr


def test_chat_and_top_find_their_server_in_a_variable(dormouse: Command) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        for command in (["chat"], ["top", "--once"]):
            got = dormouse(*command, stdin="hello\n", DORMOUSE_CLIENT_URL=url)
            assert got.returncode == 1
            assert f"no server answers at {url}" in got.stderr


def test_programs_are_told_that_the_model_is_not_here_yet(dormouse: Command) -> None:
    got = dormouse("model", "path", "--json")
    assert (got.returncode, got.stderr) == (1, "")
    assert json.loads(got.stdout) == {"name": "smollm2-135m-instruct", "path": None}


def test_a_shell_completes_commands(dormouse: Command) -> None:
    script = dormouse("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert "_DORMOUSE_COMPLETE=complete_bash" in script.stdout
    words = {"COMP_WORDS": "dormouse top --on", "COMP_CWORD": "2", "_DORMOUSE_COMPLETE": "complete_bash"}
    assert dormouse(**words).stdout.split() == ["--once"]


def test_holder_names_the_process_that_has_the_directory(dormouse: Command, tmp_path: Path) -> None:
    assert dormouse("store", "holder").returncode == 1
    directory = NvmeDirectory(tmp_path / "nvme")
    directory.open()
    try:
        assert dormouse("store", "holder", "--nvme-dir", str(tmp_path / "nvme")).stdout == f"{os.getpid()}\n"
        got = dormouse("store", "holder", "--json", "--nvme-dir", str(tmp_path / "nvme"))
        assert json.loads(got.stdout)["held_by"] == os.getpid()
    finally:
        directory.close()
    got = dormouse("store", "holder", "--nvme-dir", str(tmp_path / "nvme"))
    assert (got.returncode, got.stdout) == (1, "")


@pytest.mark.parametrize("tokens", ["8q", "0", "-4", "1.5k"])
def test_doctor_names_what_is_no_number_of_tokens_before_it_loads_anything(dormouse: Command, tokens: str) -> None:
    got = dormouse("doctor", "--sessions", "3", "--tokens", tokens, "--model", "no/such-model")
    assert got.returncode == 2
    assert got.stderr == f"dormouse: --tokens: '{tokens}' is not a number of tokens; write 8192 or 8k\n"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "box"])
def test_without_keys_only_this_machine_is_served(dormouse: Command, host: str) -> None:
    got = dormouse("serve", "--host", host, "--model", "no/such-model")
    assert got.returncode == 2
    assert got.stderr.startswith(f"dormouse: --host: others could reach {host} and use this server without a key; ")
    assert "--allow-no-auth" in got.stderr


def test_with_keys_others_may_be_served(dormouse: Command) -> None:
    """It gets as far as the address, which is no machine's."""
    got = dormouse("serve", "--host", "192.0.2.1", DORMOUSE_API_KEYS="alice=0123456789abcdef0123")
    assert got.stderr.startswith("dormouse: --host: cannot listen on 192.0.2.1")


def test_a_new_key_is_shown_once_and_its_hash_is_for_the_file(dormouse: Command, tmp_path: Path) -> None:
    made = [dormouse("key", "new", "alice"), dormouse("key", "new", "b.o-b_1"), dormouse("key", "new", "--admin")]
    keys = [got.stderr.split()[0] for got in made]
    file = tmp_path / "keys.toml"
    file.write_text("".join(got.stdout for got in made))
    assert not any(key in file.read_text() for key in keys)
    ring = load(Settings(api_keys_file=file))
    owners = [ring.owner(key) for key in keys]
    assert [owner and owner.name for owner in owners] == ["alice", "b.o-b_1", None]
    assert [ring.is_admin(key) for key in keys] == [False, False, True]


@pytest.mark.parametrize("arguments", [[], ["two words"], ["alice", "--admin"], ["a" * 65]])
def test_a_key_needs_an_owner_that_can_be_named(dormouse: Command, arguments: list[str]) -> None:
    got = dormouse("key", "new", *arguments)
    assert got.returncode == 2
    assert got.stdout == ""


def test_keys_are_never_shown(dormouse: Command) -> None:
    keys = {"DORMOUSE_API_KEYS": "alice=0123456789abcdef0123", "DORMOUSE_ADMIN_KEY": "fedcba9876543210fedc"}
    shown = dormouse("config", **keys).stdout + dormouse("config", "--json", **keys).stdout
    assert "0123456789" not in shown
    assert "fedcba" not in shown
    assert json.loads(dormouse("config", "--json", **keys).stdout)["settings"]["admin_key"] == {
        "value": "set",
        "source": "env",
        "name": "DORMOUSE_ADMIN_KEY",
    }
