"""Bodies that are JSON to a parser and trouble to all else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.json_limits import MAX_DEPTH, refusal

Json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=30,
)


def deep(levels: int, inside: str = "") -> str:
    return "[" * levels + inside + "]" * levels


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ('{"model": "a\\u0000b"}', "model", "NUL"),
        ('{"messages": [{"content": "x"}, {"content": [{"text": "\\u0000"}]}]}', "messages[1].content[0].text", "NUL"),
        ('{"session_id": "\\ud800"}', "session_id", "lone surrogate"),
        ('{"session_id": "\\uDFFF x"}', "session_id", "lone surrogate"),
        ('{"a": {"\\ud83d": 1}}', "a", "lone surrogate"),
        ('{"\\u0000": 1}', None, "NUL"),
        ('{"temperature": NaN}', "temperature", "finite"),
        ('{"logit_bias": {"5": -Infinity}}', "logit_bias.5", "finite"),
        ('["\\u0000"]', "[0]", "NUL"),
        ('{"metadata": ' + deep(MAX_DEPTH) + "}", "metadata", "deeper"),
        ('{"n": 1, "x\\"{[": "]]", "messages": ' + deep(100_000) + "}", "messages", "deeper"),
        ("[" * 100_000, None, "deeper"),
        ('{"a":' * 100_000, "a", "deeper"),
        ('{"\\ud800": ' + deep(100_000) + "}", None, "deeper"),
    ],
)
def test_what_nothing_could_take_is_refused_with_its_place(body: str, param: str | None, says: str) -> None:
    reply = refusal(body.encode())
    assert reply is not None
    assert (reply.status, reply.param, reply.code) == (400, param, "invalid_value")
    assert says in reply.message
    json.loads(reply.payload())


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        '{"text": "NaN and Infinity, \\\\u0000 and \\\\ud800 as they are written"}',
        '{"smile": "\\ud83d\\ude00"}',
        '{"big": 1e999999}'.replace("e999999", "e9"),
        '{"metadata": ' + deep(MAX_DEPTH - 1) + "}",
        '{"brackets": "' + "[{" * 1000 + '"}',
        "[" + "[]," * 1000 + "[]]",
        '"unfinished ' + "[" * 100,
        "\ud800".encode("utf-16", "surrogatepass").decode("latin-1"),
    ],
)
def test_what_is_fine_or_no_json_passes(body: str) -> None:
    assert refusal(body.encode("latin-1")) is None


@given(Json, st.booleans())
def test_every_text_without_those_passes_however_it_is_escaped(value: object, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    has_nul = "\\u0000" in text.replace("\\\\", "")
    body = text.encode(errors="surrogatepass")
    assert (refusal(body) is not None) == has_nul
