"""Answers held to schemas, patterns and calls, whatever the model would rather say."""

from __future__ import annotations

import json
import random
import re
from typing import TYPE_CHECKING, Any

import jsonschema
import numpy as np
import pytest
import torch

from models import constraint
from models.errors import GrammarRefused
from models.grammar import Grammars, Matcher
from models.json_schema import ANNOTATIONS, FORMATS, SUPPORTED, check_schema, with_few_decimals
from models.output import parsed
from models.sampling import SamplingParams, SamplingRow, sample
from tests.models.schemas import SchemaMaker
from tests.models.test_tool_templates import ANSWERS, TOOLS, chat_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    from models.chat import ChatTemplate
    from models.constraint import Constraint

EOS = 2


@pytest.fixture(scope="module")
def pretrained(embedded_folder: Path) -> PreTrainedTokenizerFast:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(embedded_folder)
    return tokenizer  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def grammars(pretrained: PreTrainedTokenizerFast) -> Grammars:
    return Grammars(pretrained.backend_tokenizer, frozenset({EOS}))


def walk(matcher: Matcher, tokenizer: Tokenizer, seed: int, most: int = 2000) -> str | None:
    """What a model without any preference would say; None where it did not come to an end."""
    chosen, ids = random.Random(seed), list[int]()
    markers = np.array(list(tokenizer.get_added_tokens_decoder()))
    for _ in range(most):
        allowed = np.flatnonzero(matcher.allowed(tokenizer.get_vocab_size()))
        if chosen.random() < 0.5 and np.isin(allowed, markers).any():
            # Free text ends at a marker, which is one token among thousands.
            allowed = np.intersect1d(allowed, [EOS] if EOS in allowed else markers)
        token_id = int(chosen.choice(allowed))
        if token_id == EOS:
            text: str = tokenizer.decode(ids, skip_special_tokens=False)
            return text
        ids.append(token_id)
        matcher.take(token_id)
    return None


def compiled(grammars: Grammars, made: Constraint) -> Callable[[], Matcher]:
    return grammars.compile(f"start: body\n{made.rules}").matcher


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_drawn_the_answer_is_valid(
    grammars: Grammars, pretrained: PreTrainedTokenizerFast, seed: int
) -> None:
    maker, ended = SchemaMaker(seed), 0
    for number in range(10):
        schema = maker.make()
        matcher = compiled(grammars, constraint.json_value(schema))
        text = walk(matcher(), pretrained.backend_tokenizer, number)
        if text is not None:
            ended += 1
            validator = jsonschema.Draft202012Validator(
                schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
            )
            validator.validate(json.loads(text))
    assert ended == 10


def test_every_keyword_that_is_listed_is_made_use_of() -> None:
    spelled = json.dumps([SchemaMaker(seed).make() for seed in range(60)])
    assert [keyword for keyword in SUPPORTED if f'"{keyword}"' not in spelled] == []


@pytest.mark.parametrize(
    "keyword",
    ["not", "oneOf", "allOf", "if", "patternProperties", "uniqueItems", "contains", "minProperties", "propertyNames",
     "dependentRequired", "unevaluatedProperties", "$dynamicRef", "x-guidance"],
)  # fmt: skip
@pytest.mark.parametrize("path", [(), ("properties", "a"), ("items",), ("$defs", "b"), ("anyOf", 0)])
def test_a_keyword_that_is_not_listed_is_refused_wherever_it_stands(keyword: str, path: tuple[Any, ...]) -> None:
    schema: Any = {keyword: {}}
    for part in reversed(path):
        schema = [schema] if isinstance(part, int) else {part: schema}
    with pytest.raises(GrammarRefused, match=re.escape(f"'{keyword}'")):
        check_schema(schema)
    assert keyword not in (*SUPPORTED, *ANNOTATIONS)


@pytest.mark.parametrize(
    "schema",
    [5, {"format": "phone"}, {"$ref": "https://example.org/s.json"}, {"items": [{}]}, {"properties": {"a": 1}}],
)
def test_what_is_no_schema_here_is_refused(schema: object) -> None:
    with pytest.raises(GrammarRefused):
        check_schema(schema)


def test_a_schema_deeper_than_can_be_followed_is_refused() -> None:
    schema: Any = {"type": "null"}
    for _ in range(100):
        schema = {"items": schema}
    with pytest.raises(GrammarRefused, match="deeper"):
        check_schema(schema)


@pytest.mark.parametrize("format", FORMATS)
def test_every_listed_format_compiles(grammars: Grammars, format: str) -> None:
    compiled(grammars, constraint.json_value({"type": "string", "format": format}))


def test_a_schema_nothing_can_satisfy_is_refused_with_a_reason(grammars: Grammars) -> None:
    with pytest.raises(GrammarRefused, match=r"\w+"):
        compiled(grammars, constraint.json_value({"type": "integer", "minimum": 5, "maximum": 3}))
    with pytest.raises(GrammarRefused):
        compiled(grammars, constraint.regex("(unclosed"))
    with pytest.raises(GrammarRefused):
        grammars.compile(constraint.grammar("this is no grammar").rules)


