"""The keys that open this server: read once at start, kept as digests only.

    --api-keys-file      [keys.alice]                      a key's owner: 1 to 64 of A-Z a-z 0-9 . _ -
                         sha256 = "5d5b..."                or a list, while one key replaces another
                         requests_per_minute = 60          these are optional: without them the --key-... settings
                         [admin]
                         sha256 = "91aa..."                the key of /admin; it opens nothing else
    DORMOUSE_API_KEYS    alice=dm-...,bob=dm-...           in clear
    DORMOUSE_ADMIN_KEY   dm-...

A digest without salt or stretching is enough for keys that nobody could guess, so what is short is refused.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError

from app.budgets import Budget
from app.settings import SECRETS
from app.tenants import Limits, Tenant
from kvstore.errors import SettingInvalid

if TYPE_CHECKING:
    from app.settings import Settings

FILE_FLAG = "--api-keys-file"
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
LEAST_CHARACTERS = 16
"""Of a key in clear: 64 bits, if it is random hexadecimal."""

KEY_PREFIX = "dm-"
KEY_BYTES = 32

Digest = bytes


def new_key() -> str:
    """A key that nobody can guess, printable and without characters that a shell would read."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def digest(key: str) -> Digest:
    """What is kept of a key."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def lines(name: str | None, key: str) -> str:
    """What the keys' file says of `key`: of the owner `name`, or the admin's where that is None."""
    table = "admin" if name is None else f'keys."{name}"' if "." in name else f"keys.{name}"
    return f'[{table}]\nsha256 = "{digest(key).hex()}"'


@dataclass(frozen=True, slots=True)
class Keyring:
    """Who may enter by which key."""

    owners: tuple[tuple[Digest, Tenant], ...] = ()
    admins: tuple[Digest, ...] = ()

    @property
    def has_keys(self) -> bool:
        """/v1 asks for one."""
        return bool(self.owners)

    @property
    def has_admin(self) -> bool:
        """/admin asks for its own."""
        return bool(self.admins)

    def owner(self, key: str) -> Tenant | None:
        """Whose key this is. Compared with all of them, so that the time taken says nothing of any."""
        shown, found = digest(key), None
        for known, tenant in self.owners:
            if hmac.compare_digest(known, shown):
                found = tenant
        return found

    def is_admin(self, key: str) -> bool:
        """Whether this opens /admin."""
        shown, found = digest(key), False
        for known in self.admins:
            found |= hmac.compare_digest(known, shown)
        return found


def load(settings: Settings) -> Keyring:
    """All keys that the settings name.

    Raises:
        SettingInvalid: a file that cannot be read, an owner or a key that cannot be one.
    """
    file = KeyFile() if settings.api_keys_file is None else _read(settings.api_keys_file)
    given = _listed(settings)
    admins = [bytes.fromhex(one) for one in file.admin.sha256] if file.admin is not None else []
    if settings.admin_key is not None:
        admins.append(_checked(settings.admin_key.get_secret_value(), SECRETS["admin_key"]))
    both = sorted(file.keys.keys() & given.keys())
    if both:
        raise SettingInvalid(SECRETS["api_keys"], f"{both[0]!r} is in {settings.api_keys_file}, too; keep one of them")
    entries = file.keys | {name: KeyEntry(sha256=[known.hex()]) for name, known in given.items()}
    owners = [
        (bytes.fromhex(known), tenant)
        for name, entry in entries.items()
        for tenant in [_tenant(name, entry, settings, len(entries))]
        for known in entry.sha256
    ]
    _refuse_doubles(owners, admins)
    return Keyring(tuple(owners), tuple(admins))


# --- the file -----------------------------------------------------------------------------


def _list_of(value: object) -> object:
    return [value] if isinstance(value, str) else value


Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$")]
Count = Annotated[int, Field(ge=0)]


class AdminEntry(BaseModel):
    """`[admin]`."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    sha256: Annotated[list[Sha256], Field(min_length=1), BeforeValidator(_list_of)]


