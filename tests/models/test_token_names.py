"""Single tokens as bytes and text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace, Sequence
from tokenizers.models import BPE

from models.token_names import TokenNames

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def names(embedded_folder: Path) -> tuple[TokenNames, Tokenizer]:
    tokenizer = Tokenizer.from_file(str(embedded_folder / "tokenizer.json"))
    return TokenNames(tokenizer), tokenizer


@pytest.mark.parametrize("text", ["Hello there,\n\tyou", "naïve Ω 中文 🐭", "  two  spaces"])
def test_the_bytes_of_a_texts_tokens_are_its_bytes(names: tuple[TokenNames, Tokenizer], text: str) -> None:
    known, tokenizer = names
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert b"".join(known.bytes(token_id) for token_id in ids) == text.encode()


def test_special_tokens_are_their_own_text_and_ids_beyond_the_vocabulary_are_nothing(
    names: tuple[TokenNames, Tokenizer],
) -> None:
    known, _ = names
    assert known.text(2) == "<|im_end|>"
    assert known.bytes(known.num_tokens + 5) == b""


def test_a_sentencepiece_vocabulary_has_its_own_spaces_and_bytes() -> None:
    vocabulary: Any = {"\u2581Hello": 0, "<0xE2>": 1, "a": 2}
    tokenizer = Tokenizer(BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = Sequence([Replace("\u2581", " "), ByteFallback(), Fuse()])
    known = TokenNames(tokenizer)
    assert [known.bytes(token_id) for token_id in range(3)] == [b" Hello", b"\xe2", b"a"]
    assert known.text(1) == "\ufffd"
