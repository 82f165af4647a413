"""Which family's way of thinking and calling tools a chat template belongs to.

A template shows it by the markers it writes itself. Where it knows no tools, they are described to the model in a
system message and called the way Hermes does (tool_prompt.py), which models learn from a description most easily.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from models.call_syntax import DEEPSEEK, DEEPSEEK_CALLS, HERMES, LLAMA, MISTRAL, MISTRAL_CALLS, CallSyntax
from models.harmony import CHANNEL, SPECIALS, HarmonyParser
from models.output import MarkedParser, OutputParser, PlainParser, ThoughtMarkers

THINK = ThoughtMarkers("<think>", "</think>")
MAGISTRAL_THINK = ThoughtMarkers("[THINK]", "[/THINK]")


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How one model's answers are written. `knows_tools`: its template describes tools to it by itself."""

    thoughts: ThoughtMarkers | None
    syntax: CallSyntax
    knows_tools: bool
    is_harmony: bool = False

    def without_tools(self) -> OutputFormat:
        """The same of a template that cannot write calls."""
        return replace(self, syntax=HERMES, knows_tools=False)

    def parser(self, prompt: str, *, has_tools: bool) -> OutputParser:
        """A reader for the answer to `prompt`, which may have opened a thought already."""
        if self.is_harmony:
            return HarmonyParser()
        if self.thoughts is None and not has_tools:
            return PlainParser()
        is_thinking = self.thoughts is not None and prompt.rstrip().endswith(self.thoughts.opening)
        return MarkedParser(self.thoughts, self.syntax if has_tools else None, is_thinking=is_thinking)

    def markers(self, *, has_tools: bool) -> tuple[str, ...]:
        """Texts that a reader of these answers must see, also where they are special tokens."""
        if self.is_harmony:
            return SPECIALS
        thoughts = () if self.thoughts is None else (self.thoughts.opening, self.thoughts.closing)
        return (*thoughts, *(self.syntax.specials if has_tools else ()))


def output_format(template: str) -> OutputFormat:
    """The format that the source of a template shows."""
    code = re.findall(r"{[{%].*?[}%]}", template, re.DOTALL)
    knows_tools = any(re.search(r"(?<![\w.'\"\[])tools(?![\w'\"])", each) for each in code)
    if CHANNEL in template:
        return OutputFormat(None, HERMES, knows_tools, is_harmony=True)
    thoughts = THINK if THINK.closing in template else MAGISTRAL_THINK if MAGISTRAL_THINK.closing in template else None
    return OutputFormat(thoughts, _syntax(template) if knows_tools else HERMES, knows_tools)


def _syntax(template: str) -> CallSyntax:
    for marker, syntax in (
        (DEEPSEEK_CALLS, DEEPSEEK),
        (MISTRAL_CALLS, MISTRAL),
        ("<tool_call>", HERMES),
        ("<|python_tag|>", LLAMA),
    ):
        if marker in template:
            return syntax
    # Llama 3.2 names no marker: it asks for an object with "parameters".
    return LLAMA if '"parameters"' in template else HERMES
