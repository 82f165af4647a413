"""Which program a request came from, as its User-Agent calls it: a short name without a version, safe to show."""

from __future__ import annotations

import re

UNKNOWN = "unknown"

# The first product, up to its version: OpenAI/Python 2.0.1, claude-cli/1.0.5 (external), curl/8.5.0.
_PRODUCT = re.compile(r"[A-Za-z][\w.+-]{0,39}(?:/[A-Za-z][\w.+-]{0,39})?")


def client_name(user_agent: str | None) -> str:
    """`OpenAI/Python`, `claude-cli`, `curl`; `unknown` where it says nothing that looks like a name."""
    match = _PRODUCT.match(user_agent or "")
    return UNKNOWN if match is None else match.group()
