"""A history becomes bytes and itself again."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from kvstore.catalog_rows import pack_history, unpack_history
from kvstore.history import History, Reply, Seam, Told

TOLD = Told(num_messages=3, digest=b"d" * 16, prompt_length=120, prompt_digest=b"p" * 16, answer_start=130)

REPLY = Reply("resp_a", 1.5, None, '[{"role": "user", "content": "\\u00e9"}]', 3, b"i" * 16, ("tools", "low"))


def history(told: Told | None) -> History:
    return History(
        array("I", [1, 2, 3]), "a text \ud800", (Seam(6, 2),), 1, (Seam(3, 1), Seam(6, 2)), (b"x" * 16,), told
    )


@pytest.mark.parametrize("told", [None, TOLD], ids=["plain", "with calls of tools"])
def test_a_history_comes_back_whole(told: Told | None) -> None:
    assert unpack_history(pack_history(history(told)), history(told).digests) == history(told)


def test_replies_come_back_whole() -> None:
    said = History(array("I", [1, 2]), "ab", (), 1, replies=(REPLY, replace(REPLY, id="resp_b", previous="resp_a")))
    assert unpack_history(pack_history(said), ()) == said
    assert pack_history(said).digest != pack_history(replace(said, replies=(REPLY,))).digest


def test_histories_that_are_told_otherwise_are_not_taken_for_each_other() -> None:
    assert pack_history(history(None)).digest != pack_history(history(TOLD)).digest


def test_bytes_that_are_no_marks_are_refused() -> None:
    packed = pack_history(history(TOLD))
    with pytest.raises(ValueError, match="marks"):
        unpack_history(packed._replace(told=packed.told[:-1]), ())
