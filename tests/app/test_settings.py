"""Where each setting comes from, and how a bad one is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from app.configuration import SettingsRefused, Source, load
from app.settings import FLAGGED, Settings, flag, metavar, panel


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home and working directory, and no variable of ours."""
    for name in list(os.environ):
        if name.startswith("DORMOUSE_") or name in ("HF_TOKEN", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return work


def refused(flags: dict[str, object] | None = None, config: Path | None = None) -> list[str]:
    """The problems `load` found, as they are printed."""
    with pytest.raises(SettingsRefused) as caught:
        load(flags, config)
    return str(caught.value).splitlines()


def test_with_nothing_given_every_value_is_its_default() -> None:
    configuration = load()
    assert configuration.settings == Settings()
    assert configuration.file is None
    assert {origin.source for origin in configuration.origins.values()} == {Source.DEFAULT}


def test_a_flag_wins_over_the_environment_that_over_a_file_that_over_the_default(
    bare_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bare_machine / "dormouse.toml").write_text("port = 1\nmax_queue = 1\nmax_running = 1\n")
    monkeypatch.setenv("DORMOUSE_PORT", "2")
    monkeypatch.setenv("DORMOUSE_MAX_QUEUE", "2")
    configuration = load({"port": "3"})
    settings, origins = configuration.settings, configuration.origins
    assert (settings.port, settings.max_queue, settings.max_running, settings.host) == (3, 2, 1, "127.0.0.1")
    assert [(origins[name].source, origins[name].name) for name in ("port", "max_queue", "max_running", "host")] == [
        (Source.FLAG, "--port"),
        (Source.ENV, "DORMOUSE_MAX_QUEUE"),
        (Source.FILE, "dormouse.toml: max_running"),
        (Source.DEFAULT, ""),
    ]


@pytest.mark.parametrize("spelling", ["flag", "env", "file"])
def test_a_size_is_read_alike_from_every_source(
    spelling: str, bare_machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if spelling == "env":
        monkeypatch.setenv("DORMOUSE_HBM_BYTES", "1.5GiB")
    elif spelling == "file":
        (bare_machine / "dormouse.toml").write_text('hbm_bytes = "1.5GiB"\n')
    configuration = load({"hbm_bytes": "1.5GiB"} if spelling == "flag" else {})
    assert configuration.settings.hbm_bytes == 3 * 2**29
    assert configuration.origins["hbm_bytes"].source == spelling


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("port", "70000", "less than or equal to 65535"),
        ("port", "http", "integer"),
        ("device", "gpu", "auto|cpu|cuda[:N]"),
        ("device", "cuda:", "auto|cpu|cuda[:N]"),
        ("dtype", "int8", "auto|bf16|fp16|fp32"),
        ("hbm_bytes", "20G", "20GB or 20GiB"),
        ("hbm_bytes", "lots", "is not a size"),
        ("hbm_bytes", "-1", "is not a size"),
        ("dram_bytes", "1T", "1TB or 1TiB"),
        ("hbm_low", "0.95", "0.95 is not below --hbm-high, which is 0.9"),
        ("dram_low", "0.85", "0.85 is not below --dram-high, which is 0.85"),
        ("hbm_high", "1.5", "less than or equal to 1"),
        ("dram_low", "0", "greater than 0"),
        ("demote_deadline_seconds", "0", "greater than 0"),
        ("copy_threads", "0", "auto|N"),
        ("block_tokens", "48", "power of two from 8 to 256"),
        ("block_tokens", "4", "power of two from 8 to 256"),
        ("threads", "0", "auto|N"),
        ("max_context", "long", "auto|TOKENS"),
        ("max_running", "0", "greater than or equal to 1"),
        ("attention", "flash", "auto|exact|fast"),
        ("drain_seconds", "nan", "finite"),
        ("wake_deadline_seconds", "0", "greater than 0"),
        ("session_header", ["x session"], "not the name of an HTTP header"),
        ("model", " ", "is empty"),
        ("allowed_host", ["http://box"], "is not a host name"),
        ("allowed_host", ["box:80"], "is not a host name"),
        ("cors_origin", ["chat.example"], "is not an origin"),
        ("cors_origin", ["https://chat.example/"], "is not an origin"),
        ("cors_origin", ["https://*.example"], "is not an origin"),
        ("log_level", "loud", "debug|info|warning|error"),
    ],
)
def test_a_bad_flag_is_refused_by_its_name_with_what_it_should_be(field: str, value: object, says: str) -> None:
    (problem,) = refused({field: value})
    assert problem.startswith(f"{flag(field)}: ")
    assert says in problem


def test_a_bad_variable_is_named_as_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DORMOUSE_BLOCK_TOKENS", "33")
    assert refused() == ["DORMOUSE_BLOCK_TOKENS: 33 is not a power of two from 8 to 256"]


