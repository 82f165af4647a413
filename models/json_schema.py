"""Which JSON schemas can be held to, keyword by keyword.

A keyword that is not listed is refused and not passed over: an answer that was never held to it would only look valid.
docs/api.md repeats the lists; a test keeps them equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from models.errors import GrammarRefused

SUPPORTED = (
    "type",
    "enum",
    "const",
    "anyOf",
    "$ref",
    "$defs",
    "definitions",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "prefixItems",
    "minItems",
    "maxItems",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "minLength",
    "maxLength",
    "pattern",
    "format",
)
ANNOTATIONS = (
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$schema",
    "$id",
    "$comment",
)
"""They say something to people and ask nothing of an answer."""

FORMATS = ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")

MAX_DEPTH = 64
DECIMALS = 9
"""Places after the point of a number, or of a time's seconds, whose schema does not say."""
_TIMES = ("time", "date-time")
_FEW_DECIMALS = rf"^[^.]*(\.[0-9]{{1,{DECIMALS}}}[^0-9.][^.]*)?$"

_MAPS = ("properties", "$defs", "definitions")
_LISTS = ("anyOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")


def check_schema(schema: object) -> None:
    """Refuse what cannot be held to.

    Raises:
        GrammarRefused: names the keyword and where it stands.
    """
    _check(schema, "", 0)


def _check(schema: object, path: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise GrammarRefused(f"a schema nested deeper than {MAX_DEPTH} is not supported")
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise GrammarRefused(f"the schema{path and ' at ' + path} is neither an object nor a boolean")
    for keyword, value in schema.items():
        where = f"{path}/{keyword}"
        if keyword in ANNOTATIONS:
            continue
        if keyword not in SUPPORTED:
            raise GrammarRefused(
                f"the keyword '{str(keyword)[:60]}' of JSON Schema (at {where[:200]}) is not supported"
            )
        if keyword == "format" and value not in FORMATS:
            raise GrammarRefused(f"the format {str(value)[:60]!r} (at {where[:200]}) is not supported")
        if keyword == "$ref" and not (isinstance(value, str) and value.startswith("#")):
            raise GrammarRefused(f"a '$ref' (at {where[:200]}) may only name a place within the schema")
        for name, inner in _inner(keyword, value):
            _check(inner, f"{where}{name}", depth + 1)


def with_few_decimals(schema: Any) -> Any:
    """The same, but for numbers and times that go on and on: they have `DECIMALS` places at most.

    A model that is held to digits finds no reason to stop, and none writes more of them on purpose. A schema that says
    how fine its numbers are, or whose bounds are finer than that, stays as it is.
    """
    if not isinstance(schema, Mapping):
        return schema
    kinds, said = schema.get("type"), dict(schema)
    for keyword, value in schema.items():
        if keyword in _SINGLE:
            said[keyword] = with_few_decimals(value)
        elif keyword in _MAPS and isinstance(value, Mapping):
            said[keyword] = {name: with_few_decimals(inner) for name, inner in value.items()}
        elif keyword in _LISTS and isinstance(value, list):
            said[keyword] = [with_few_decimals(inner) for inner in value]
    is_number = kinds == "number" or (isinstance(kinds, list) and "number" in kinds)
    if is_number and not schema.keys() & {"multipleOf", "enum", "const"} and not _has_fine_bounds(schema):
        said["multipleOf"] = 10.0**-DECIMALS
    if schema.get("format") in _TIMES and "pattern" not in schema:
        said["pattern"] = _FEW_DECIMALS
    return said


def _has_fine_bounds(schema: Mapping[str, Any]) -> bool:
    bounds = (schema.get(keyword) for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
    return any(
        isinstance(bound, (int, float)) and round(bound, DECIMALS - 3) != bound for bound in bounds if bound is not None
    )


def _inner(keyword: str, value: Any) -> Iterator[tuple[str, object]]:
    if keyword in _SINGLE:
        yield "", value
    elif keyword in _MAPS and isinstance(value, Mapping):
        yield from ((f"/{name}", inner) for name, inner in value.items())
    elif keyword in _LISTS and isinstance(value, list):
        yield from ((f"/{index}", inner) for index, inner in enumerate(value))
