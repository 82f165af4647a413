"""Who has which key, from where it may come, and what is refused before anybody is served."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from pydantic import SecretStr

from app import keys
from app.settings import Settings
from app.tenants import Limits
from kvstore.errors import SettingInvalid

if TYPE_CHECKING:
    from pathlib import Path

    from app.keys import Keyring

ALICE, BOB, ADMIN = "dm-alice-0123456789", "dm-bob-0123456789ab", "dm-admin-0123456789"


def ring(tmp_path: Path, text: str | None = None, **settings: object) -> Keyring:
    if text is not None:
        file = tmp_path / "keys.toml"
        file.write_text(text)
        settings["api_keys_file"] = file
    return keys.load(Settings(**settings))  # type: ignore[arg-type]


def problem(tmp_path: Path, text: str | None = None, **settings: object) -> SettingInvalid:
    with pytest.raises(SettingInvalid) as caught:
        ring(tmp_path, text, **settings)
    return caught.value


def name_of(found: Keyring, key: str) -> str | None:
    owner = found.owner(key)
    return None if owner is None else owner.name


def test_nothing_is_asked_for_where_there_are_no_keys(tmp_path: Path) -> None:
    empty = ring(tmp_path)
    assert (empty.has_keys, empty.has_admin, empty.owner(""), empty.is_admin("")) == (False, False, None, False)


def test_each_key_opens_its_owners_door_and_no_other(tmp_path: Path) -> None:
    text = keys.lines("alice", ALICE) + "\n" + keys.lines(None, ADMIN)
    found = ring(tmp_path, text, api_keys=SecretStr(f" bob={BOB} ,"))
    assert (name_of(found, ALICE), name_of(found, BOB), name_of(found, ADMIN)) == ("alice", "bob", None)
    assert [found.is_admin(key) for key in (ALICE, BOB, ADMIN)] == [False, False, True]
    for wrong in ("", ALICE[:-1], ALICE + "x", ALICE.upper(), "\udcff", "é"):
        assert found.owner(wrong) is None
        assert not found.is_admin(wrong)


def test_an_owner_has_two_keys_while_one_replaces_the_other(tmp_path: Path) -> None:
    digests = [keys.digest(key).hex() for key in (ALICE, BOB)]
    found = ring(tmp_path, f"[keys.alice]\nsha256 = {digests}\nrequests_per_minute = 5\n")
    assert found.owner(ALICE) is found.owner(BOB) is not None  # one budget, one namespace


def test_limits_come_from_the_file_then_from_the_settings(tmp_path: Path) -> None:
    text = keys.lines("alice", ALICE) + "\nmax_context = 64\ntokens_per_minute = 7\nmax_running = 2\n"
    text += keys.lines("bob", BOB) + "\ntokens_per_minute = 0\n"
    found = ring(tmp_path, text, max_running=8, max_queue=10, key_requests_per_minute=3, key_tokens_per_minute=9)
    alice, bob = found.owner(ALICE), found.owner(BOB)
    assert alice is not None
    assert bob is not None
    assert alice.limits == Limits(max_context=64, max_running=2, max_waiting=5)
    assert bob.limits == Limits(max_context=0, max_running=6, max_waiting=5)
    assert (alice.budget.requests.per_minute, alice.budget.tokens.per_minute) == (3, 7)
    assert (bob.budget.requests.per_minute, bob.budget.tokens.per_minute) == (3, 0)


def test_a_key_that_is_alone_has_everything(tmp_path: Path) -> None:
    owner = ring(tmp_path, api_keys=SecretStr(f"alice={ALICE}"), max_running=8, max_queue=10).owner(ALICE)
    assert owner is not None
    assert owner.limits == Limits(max_running=8, max_waiting=10, is_alone=True)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no key"),
        ("keys = 3", "keys"),
        ("[keys.alice]", "keys.alice.sha256"),
        ('[keys.alice]\nsha256 = "dm-alice-0123456789"', "keys.alice.sha256"),
        ("[keys.alice]\nsha256 = []", "keys.alice.sha256"),
        ('[keys."a b"]\nsha256 = "' + "0" * 64 + '"', "cannot name a key's owner"),
        ("[keys.alice]\nrequest_per_minute = 3\nsha256 = '" + "0" * 64 + "'", "request_per_minute"),
        ("[keys.alice]\nmax_running = 0\nsha256 = '" + "0" * 64 + "'", "max_running"),
        ("[admins]\nsha256 = '" + "0" * 64 + "'", "admins"),
        ("alice:sha256:00", "cannot be read as TOML"),
    ],
)
def test_a_file_that_says_something_else_is_named_with_the_place(tmp_path: Path, text: str, says: str) -> None:
    found = problem(tmp_path, text)
    assert found.name == "--api-keys-file"
    assert says in str(found)
    assert "dm-alice" not in str(found)


def test_a_file_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    assert "cannot be read" in str(problem(tmp_path, api_keys_file=tmp_path / "missing.toml"))


@pytest.mark.parametrize(
    "listed", ["", " , ", ALICE, "=" + ALICE, "a b=" + ALICE, "alice=short", "alice=with space 0123456789", "alice="]
)
def test_a_variable_that_holds_no_keys_stops_the_start_and_shows_none(tmp_path: Path, listed: str) -> None:
    found = problem(tmp_path, api_keys=SecretStr(listed))
    assert found.name == "DORMOUSE_API_KEYS"
    assert "0123456789" not in str(found)


def test_a_short_admin_key_stops_the_start(tmp_path: Path) -> None:
    assert problem(tmp_path, admin_key=SecretStr("hunter2")).name == "DORMOUSE_ADMIN_KEY"


def test_no_key_has_two_owners(tmp_path: Path) -> None:
    assert "same key" in str(problem(tmp_path, api_keys=SecretStr(f"alice={ALICE},bob={ALICE}")))
    assert "same key" in str(problem(tmp_path, api_keys=SecretStr(f"alice={ALICE}"), admin_key=SecretStr(ALICE)))
    twice = f"alice={ALICE},alice={BOB}"
    assert "twice" in str(problem(tmp_path, api_keys=SecretStr(twice)))
    both = problem(tmp_path, keys.lines("alice", ALICE), api_keys=SecretStr(f"alice={BOB}"))
    assert "keep one of them" in str(both)


def test_new_keys_are_long_and_never_the_same() -> None:
    made = {keys.new_key() for _ in range(100)}
    assert len(made) == 100
    assert all(key.startswith("dm-") and len(key) >= 43 for key in made)
