"""Whether a chat template can be told how much the model is to think, and in which words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_BY_LEVEL = {
    "none": "low",
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
"""gpt-oss knows three efforts."""

_OFF = frozenset({"none", "minimal"})


@dataclass(frozen=True, slots=True)
class ThinkingSwitch:
    """A template variable; `is_level`: it takes low, medium or high, and otherwise true or false."""

    name: str | None = None
    is_level: bool = False

    def variables(self, effort: str) -> Mapping[str, object] | None:
        """What to pass to the template for OpenAI's `effort`; None where it has no switch."""
        if self.name is None:
            return None
        return {self.name: _BY_LEVEL[effort] if self.is_level else effort not in _OFF}


def thinking_switch(template: str) -> ThinkingSwitch:
    """The switch that the source of a template reads: gpt-oss', Qwen3's, or DeepSeek's and Granite's."""
    for name, is_level in (("reasoning_effort", True), ("enable_thinking", False), ("thinking", False)):
        inside = (code for code in re.findall(r"{[{%].*?[}%]}", template, re.DOTALL))
        if any(re.search(rf"(?<![\w.'\"]){name}(?![\w'\"])", code) for code in inside):
            return ThinkingSwitch(name, is_level)
    return ThinkingSwitch()
