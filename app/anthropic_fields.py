"""Fields of `POST /v1/messages` that are not read, and what becomes of each; words as in fields.py.

The fields that are read are declared in anthropic_request.py, and docs/api.md has the table of both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.fields import Values

NO_EFFECT = (
    "context_management",
    "fallbacks",
    "fallback_credit_token",
    "billing_policy",
    "user_profile_id",
    "workspace_id",
)

NOT_BUILT: dict[str, Values] = {
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "inference_geo": ("global", "not_available"),
    "container": (),
    "mcp_servers": ([],),
    "compaction": (),
    "thread": (),
}
