"""Grammars -> which tokens may come next.

llguidance does the work (docs/decisions/011): it has no torch of its own, compiles a schema in about a millisecond, and
computes a mask while it samples. A compiled grammar is kept, and each answer follows it with a matcher of its own.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np

from models.errors import GrammarRefused

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_KEPT = 256
"""Compiled grammars; the one longest unused goes first."""

MOST_CHARACTERS = 256 * 1024
"""Of a grammar's text: more is no schema, but an attempt to keep a core busy."""


class Matcher:
    """One answer's way through a grammar. The engine's thread owns it.

    One that is lost (the grammar grew too complex on the way, or something was chosen that it does not let through)
    cannot be followed any further: what was said so far is no valid answer, and must not be told as one.
    """

    def __init__(self, matcher: Any, num_tokens: int) -> None:
        self._matcher = matcher
        self._mask = np.zeros((num_tokens + 31) // 32, dtype=np.int32)

    def allowed(self, vocabulary: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which of the ids [0, vocabulary) may come next; an ending alone once it is lost."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little")[:vocabulary].astype(np.bool_)
        return np.pad(bits, (0, vocabulary - len(bits)))

    @property
    def is_lost(self) -> bool:
        """The answer cannot be held to its grammar any more."""
        return bool(self._matcher.is_error())

    @property
    def is_over(self) -> bool:
        """The grammar is fulfilled and goes no further."""
        return not self.is_lost and bool(self._matcher.is_stopped())

    def take(self, token_id: int) -> None:
        """Go on with what was chosen."""
        self._matcher.consume_token(token_id)


class Grammar:
    """A compiled grammar; may be shared by any number of answers."""

    def __init__(self, prototype: Any, num_tokens: int) -> None:
        self._prototype = prototype
        self._num_tokens = num_tokens

    def matcher(self) -> Matcher:
        """A fresh way through it."""
        return Matcher(self._prototype.deep_copy(), self._num_tokens)


class Grammars:
    """Compiles and keeps grammars for one tokenizer; thread-safe, and slow: not for the event loop."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = sorted(eos_ids)
        self._lock = threading.Lock()
        self._vocabulary: Any = None  # made when it is first needed: it takes a second or more
        self._kept: OrderedDict[str, Grammar] = OrderedDict()

    def compile(self, text: str) -> Grammar:
        """The grammar of a text in llguidance's Lark.

        Raises:
            GrammarRefused: it is none, or holds what cannot be compiled; says why.
        """
        if len(text) > MOST_CHARACTERS:
            raise GrammarRefused(f"a grammar or schema of more than {MOST_CHARACTERS} characters is not supported")
        with self._lock:
            if text in self._kept:
                self._kept.move_to_end(text)
                return self._kept[text]
            grammar = self._compiled(text)
            self._kept[text] = grammar
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
            return grammar

    def _compiled(self, text: str) -> Grammar:
        import llguidance

        num_tokens = self._tokenizer.get_vocab_size(with_added_tokens=True)
        if self._vocabulary is None:
            self._vocabulary = llguidance.LLTokenizer(
                self._tokenizer.to_str(), n_vocab=num_tokens, eos_token=self._eos_ids
            )
        try:
            prototype = llguidance.LLMatcher(self._vocabulary, text, log_level=0)
        except ValueError as error:
            raise GrammarRefused(_first_line(str(error))) from error
        if prototype.is_error():
            raise GrammarRefused(_first_line(prototype.get_error()))
        return Grammar(prototype, num_tokens)


def _first_line(message: str) -> str:
    """Its first line without the place in a text that the client never saw."""
    line = message.splitlines()[0] if message else "it cannot be compiled"
    _, found, rest = line.partition("failed to compile JSON schema: ")
    return rest if found else line[:300]
