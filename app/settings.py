"""What can be set, in one frozen tree; nothing else in Dormouse reads the environment.

Where a value comes from, first match wins:

    1. a flag                      --hbm-bytes 2GiB
    2. the environment             DORMOUSE_HBM_BYTES=2GiB
    3. a TOML file                 hbm_bytes = "2GiB"
    4. the default

Flags, variables and keys are one name in three spellings, made from the fields below. configuration.py reads them.
"""

from __future__ import annotations

import os
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from app.units import parse_bytes

ENV_PREFIX = "DORMOUSE_"
SECRETS = {"hf_token": "HF_TOKEN", "api_keys": "DORMOUSE_API_KEYS", "admin_key": "DORMOUSE_ADMIN_KEY"}
"""Fields that only a variable can set: on a command line everyone's `ps` would show them, a file is copied about."""


def _size(value: object) -> object:
    """Bytes from text; `auto` and numbers pass."""
    return parse_bytes(value) if isinstance(value, str) and value != "auto" else value


def _names(value: object) -> object:
    """A list from comma-separated text, as environment variables have it."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


Bytes = Annotated[Literal["auto"] | Annotated[int, Field(ge=0)], BeforeValidator(_size)]
Count = Annotated[int, Field(ge=1)]
AutoCount = Literal["auto"] | Count
Limit = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Deadline = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]
AutoShare = Literal["auto"] | Share
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_names)]


class Panel(StrEnum):
    """Headings that `--help` and `dormouse config` group settings under."""

    MODEL = "Model"
    SERVER = "Server"
    KEYS = "Keys and doors"
    MEMORY = "Memory"
    ENGINE = "Engine"
    SESSIONS = "Sessions"
    LIMITS = "Watermarks and limits"


def _field(default: object, panel: Panel, text: str, metavar: str) -> Any:
    """A field that explains itself in --help, `dormouse config` and the docs."""
    return Field(default, description=text, json_schema_extra={"panel": panel.value, "metavar": metavar})


def _default_cache_dir() -> Path:
    return xdg_folder("XDG_CACHE_HOME", ".cache") / "dormouse"


def _default_nvme_dir() -> Path:
    return _default_cache_dir() / "nvme"


def xdg_folder(variable: str, fallback: str) -> Path:
    """A base folder of the XDG specification, which has relative values ignored."""
    named = Path(os.environ.get(variable, ""))
    return named if named.is_absolute() else Path.home() / fallback


class Settings(BaseSettings):
    """All of it. Made directly, it reads no environment and no file: `configuration.load()` does."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_prefix=ENV_PREFIX, validate_default=True)

    model: str = _field(
        "embedded",
        Panel.MODEL,
        "Hugging Face id, local folder, .gguf file, or 'embedded': the small model that Dormouse fetches by itself.",
        "NAME|PATH",
    )
    revision: str | None = _field(None, Panel.MODEL, "Branch, tag or commit of a Hugging Face id.", "REV")
    served_model_name: Names = _field(
        (),
        Panel.MODEL,
        "Name that requests may ask for, instead of the model's own; repeatable, '*' takes any.",
        "NAME",
    )
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = _field(
        "auto", Panel.MODEL, "Weights and K/V in this type; auto takes the model's own.", "auto|bf16|fp16|fp32"
    )
    cache_dir: Path = Field(
        default_factory=_default_cache_dir,
        description="Folder for the embedded model, fingerprints and other things that can be made again.",
        json_schema_extra={"panel": Panel.MODEL.value, "metavar": "DIR"},
    )
    hf_token: SecretStr | None = _field(None, Panel.MODEL, "Hugging Face token, from HF_TOKEN only.", "TOKEN")

    host: str = _field("127.0.0.1", Panel.SERVER, "Address to listen on.", "ADDRESS")
    port: Annotated[int, Field(ge=0, le=65535)] = _field(
        8000, Panel.SERVER, "Port to listen on; 0 takes a free one.", "PORT"
    )
    drain_seconds: Seconds = _field(
        20.0, Panel.SERVER, "How long running turns may finish after SIGTERM or Ctrl-C.", "SECONDS"
    )
    sse_keepalive_seconds: Deadline = _field(
        15.0, Panel.SERVER, "A silent stream gets a comment line this often.", "SECONDS"
    )
    log_level: Literal["debug", "info", "warning", "error"] = _field(
        "info", Panel.SERVER, "Least severe records to log.", "debug|info|warning|error"
    )
    log_format: Literal["pretty", "json"] = _field(
        "pretty", Panel.SERVER, "Log lines for people or for machines.", "pretty|json"
    )
    log_prompts: bool = _field(
        False, Panel.SERVER, "Put the text of every prompt and answer into its turn's log line.", "true|false"
    )
    otel_endpoint: str | None = _field(
        None,
        Panel.SERVER,
        "OpenTelemetry collector to send a trace of every turn to, by OTLP over HTTP: http://127.0.0.1:4318. "
        "Needs the extra 'otel'.",
        "URL",
    )

    api_keys_file: Path | None = Field(
        None,
        description="TOML file of API keys, hashed, and of what each may use; `dormouse key new` makes its lines.",
        json_schema_extra={"panel": Panel.KEYS.value, "metavar": "FILE"},
    )
    api_keys: SecretStr | None = _field(None, Panel.KEYS, "API keys in clear, name=key,name=key.", "NAME=KEY,...")
    admin_key: SecretStr | None = _field(None, Panel.KEYS, "Key of /admin, in clear.", "KEY")
    allow_no_auth: bool = _field(
        False,
        Panel.KEYS,
        "Serve others than this machine without API keys: whoever reaches the port may use it.",
        "true|false",
    )
    admin_text: Literal["auto", "always", "never"] = _field(
        "auto",
        Panel.KEYS,
        "Whether /admin shows 80 characters of where a prompt left its history; auto: where there are no API keys.",
        "auto|always|never",
    )
    guard_metrics: bool = _field(False, Panel.KEYS, "Ask for the admin key at /metrics, too.", "true|false")
    allowed_host: Names = _field(
        (),
        Panel.KEYS,
        "Name in the Host header that requests may come by, beside loopback names, while there are no API keys; "
        "repeatable, '*' takes any.",
        "NAME",
    )
    cors_origin: Names = _field(
        (),
        Panel.KEYS,
        "Web origin whose pages may call, http://localhost:* for any port; repeatable, '*' takes any.",
        "ORIGIN",
    )
    key_requests_per_minute: Limit = _field(
        0, Panel.KEYS, "Turns that each key may ask for in a minute; 0 is no limit. The file may say others.", "N"
    )
    key_tokens_per_minute: Limit = _field(
        0, Panel.KEYS, "Tokens of prompts and answers that each key may use in a minute; 0 is no limit.", "TOKENS"
    )
    key_max_context: Limit = _field(
        0, Panel.KEYS, "Longest prompt and answer together for each key; 0 is what the server has.", "TOKENS"
    )
    key_max_running: AutoCount = _field(
        "auto", Panel.KEYS, "Turns that each key may have running; auto leaves others a quarter.", "auto|TURNS"
    )
    key_max_waiting: AutoCount = _field(
        "auto", Panel.KEYS, "Turns of each key that may wait; auto leaves others half of the queue.", "auto|TURNS"
    )

    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d+)?)$")] = _field(
        "auto", Panel.ENGINE, "Where the model runs; auto takes CUDA where there is one.", "auto|cpu|cuda[:N]"
    )
    threads: AutoCount = _field("auto", Panel.ENGINE, "CPU threads that compute; auto takes the cores.", "auto|N")
    attention: Literal["auto", "exact", "fast"] = _field(
        "auto",
        Panel.ENGINE,
        "exact: the same bits however a prompt was split or batched. auto: exact where a check at start proves it.",
        "auto|exact|fast",
    )
    compile: Literal["auto", "on", "off"] = _field(
        "auto",
        Panel.ENGINE,
        "Kernels of our own, compiled once. auto: where CPU, model and a C compiler allow it; on: or do not start.",
        "auto|on|off",
    )
    prefill_chunk_tokens: Count = _field(
        512, Panel.ENGINE, "Most prompt tokens in one step, so that a long prompt does not stall others.", "TOKENS"
    )
    max_running: Count = _field(64, Panel.ENGINE, "Turns computed together.", "TURNS")
    max_queue: Count = _field(1024, Panel.ENGINE, "Turns that may wait; one more is refused with 429.", "TURNS")
    age_limit_seconds: Seconds = _field(
        10.0, Panel.ENGINE, "A turn that waited this long is admitted before any younger one.", "SECONDS"
    )

    hbm_bytes: Bytes = _field(
        "auto",
        Panel.MEMORY,
        "K/V cache on the device. auto: 90% of the memory free after weights; on a CPU 5% of RAM.",
        "auto|SIZE",
    )
    dram_bytes: Bytes = _field(
        "auto",
        Panel.MEMORY,
        "K/V cache of sleeping sessions in host memory; 0 is none. auto: 25% of the memory limit, on a CPU 10%.",
        "auto|SIZE",
    )
    nvme_bytes: Bytes = _field(
        "auto",
        Panel.MEMORY,
        "Disk for sessions that sleep long, and over restarts; 0 keeps nothing on disk. "
        "auto: 20GiB, or 10% of what is free if that is less.",
        "auto|SIZE",
    )
    nvme_dir: Path = Field(
        default_factory=_default_nvme_dir,
        description="Folder of sleeping sessions: their text and their K/V.",
        json_schema_extra={"panel": Panel.MEMORY.value, "metavar": "DIR"},
    )
    nvme_io: Literal["auto", "direct", "buffered"] = _field(
        "auto",
        Panel.MEMORY,
        "direct goes past the page cache, buffered makes free memory one more tier; auto: direct where it works.",
        "auto|direct|buffered",
    )
    block_tokens: int = _field(32, Panel.MEMORY, "Tokens in one block of K/V: a power of two, 8 to 256.", "TOKENS")
    max_context: AutoCount = _field(
        "auto", Panel.MEMORY, "Longest prompt and answer together; auto is what model and memory allow.", "auto|TOKENS"
    )

    session_header: Names = _field(
        (), Panel.SESSIONS, "One more request header that may carry a session id; repeatable.", "NAME"
    )
    wake_deadline_seconds: Deadline = _field(
        10.0, Panel.SESSIONS, "A sleeping cache that is not back by then is computed again.", "SECONDS"
    )
    session_branches: Count = _field(16, Panel.SESSIONS, "Conversations kept under one session id.", "N")
    max_sessions: Count = _field(100_000, Panel.SESSIONS, "Session ids kept; the least recent goes first.", "N")

    nvme_write_policy: Literal["auto", "every-turn", "on-idle", "on-pressure"] = _field(
        "auto",
        Panel.SESSIONS,
        "When K/V goes to disk. auto: every turn while a day's bytes stay under the drive's rating, else on pressure.",
        "auto|every-turn|on-idle|on-pressure",
    )
    nvme_rated_bytes_per_day: Bytes = _field(
        "auto",
        Panel.SESSIONS,
        "What the drive may be written a day; auto: 0.3 times its size, which is what most are rated for.",
        "auto|SIZE",
    )
    nvme_min_tokens: Annotated[int, Field(ge=0)] = _field(
        0, Panel.SESSIONS, "Shorter conversations do not go to disk; 0 is one block.", "TOKENS"
    )
    idle_to_nvme_seconds: Seconds = _field(
        600.0, Panel.SESSIONS, "A conversation that was silent for this long moves from DRAM to disk.", "SECONDS"
    )
    cost_gate: Literal["auto", "off"] = _field(
        "auto",
        Panel.SESSIONS,
        "auto computes a prompt again where that is measured to be quicker than waking it.",
        "auto|off",
    )

    hbm_high: Share = _field(
        0.90, Panel.LIMITS, "Share of HBM without a copy below at which the coldest fall asleep.", "SHARE"
    )
    hbm_low: Share = _field(0.80, Panel.LIMITS, "They do until that share is this small.", "SHARE")
    dram_high: Share = _field(0.85, Panel.LIMITS, "The same for DRAM, with a tier below it.", "SHARE")
    dram_low: Share = _field(0.75, Panel.LIMITS, "They do until that share is this small.", "SHARE")
    clean_share: Annotated[float, Field(ge=0, le=1)] = _field(
        0.25, Panel.LIMITS, "Share of HBM that is free or copied below ahead of need, as far as DRAM has room.", "SHARE"
    )
    demote_deadline_seconds: Deadline = _field(
        2.0, Panel.LIMITS, "A block that is not asleep by then is dropped and computed again.", "SECONDS"
    )
    tier_backoff_seconds: Seconds = _field(
        5.0, Panel.LIMITS, "A tier that failed to take a block gets no other for this long.", "SECONDS"
    )
    max_transfers: Count = _field(8, Panel.LIMITS, "Copies under way in each direction between two tiers.", "N")
    max_hints: Count = _field(16, Panel.LIMITS, "Wakes asked for by hints that are under way together.", "N")
    nvme_free_share: Annotated[float, Field(ge=0, lt=1)] = _field(
        0.10, Panel.LIMITS, "Share of the disk that stays free: no new space is taken below it.", "SHARE"
    )
    nvme_threads: Count = _field(4, Panel.LIMITS, "Threads that read and write the disk.", "N")
    look_ahead_turns: Annotated[int, Field(ge=0)] = _field(
        4, Panel.LIMITS, "First turns of the queue whose sleeping blocks are brought up before they are admitted.", "N"
    )
    copy_share: AutoShare = _field(
        "auto",
        Panel.LIMITS,
        "Share of its time that a thread copies down what nobody waits for, while turns run; auto is 0.02 on a CPU.",
        "auto|SHARE",
    )
    copy_threads: AutoCount = _field(
        "auto", Panel.LIMITS, "Threads that copy between HBM and DRAM; auto is 1, or 2 from 8 cores on.", "auto|N"
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # configuration.load() runs the others one by one: run together, they forget which of them a value came from.
        return (init_settings,)

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_values(cls, value: object, info: ValidationInfo) -> object:
        # pydantic would take TOML's `port = true` for port 1.
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation is not bool:
            raise ValueError("is true or false, which means nothing here")
        return value

    @field_validator("model", "host")
    @classmethod
    def _not_empty(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("is empty")
        return value

    @field_validator("block_tokens")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if not 8 <= value <= 256 or value & (value - 1):
            raise ValueError(f"{value} is not a power of two from 8 to 256")
        return value

    @field_validator("hbm_low", "dram_low")
    @classmethod
    def _below_high(cls, value: float, info: ValidationInfo) -> float:
        name = (info.field_name or "").replace("low", "high")
        high = info.data.get(name, 1.0)  # missing where it was refused itself
        if value >= high:
            raise ValueError(f"{value} is not below {flag(name)}, which is {high}")
        return value

    @field_validator("session_header")
    @classmethod
    def _header_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name):
                raise ValueError(f"{name!r} is not the name of an HTTP header")
        return tuple(name.lower() for name in value)

    @field_validator("allowed_host")
    @classmethod
    def _host_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not re.fullmatch(r"\*|[A-Za-z0-9._-]+|\[?[0-9A-Fa-f:]+\]?", name):
                raise ValueError(f"{name!r} is not a host name: it has neither scheme nor port")
        return tuple(name.lower().strip("[]") for name in value)

    @field_validator("cors_origin")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if not re.fullmatch(
                r"\*|[A-Za-z][A-Za-z0-9+.-]*://(\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._-]+)(:(\d+|\*))?", origin
            ):
                raise ValueError(f"{origin!r} is not an origin such as https://chat.example or http://localhost:*")
        return tuple(origin.lower() for origin in value)

    @field_validator("otel_endpoint")
    @classmethod
    def _is_http(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", value):
            raise ValueError(f"{value!r} is not a URL such as http://127.0.0.1:4318")
        return value

    @field_validator("cache_dir", "nvme_dir", "api_keys_file")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        return None if value is None else value.expanduser().absolute()


def flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def variable(field: str) -> str:
    return SECRETS.get(field, ENV_PREFIX + field.upper())


FLAGGED = tuple(name for name in Settings.model_fields if name not in SECRETS)
"""Fields that a flag, a variable and a key can set."""


def metavar(field: str) -> str:
    """What a value looks like: `auto|SIZE`."""
    return _extra(field, "metavar")


def panel(field: str) -> str:
    """The heading that `field` stands under."""
    return _extra(field, "panel")


def _extra(field: str, key: str) -> str:
    extra = Settings.model_fields[field].json_schema_extra
    return str(extra.get(key, "")) if isinstance(extra, dict) else ""
