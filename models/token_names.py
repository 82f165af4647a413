"""Single token ids -> the bytes and the text they stand for, for lists of logprobs.

A token of a byte-level vocabulary may be part of a character only: its text then shows a replacement character, and
its bytes say what it is.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenNames:
    """The vocabulary of one tokenizer, by id; may be used by several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {token_id: added.content for token_id, added in tokenizer.get_added_tokens_decoder().items()}
        decoder = tokenizer.decoder
        self._is_byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    @property
    def num_tokens(self) -> int:
        """Ids are [0, this)."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def text(self, token_id: int) -> str:
        """As far as it is whole characters."""
        return self.bytes(token_id).decode(errors="replace")

    def bytes(self, token_id: int) -> bytes:
        """Empty for an id that stands for nothing (a model's vocabulary may be padded)."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            letters = byte_of_letter()
            if all(letter in letters for letter in token):
                return bytes(letters[letter] for letter in token)
            return token.encode()
        found = _BYTE.fullmatch(token)
        return bytes([int(found[1], 16)]) if found else token.replace("\u2581", " ").encode()


@lru_cache(1)
def byte_of_letter() -> dict[str, int]:
    """How byte-level vocabularies spell bytes: printable ones as themselves, others as letters from 256 on (GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {chr(byte): byte for byte in printable}
    return spelled | {chr(256 + index): byte for index, byte in enumerate(others)}
