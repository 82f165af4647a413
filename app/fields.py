"""Every field of OpenAI's two completion requests, and vLLM's names beside them: what becomes of each.

    honoured    declared in schema.py, typed strictly (a string is no number here, as at OpenAI)
    no effect   taken as it comes: says who asks, or hints at what is done anyway
    only ...    known and not built: the values that ask for nothing are accepted; any other is a 400 that names the
                field, because ignoring it in silence would answer another question than was asked
    refused     the same, of a field of which every value asks for something

Unknown fields are accepted and ignored, since clients add fields of their own. docs/api.md has the table; a test
keeps it equal to this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.bodies import refusal

Values = tuple[object, ...]

NO_EFFECT = ("user", "safety_identifier", "prompt_cache_retention")

NOT_BUILT: dict[str, Values] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "use_beam_search": (False,),
}
"""In both requests; field -> values that ask for nothing. Null always does."""

CHAT_NOT_BUILT: dict[str, Values] = {
    **NOT_BUILT,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "moderation": (),
    "verbosity": ("medium",),
    # vLLM's: what would change the rendered prompt
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
}

COMPLETION_NOT_BUILT: dict[str, Values] = {
    **NOT_BUILT,
    "suffix": ("",),
    "best_of": (1,),
    "prompt_embeds": (),
}


def refuse_not_built(body: Mapping[str, Any], not_built: Mapping[str, Values]) -> None:
    """Raises a validation error for the first field that asks for what is not built."""
    for name, benign in not_built.items():
        value = body.get(name)
        if value is None or any(_same(value, one) for one in benign):
            continue
        hint = f"leave it out or send {spelled(benign[0])}" if benign else "leave it out"
        raise refusal(f"'{name}' is not supported by this server: {hint}.", name, "unsupported_parameter")


def spelled(value: object) -> str:
    """A value as JSON would have it, near enough for a sentence."""
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value).replace("'", '"')


def verdicts(
    declared: Mapping[str, object], not_built: Mapping[str, Values], no_effect: tuple[str, ...] = NO_EFFECT
) -> dict[str, str]:
    """Field -> what becomes of it, as docs/api.md says it."""
    return {
        **dict.fromkeys(declared, "honoured"),
        **dict.fromkeys(no_effect, "no effect"),
        **{name: _only(benign) for name, benign in not_built.items()},
    }


def _only(benign: Values) -> str:
    return "only " + ", ".join(f"`{spelled(one)}`" for one in benign) if benign else "refused"


def _same(value: object, benign: object) -> bool:
    """Equality that keeps `true` and `1` apart."""
    return isinstance(value, bool) == isinstance(benign, bool) and value == benign