@pytest.mark.parametrize(
    ("made", "pattern"),
    [
        (constraint.regex("[a-c]{2}/[0-9]{1,3}"), "[a-c]{2}/[0-9]{1,3}"),
        (constraint.regex(r"a\/b|c\\"), r"a/b|c\\"),
        (constraint.choice(["yes", 'no "way"']), 'yes|no "way"'),
    ],
)
def test_patterns_and_choices_are_kept_to(
    grammars: Grammars, pretrained: PreTrainedTokenizerFast, made: Constraint, pattern: str
) -> None:
    for seed in range(10):
        text = walk(compiled(grammars, made)(), pretrained.backend_tokenizer, seed)
        assert text is not None
        assert re.fullmatch(pattern, text)


def test_grammars_are_read_in_both_spellings(grammars: Grammars, pretrained: PreTrainedTokenizerFast) -> None:
    for text in ('root ::= "a" ("b" | "c")', 'start: "a" ("b" | "c")'):
        matcher = grammars.compile(constraint.grammar(text).rules).matcher()
        assert walk(matcher, pretrained.backend_tokenizer, 1) in ("ab", "ac")


def test_what_leaves_the_grammar_is_lost_and_says_so(grammars: Grammars) -> None:
    matcher = grammars.compile("start: body\n" + constraint.regex("[0-9]{2}").rules).matcher()
    for token_id, is_lost in ((int(np.flatnonzero(matcher.allowed(49152))[0]), False), (5, True)):
        matcher.take(token_id)
        assert matcher.is_lost is is_lost
        assert not matcher.is_over


def test_a_grammar_is_compiled_once(grammars: Grammars) -> None:
    text = constraint.regex("a{3}")
    assert grammars.compile(f"start: body\n{text.rules}") is grammars.compile(f"start: body\n{text.rules}")


def test_a_row_draws_nothing_that_its_grammar_forbids_and_others_draw_as_ever(grammars: Grammars) -> None:
    grammar = grammars.compile("start: body\n" + constraint.regex("[0-9]").rules)
    logits = torch.randn(3, 49152, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=1.0, seed=5)
    free = [SamplingRow(params, 10, 0), SamplingRow(SamplingParams(temperature=0), 10, 0)]
    held = SamplingRow(SamplingParams(temperature=1.0, seed=5, top_k=5), 10, 0, matcher=grammar.matcher())
    alone = sample(logits[:2], free)
    chosen = sample(logits, [*free, held])
    assert chosen[:2] == alone
    allowed = np.flatnonzero(grammar.matcher().allowed(49152))
    assert len(allowed) == 10
    assert chosen[2] in allowed
    early = SamplingRow(SamplingParams(min_tokens=9, seed=1), 10, 1, ending_ids=frozenset({EOS}))
    over = grammar.matcher()
    over.take(int(allowed[0]))
    assert sample(logits[:1], [SamplingRow(early.params, 10, 1, ending_ids=early.ending_ids, matcher=over)]) == [EOS]


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("family", ANSWERS)
def test_a_call_that_is_wanted_is_one_in_the_familys_own_form(
    pretrained: PreTrainedTokenizerFast, family: str, several: bool
) -> None:
    template, _, _ = ANSWERS[family]
    chat: ChatTemplate = chat_of(pretrained, template)
    tokenizer: Any = chat._backend
    bounded = json.loads(json.dumps(TOOLS))
    for tool in bounded:
        properties = {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}}
        tool["function"]["parameters"] = {
            "type": "object", "properties": properties, "required": ["city"], "additionalProperties": False
        }  # fmt: skip
    rendered = chat.render([{"role": "user", "content": "Go."}], tools=bounded)
    made = constraint.calls(chat.format, chat.template_source, bounded, chat.grammar_marker, several=several)
    text = constraint.framed(made, chat.format, rendered.text, chat.grammar_marker)
    grammar = Grammars(tokenizer, frozenset({EOS})).compile(text)
    for seed in range(4):
        answer = walk(grammar.matcher(), tokenizer, seed)
        assert answer is not None
        said = parsed(chat.parser(rendered), answer)
        assert said.calls
        assert several or len(said.calls) == 1
        for call in said.calls:
            assert call.name in ("get_weather", "get_time")
            jsonschema.validate(json.loads(call.arguments), bounded[0]["function"]["parameters"])
        assert said.content == ""


def test_numbers_and_times_do_not_go_on_for_ever_unless_their_schema_asks_for_more() -> None:
    assert with_few_decimals({"type": "number", "maximum": 10.5})["multipleOf"] == 1e-9
    assert with_few_decimals({"anyOf": [{"type": ["number", "null"]}]})["anyOf"][0]["multipleOf"] == 1e-9
    assert with_few_decimals({"properties": {"enum": {"type": "number"}}})["properties"]["enum"]["multipleOf"] == 1e-9
    assert re.fullmatch(with_few_decimals({"format": "time"})["pattern"], "10:11:12.123456789Z")
    assert not re.fullmatch(with_few_decimals({"format": "time"})["pattern"], "10:11:12.1234567891Z")
    for schema in (
        {"type": "number", "minimum": 1e-12},
        {"type": "number", "multipleOf": 0.5},
        {"type": "number", "enum": [0.1234567891234]},
        {"type": "string", "format": "time", "pattern": "Z$"},
        {"type": "integer"},
        {"const": {"type": "number"}},
        True,
    ):
        assert with_few_decimals(schema) == schema