def test_a_bad_key_is_named_with_its_file(bare_machine: Path) -> None:
    file = bare_machine / "other.toml"
    file.write_text("max_queue = -1\n")
    (problem,) = refused(config=file)
    assert problem.startswith(f"{file}: max_queue: -1 ")


def test_every_bad_value_is_named_at_once() -> None:
    assert [line.split(":")[0] for line in refused({"port": "x", "dtype": "y"})] == ["--dtype", "--port"]


def test_true_is_not_taken_for_one(bare_machine: Path) -> None:
    (bare_machine / "dormouse.toml").write_text("port = true\n")
    assert refused() == ["dormouse.toml: port: is true or false, which means nothing here"]


def test_an_unknown_key_is_refused_with_the_nearest_known_one(bare_machine: Path) -> None:
    (bare_machine / "dormouse.toml").write_text('hbm-byte = "1GiB"\n')
    assert refused() == ["dormouse.toml: hbm-byte: is not a setting; did you mean hbm_bytes?"]


def test_an_unknown_variable_is_refused_with_the_nearest_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DORMOUSE_PROT", "9000")
    assert refused() == ["DORMOUSE_PROT: is not a setting; did you mean DORMOUSE_PORT?"]


def test_keys_come_from_their_variables_only(bare_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bare_machine / "dormouse.toml").write_text('api_keys = "alice=0123456789abcdef0123"\n')
    (problem,) = refused()
    assert problem.startswith("dormouse.toml: api_keys: is not a setting")
    assert "0123" not in problem
    (bare_machine / "dormouse.toml").unlink()
    monkeypatch.setenv("DORMOUSE_API_KEYS", "alice=0123456789abcdef0123")
    monkeypatch.setenv("DORMOUSE_ADMIN_KEY", "0123456789abcdef0123")
    configuration = load()
    assert configuration.origins["api_keys"].name == "DORMOUSE_API_KEYS"
    assert "0123" not in repr(configuration)


def test_a_switch_is_on_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not load().settings.allow_no_auth
    assert load({"allow_no_auth": True}).settings.allow_no_auth
    monkeypatch.setenv("DORMOUSE_ALLOW_NO_AUTH", "true")
    assert load().settings.allow_no_auth
    monkeypatch.setenv("DORMOUSE_ALLOW_NO_AUTH", "perhaps")
    assert refused()[0].startswith("DORMOUSE_ALLOW_NO_AUTH: ")


def test_a_file_that_is_asked_for_must_be_there(bare_machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = bare_machine / "missing.toml"
    assert refused(config=missing) == [f"--config: there is no file {missing}"]
    monkeypatch.setenv("DORMOUSE_CONFIG", str(missing))
    assert refused() == [f"--config: there is no file {missing}"]


def test_a_file_that_is_no_toml_is_named_with_the_line(bare_machine: Path) -> None:
    (bare_machine / "dormouse.toml").write_text("port = \n")
    (problem,) = refused()
    assert problem.startswith("dormouse.toml: cannot be read as TOML: ")
    assert "line 1" in problem


def test_the_users_own_file_is_read_where_the_folder_has_none(bare_machine: Path, tmp_path: Path) -> None:
    own = tmp_path / "home/.config/dormouse/dormouse.toml"
    own.parent.mkdir(parents=True)
    own.write_text("port = 1234\n")
    assert (load().settings.port, load().file) == (1234, own)
    (bare_machine / "dormouse.toml").write_text("port = 4321\n")
    assert load().settings.port == 4321


def test_lists_are_commas_in_a_variable_and_repeats_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DORMOUSE_SERVED_MODEL_NAME", "claude-x, gpt-y,*")
    settings = load({"session_header": ["X-User-Id", "X-Run"]}).settings
    assert settings.served_model_name == ("claude-x", "gpt-y", "*")
    assert settings.session_header == ("x-user-id", "x-run")


def test_the_token_comes_from_its_usual_variable_and_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    configuration = load()
    token = configuration.settings.hf_token
    assert token is not None
    assert token.get_secret_value() == "hf_secret"
    assert configuration.origins["hf_token"].name == "HF_TOKEN"
    assert "hf_secret" not in repr(configuration)


def test_the_cache_folder_follows_xdg_unless_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load().settings.cache_dir == tmp_path / "home/.cache/dormouse"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert load().settings.cache_dir == tmp_path / "home/.cache/dormouse"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert load().settings.cache_dir == tmp_path / "xdg/dormouse"
    assert load({"cache_dir": "~/mine"}).settings.cache_dir == tmp_path / "home/mine"


def test_settings_do_not_change_after_start() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Settings().port = 1  # type: ignore[misc]


def test_every_setting_explains_itself() -> None:
    for field in FLAGGED:
        assert Settings.model_fields[field].description
        assert metavar(field)
        assert panel(field)
