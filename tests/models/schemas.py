"""JSON schemas made at random from the keywords that answers can be held to; strings and arrays are bounded."""

from __future__ import annotations

import random
from typing import Any

from models.json_schema import FORMATS

PATTERNS = ("^[a-z]{3,9}$", "^[A-Z][0-9]{2}$", "^(red|green|blue)$", "^\\d{4}-\\d{2}$")


class SchemaMaker:
    """Makes schemas from one seed, nested `depth` deep at most."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._definitions: dict[str, Any] = {}

    def make(self, depth: int = 2) -> dict[str, Any]:
        """An object's schema, with the definitions it refers to."""
        self._definitions = {}
        schema = self._object(depth)
        if self._definitions:
            key = self._random.choice(("$defs", "definitions"))
            renamed: dict[str, Any] = _renamed({**schema, key: dict(self._definitions)}, key)
            return renamed
        return schema

    def _any(self, depth: int) -> dict[str, Any]:
        leaves = (self._string, self._number, self._integer, self._enum, self._const, self._simple)
        inner = (self._nested, self._array, self._tuple, self._any_of, self._reference)
        return self._random.choice(leaves if depth <= 0 else (*leaves, *inner, *inner))(depth)

    def _nested(self, depth: int) -> dict[str, Any]:
        return self._object(depth - 1)

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._random.sample(["id", "name", "size", "kind", "note", "when"], self._random.randint(1, 3))
        required = [name for name in names if self._random.random() < 0.8]
        properties = {name: {**self._any(depth), "description": "A field."} for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def _array(self, depth: int) -> dict[str, Any]:
        least = self._random.randint(0, 2)
        return {"type": "array", "items": self._any(depth - 1), "minItems": least, "maxItems": least + 2}

    def _tuple(self, depth: int) -> dict[str, Any]:
        parts = [self._any(depth - 1) for _ in range(2)]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": 2}

    def _any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._any(depth - 1), {"type": "null"}]}

    def _reference(self, depth: int) -> dict[str, Any]:
        name = f"part{len(self._definitions)}"
        self._definitions[name] = {"type": "null"}  # its place, so that inner ones take others
        self._definitions[name] = self._any(depth - 1)
        return {"$ref": f"#/$defs/{name}"}

    def _string(self, _: int) -> dict[str, Any]:
        match self._random.randrange(3):
            case 0:
                return {"type": "string", "minLength": self._random.randint(0, 3), "maxLength": 12}
            case 1:
                return {"type": "string", "pattern": self._random.choice(PATTERNS)}
            case _:
                bounded = [each for each in FORMATS if each not in ("uri", "email", "hostname", "duration")]
                return {"type": "string", "format": self._random.choice(bounded)}

    def _number(self, _: int) -> dict[str, Any]:
        return {"type": "number", "minimum": 0, "exclusiveMaximum": self._random.choice((1, 10.5, 1000))}

    def _integer(self, _: int) -> dict[str, Any]:
        least = self._random.randint(-20, 20)
        schema = {"type": "integer", "exclusiveMinimum": least, "maximum": least + self._random.randint(5, 500)}
        return {**schema, "multipleOf": 2} if self._random.random() < 0.3 else schema

    def _enum(self, _: int) -> dict[str, Any]:
        return {"enum": self._random.sample(["a", "two words", 3, None, True, 'quo"ted'], 3)}

    def _const(self, _: int) -> dict[str, Any]:
        return {"const": self._random.choice(["fixed", 7, False])}

    def _simple(self, _: int) -> dict[str, Any]:
        return {"type": self._random.choice(["boolean", "null"])}


def _renamed(schema: Any, key: str) -> Any:
    """References to the place where the definitions are."""
    if isinstance(schema, dict):
        return {
            name: value.replace("$defs", key) if name == "$ref" else _renamed(value, key)
            for name, value in schema.items()
        }
    return [_renamed(each, key) for each in schema] if isinstance(schema, list) else schema