class KeyEntry(AdminEntry):
    """`[keys.NAME]`; what is left out is as the settings say, 0 is no limit."""

    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    max_context: Count | None = None
    max_running: Annotated[int, Field(ge=1)] | None = None
    max_waiting: Annotated[int, Field(ge=1)] | None = None


class KeyFile(BaseModel):
    """The whole file."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    keys: dict[str, KeyEntry] = {}
    admin: AdminEntry | None = None


def _read(path: Path) -> KeyFile:
    try:
        file = KeyFile.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as exc:
        raise SettingInvalid(FILE_FLAG, f"{path} cannot be read: {exc.strerror}") from exc
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise SettingInvalid(FILE_FLAG, f"{path} cannot be read as TOML: {exc}") from exc
    except ValidationError as exc:
        # Not the value: somebody may have written a key where its digest belongs.
        first = exc.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SettingInvalid(FILE_FLAG, f"{path}: {where}: {first['msg']}") from None
    for name in file.keys:
        _check_name(name, FILE_FLAG)
    if not file.keys and file.admin is None:
        raise SettingInvalid(FILE_FLAG, f"{path} holds no key; `dormouse key new NAME` makes one")
    return file


def _listed(settings: Settings) -> dict[str, Digest]:
    """Owners and their keys from the variable."""
    variable = SECRETS["api_keys"]
    if settings.api_keys is None:
        return {}
    found: dict[str, Digest] = {}
    pairs = [pair.strip() for pair in settings.api_keys.get_secret_value().split(",") if pair.strip()]
    for number, pair in enumerate(pairs, 1):
        name, equals, key = pair.partition("=")
        if not equals:
            raise SettingInvalid(variable, f"entry {number} is not name=key")
        _check_name(name, variable)
        if name in found:
            raise SettingInvalid(variable, f"{name!r} is there twice; the file can hold two keys of one owner")
        found[name] = _checked(key, variable)
    if not found:
        raise SettingInvalid(variable, "is empty; unset it to serve without keys")
    return found


def _check_name(name: str, where: str) -> None:
    if not NAME.fullmatch(name):
        raise SettingInvalid(where, f"{name!r} cannot name a key's owner: 1 to 64 of A-Z a-z 0-9 . _ -")


def _checked(key: str, where: str) -> Digest:
    if len(key) < LEAST_CHARACTERS or not all("!" <= character <= "~" for character in key):
        what = f"a key has at least {LEAST_CHARACTERS} visible ASCII characters; `dormouse key new NAME` makes one"
        raise SettingInvalid(where, what)
    return digest(key)


def _tenant(name: str, entry: KeyEntry, settings: Settings, num_keys: int) -> Tenant:
    def either(own: int | None, default: int) -> int:
        return default if own is None else own

    alone = num_keys == 1
    most_running = settings.max_running if alone else max(1, settings.max_running - settings.max_running // 4)
    most_waiting = settings.max_queue if alone else max(1, settings.max_queue // 2)
    limits = Limits(
        is_alone=alone,
        max_context=either(entry.max_context, settings.key_max_context),
        max_running=either(
            entry.max_running, most_running if settings.key_max_running == "auto" else settings.key_max_running
        ),
        max_waiting=either(
            entry.max_waiting, most_waiting if settings.key_max_waiting == "auto" else settings.key_max_waiting
        ),
    )
    budget = Budget(
        either(entry.requests_per_minute, settings.key_requests_per_minute),
        either(entry.tokens_per_minute, settings.key_tokens_per_minute),
    )
    return Tenant(name, limits, budget)


def _refuse_doubles(owners: list[tuple[Digest, Tenant]], admins: list[Digest]) -> None:
    seen: dict[Digest, str] = dict.fromkeys(admins, "the admin")
    for known, tenant in owners:
        if known in seen:
            other = seen[known]
            raise SettingInvalid(FILE_FLAG, f"{tenant.name!r} and {other} have the same key; each needs its own")
        seen[known] = repr(tenant.name)
