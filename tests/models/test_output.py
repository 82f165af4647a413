"""Answers of every family, read whole and in pieces of any size: the same, and never a part of a marker."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.call_syntax import DEEPSEEK, HERMES, LLAMA, MISTRAL
from models.deltas import Content, Delta, Reasoning, Said
from models.detokenize import Detokenizer, StopStrings
from models.harmony import HarmonyParser
from models.output import MarkedParser, OutputParser, PlainParser, ThoughtMarkers, parsed
from models.tools import MAGISTRAL_THINK, THINK, OutputFormat, output_format

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WEATHER = '{"city": "Paris", "days": 2}'
TIME = '{"zone": "CET {winter}", "note": "a \\"quoted\\" }"}'


@dataclass(frozen=True)
class Case:
    """An answer as a family writes it, and what it says; `calls` are (name, arguments)."""

    name: str
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    thoughts: ThoughtMarkers | None = None
    is_thinking: bool = False

    def parser(self) -> OutputParser:
        family = self.name.split()[0]
        if family == "harmony":
            return HarmonyParser()
        syntax = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "deepseek": DEEPSEEK}.get(family)
        return MarkedParser(self.thoughts, syntax, is_thinking=self.is_thinking)


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def deepseek(*calls: tuple[str, str], fenced: bool = True) -> str:
    begin, sep = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"  # noqa: RUF001
    end = "<｜tool▁call▁end｜>"  # noqa: RUF001
    written = [
        f"{begin}function{sep}{name}\n```json\n{arguments}\n```{end}"
        if fenced
        else f"{begin}{name}{sep}{arguments}{end}"
        for name, arguments in calls
    ]
    between = "\n" if fenced else ""
    return "<｜tool▁calls▁begin｜>" + between.join(written) + "<｜tool▁calls▁end｜>"  # noqa: RUF001


CASES = [
    Case("hermes text", "Just text < with > signs.\n", content="Just text < with > signs.\n"),
    Case("hermes one", hermes("get_weather", WEATHER), calls=(("get_weather", WEATHER),)),
    Case(
        "hermes two behind text",
        f"Let me look.\n{hermes('get_weather', WEATHER)}\n{hermes('get_time', TIME)}",
        content="Let me look.",
        calls=(("get_weather", WEATHER), ("get_time", TIME)),
    ),
    Case(
        "hermes arguments first, as a text, and none",
        '<tool_call>{"arguments": {"a": [1, {"b": 2}]}, "name": "f"}</tool_call>'
        '<tool_call>{"name": "g", "arguments": "{\\"a\\": 1}"}</tool_call><tool_call>{"name": "h"}</tool_call>',
        calls=(("f", '{"a": [1, {"b": 2}]}'), ("g", '{"a": 1}'), ("h", "{}")),
    ),
    Case("hermes no call", "<tool_call>\nnothing\n</tool_call>", content="<tool_call>\nnothing\n</tool_call>"),
    Case("hermes cut off before its name", '<tool_call>\n{"na', content='<tool_call>\n{"na'),
    Case("hermes cut off", '<tool_call>\n{"name": "f", "arguments": {"a', calls=(("f", '{"a'),)),
    Case("hermes text behind", f"{hermes('f', '{}')}\nDone.", content="\nDone.", calls=(("f", "{}"),)),
    Case(
        "hermes thinks",
        f"<think>\nHm, <tool_call> or not?\n</think>\n\nSo:\n{hermes('f', WEATHER)}",
        content="So:",
        reasoning="Hm, <tool_call> or not?",
        calls=(("f", WEATHER),),
        thoughts=THINK,
    ),
    Case(
        "hermes has begun to think",
        "Hm.\n</think>\n\nYes.",
        content="Yes.",
        reasoning="Hm.",
        thoughts=THINK,
        is_thinking=True,
    ),
    Case("plain thinks of markers", "A <think> here is a word.", content="A <think> here is a word.", thoughts=THINK),
    Case("plain thinks without end", "<think>\nOn and on\n", reasoning="On and on", thoughts=THINK),
    Case("mistral thinks", "[THINK]Hm.[/THINK]Yes. ", content="Yes. ", reasoning="Hm.", thoughts=MAGISTRAL_THINK),
    Case("llama bare", f'{{"name": "f", "parameters": {WEATHER}}}', calls=(("f", WEATHER),)),
    Case(
        "llama tagged and several",
        f'<|python_tag|>{{"name": "f", "parameters": {WEATHER}}}; {{"name": "g", "parameters": {TIME}}}',
        calls=(("f", WEATHER), ("g", TIME)),
    ),
    Case("llama json that is no call", '{"answer": {"deep": 42}}', content='{"answer": {"deep": 42}}'),
    Case("llama text", 'No { "braces" } first.', content='No { "braces" } first.'),
    Case(
        "mistral list",
        f'[TOOL_CALLS][{{"name": "f", "arguments": {WEATHER}}}, '
        f'{{"name": "g", "arguments": {TIME}, "id": "123456789"}}]',
        calls=(("f", WEATHER), ("g", TIME)),
    ),
    Case(
        "mistral named",
        f"Look: [TOOL_CALLS]f[ARGS]{WEATHER}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{TIME}",
        content="Look:",
        calls=(("f", WEATHER), ("g", TIME)),
    ),
    Case("deepseek fenced", deepseek(("f", WEATHER), ("g", TIME)), calls=(("f", WEATHER), ("g", TIME))),
    Case(
        "deepseek bare",
        "Well.\n\n" + deepseek(("f", WEATHER), ("g", TIME), fenced=False),
        content="Well.",
        calls=(("f", WEATHER), ("g", TIME)),
    ),
    Case(
        "harmony thinks and answers",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes < no.",
        content="Yes < no.",
        reasoning="Hm.",
    ),
    Case(
        "harmony calls",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{WEATHER}<|call|>"
        f"<|start|>assistant to=functions.g<|channel|>commentary <|constrain|>json<|message|>{TIME}",
        content="I look.",
        reasoning="Hm.",
        calls=(("f", WEATHER), ("g", TIME)),
    ),
    Case("harmony forgot its channels", "Just text.", content="Just text."),
]


def said_in_pieces(case: Case, cuts: list[int]) -> tuple[Said, list[Delta]]:
    parser, said, deltas = case.parser(), Said(), []
    places = sorted({0, len(case.text), *(cut % (len(case.text) + 1) for cut in cuts)})
    for start, end in itertools.pairwise(places):
        deltas += parser.feed(case.text[start:end])
    deltas += parser.finish()
    for delta in deltas:
        said.add(delta)
    return said, deltas


def assert_says(said: Said, case: Case) -> None:
    assert said.content == case.content
    assert said.reasoning == case.reasoning
    assert [(call.name, call.arguments) for call in said.calls] == list(case.calls)
    assert len({call.id for call in said.calls}) == len(said.calls)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_answer_says_what_its_family_means_by_it(case: Case) -> None:
    assert_says(parsed(case.parser(), case.text), case)
    for _, arguments in case.calls:
        if "cut off" not in case.name:
            assert isinstance(json.loads(arguments), dict)


@given(st.sampled_from(CASES), st.lists(st.integers(0, 10_000), max_size=60))
@settings(max_examples=400, deadline=None)
def test_pieces_of_any_size_say_the_same(case: Case, cuts: list[int]) -> None:
    said, deltas = said_in_pieces(case, cuts)
    assert_says(said, case)
    if case.calls and "cut off" not in case.name:
        shown = "".join(delta.text for delta in deltas if isinstance(delta, Content | Reasoning))
        assert "</tool_call" not in shown
        assert "TOOL_CALLS" not in shown


@given(st.sampled_from(CASES), st.data())
@settings(max_examples=300, deadline=None)
def test_an_answer_cut_at_a_stop_string_says_the_same_in_pieces(case: Case, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, max(0, len(case.text) - 1)))
    stop = case.text[start : start + data.draw(st.integers(1, 5))] or "."
    size = data.draw(st.integers(1, 7))
    filter_, parser, said, shown = StopStrings([stop]), case.parser(), Said(), ""
    for place in range(0, len(case.text), size):
        text = filter_.feed(case.text[place : place + size])
        shown += text
        for delta in parser.feed(text):
            said.add(delta)
        if filter_.found:
            break
    shown += (rest := filter_.flush())
    for delta in [*parser.feed(rest), *parser.finish()]:
        said.add(delta)
    assert shown == case.text.partition(stop)[0]
    whole = parsed(case.parser(), shown)
    assert (said.content, said.reasoning) == (whole.content, whole.reasoning)
    assert [(call.name, call.arguments) for call in said.calls] == [(call.name, call.arguments) for call in whole.calls]


PARTS = st.sampled_from(
    [
        *("Dormice sleep", " all winter", "\n", " a<b", "🐿️ naïve 冬眠", "<think>\nHm, 🤔?\n</think>\n\n", "<tool_"),
        *("</tool_call>", hermes("f", '{"city": "Zürich 🌦"}'), "\n" + hermes("g", "{}")),
    ]
)
STOPS = st.lists(st.sampled_from(["winter", "sleep all", "🐿", "眠", "call>", "\n\n", "z"]), max_size=3)


@given(st.lists(PARTS, min_size=1, max_size=5), st.integers(0, 6), STOPS, st.booleans())
@settings(max_examples=300, deadline=None)
def test_ids_say_the_same_token_by_token_and_at_once(
    tokenizer: Tokenizer, parts: list[str], cut: int, stops: list[str], has_tools: bool
) -> None:
    ids = tokenizer.encode("".join(parts), add_special_tokens=False).ids
    ids = ids[: len(ids) - cut]
    detokenizer = Detokenizer(tokenizer, stop=stops)
    syntax = HERMES if has_tools else None
    parser, said, shown = MarkedParser(THINK, syntax), Said(), ""
    for token_id in ids:
        text = detokenizer.step(token_id)
        shown += text
        for delta in parser.feed(text):
            said.add(delta)
        if detokenizer.stopped:
            break
    shown += (rest := detokenizer.flush())
    for delta in [*parser.feed(rest), *parser.finish()]:
        said.add(delta)
    decoded = tokenizer.decode(ids).rstrip("\ufffd")
    places = [decoded.find(stop) for stop in stops if stop in decoded]
    assert decoded.startswith(shown)
    # A token that begins a character may begin with a space: cut there, neither is shown.
    assert shown.rstrip() == decoded.rstrip() if not places else len(shown) <= min(places)
    assert not any(stop in shown for stop in stops)
    whole = parsed(MarkedParser(THINK, syntax), shown)
    assert (said.content, said.reasoning) == (whole.content, whole.reasoning)
    assert [(call.name, call.arguments) for call in said.calls] == [(call.name, call.arguments) for call in whole.calls]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_letter_by_letter_arguments_come_as_they_are_written(case: Case) -> None:
    said, deltas = said_in_pieces(case, list(range(len(case.text))))
    assert_says(said, case)
    if len(case.calls) == 1 and "first" not in case.name and len(case.calls[0][1]) > 4:
        parts = [delta for delta in deltas if not isinstance(delta, Content | Reasoning)]
        assert len(parts) > 4


def test_without_markers_everything_is_content() -> None:
    assert parsed(PlainParser(), "<think>a</think> <tool_call>").content == "<think>a</think> <tool_call>"


TOOLED = "{% if tools %}{{ tools | tojson }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (TOOLED + "{{ '<tool_call>' }} {{ content.split('</think>') }}", OutputFormat(THINK, HERMES, True)),
        (TOOLED + "{{ '[TOOL_CALLS]' }}", OutputFormat(None, MISTRAL, True)),
        (TOOLED + "{{ '<｜tool▁calls▁begin｜>' }}", OutputFormat(None, DEEPSEEK, True)),  # noqa: RUF001
        (TOOLED + "{{ '<|python_tag|>' }}", OutputFormat(None, LLAMA, True)),
        (TOOLED + """Respond with {"name": ..., "parameters": ...}""", OutputFormat(None, LLAMA, True)),
        (TOOLED + "{{ '<|channel|>' }}", OutputFormat(None, HERMES, True, is_harmony=True)),
        ("{{ message['tools'] }} tools", OutputFormat(None, HERMES, False)),
    ],
)
def test_a_template_shows_its_family(template: str, expected: OutputFormat) -> None:
    assert output_format(template) == expected
