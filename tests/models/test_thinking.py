"""Which switch a template has for thinking, and what an effort means to it."""

from __future__ import annotations

import pytest

from models.thinking import ThinkingSwitch, thinking_switch


@pytest.mark.parametrize(
    ("template", "switch"),
    [
        ("{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}",
         ThinkingSwitch("enable_thinking")),
        ("{%- if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}",
         ThinkingSwitch("reasoning_effort", is_level=True)),
        ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}", ThinkingSwitch("thinking")),
        ("{{ message.thinking }} enable_thinking", ThinkingSwitch()),
        ("{{ messages[0]['content'] }}", ThinkingSwitch()),
    ],
)  # fmt: skip
def test_the_switch_is_the_variable_that_the_template_reads(template: str, switch: ThinkingSwitch) -> None:
    assert thinking_switch(template) == switch


def test_an_effort_becomes_what_the_template_understands() -> None:
    flag, level = ThinkingSwitch("enable_thinking"), ThinkingSwitch("reasoning_effort", is_level=True)
    assert flag.variables("none") == {"enable_thinking": False}
    assert flag.variables("low") == {"enable_thinking": True}
    assert level.variables("xhigh") == {"reasoning_effort": "high"}
    assert ThinkingSwitch().variables("high") is None
