"""Log lines in both forms."""

from __future__ import annotations

import json
import logging
import sys

from app.log import JsonLines, PrettyLines


def record(message: str, **extra: object) -> logging.LogRecord:
    return logging.getLogger("dormouse.test").makeRecord(
        "dormouse.test", logging.INFO, "file", 1, message, (), None, extra=extra or None
    )


def test_pretty_lines_spell_their_pairs() -> None:
    line = PrettyLines().format(
        record("turn", fields={"session": "a b", "prompt": 12, "ttft_ms": 3.14159, "miss": None})
    )
    assert line.endswith('dormouse.test turn session="a b" prompt=12 ttft_ms=3.1 miss=-')


def test_json_lines_are_objects_with_their_pairs_as_keys() -> None:
    line = json.loads(JsonLines().format(record("turn", fields={"session": "a\nb", "prompt": 12})))
    assert (line["message"], line["level"], line["session"], line["prompt"]) == ("turn", "info", "a\nb", 12)
    assert line["time"].endswith("Z")


def test_a_session_id_cannot_begin_a_line_of_its_own() -> None:
    assert "\n" not in PrettyLines().format(record("turn", fields={"session": "a\nINFO forged"}))


def test_exceptions_are_told_in_both_forms() -> None:
    try:
        raise ValueError("why")
    except ValueError:
        failed = record("it broke")
        failed.exc_info = sys.exc_info()
    assert "ValueError: why" in PrettyLines().format(failed)
    failed.exc_text = None
    assert "ValueError: why" in json.loads(JsonLines().format(failed))["exception"]
