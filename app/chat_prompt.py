"""A chat request's messages -> what the template is asked to write."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from app.errors import InvalidRequest

if TYPE_CHECKING:
    from app.gateway import Gateway
    from app.prompts import Render
    from app.schema import ChatRequest

WITHOUT_A_SWITCH = frozenset({"none", "medium"})
"""Efforts that ask nothing of a model which has no switch: not to think, and to do as usual."""


def chat_prompt(gateway: Gateway, request: ChatRequest) -> Render:
    """Renders the request's messages; slow, and meant for a thread.

    Raises:
        InvalidRequest: the model's template cannot do what is asked of it.
    """
    continues = bool(request.continue_final_message)
    return functools.partial(
        gateway.chat.render,
        [message.as_template() for message in request.messages],
        add_generation_prompt=not continues and request.add_generation_prompt is not False,
        continue_final_message=continues,
        chat_template_kwargs=template_kwargs(gateway, request),
        tools=[tool.as_template() for tool in request.tools or ()],
        reads_calls=request.tool_choice is None or request.tool_choice.mode != "none",
    )


def template_kwargs(gateway: Gateway, request: ChatRequest) -> dict[str, Any]:
    """The template's variables: what the effort means to it, then whatever the request sets itself."""
    given = request.chat_template_kwargs or {}
    effort = request.reasoning_effort
    if effort is None:
        return given
    switched = gateway.chat.thinking.variables(effort)
    if switched is None and effort not in WITHOUT_A_SWITCH:
        message = f"'reasoning_effort' {effort!r} is not supported: this model's template has no switch for it."
        raise InvalidRequest(message, "reasoning_effort", "unsupported_value")
    return {**(switched or {}), **given}
