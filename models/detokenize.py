"""Token ids -> text as it may be shown: never broken UTF-8, never part of a stop string.

Three intervals of one answer's text, by characters:

    [0, shown)        given out by `step`
    [shown, decoded)  held back: it may still turn out to begin a stop string
    beyond            ids whose bytes do not yet make a character; they wait inside DecodeStream

What belongs to the branch's history is counted in tokens: those whose text lies wholly in what
the client may see (`kept`).
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PREFIX_TOKENS = 6
"""Last ids of the prompt shown to the decoder, which drops or keeps a leading space by them."""


class Kept(NamedTuple):
    """The first `num_tokens` output ids are, word for word, the first `text_length` characters."""

    num_tokens: int
    text_length: int


class StopStrings:
    """Passes text through, up to the first stop string; holds back what might begin one."""

    __slots__ = ("_held", "_longest", "_stops", "found")

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.found: str | None = None
        """The one that came, which ends the text."""

    def feed(self, text: str) -> str:
        """Take newly decoded text; return what may be shown of it and of what was held back."""
        if not self._stops:
            return text
        text = self._held + text
        found = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            place, self.found = min(found)
            self._held = ""
            return text[:place]
        shown = len(text) - self._suspect(text)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """Return what is held back: no more text will come, so it begins no stop string."""
        held, self._held = self._held, ""
        return held

    def _suspect(self, text: str) -> int:
        """Length of the longest suffix of `text` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class Detokenizer:
    """The text of one answer, token by token.

    `special_ids` are skipped, but for those in `visible`, which are shown as its texts (markers of tool
    calls, say, which something above takes out again). `prefix_ids` are the prompt's (its last few are enough).
    No stop string is looked for in the text of the first `min_tokens` tokens. The id that ended
    a turn (end of sequence, or one of its stop ids) is not text: do not feed it.
    """

    __slots__ = (
        "_decoded",
        "_ends",
        "_min_tokens",
        "_pending",
        "_shown",
        "_special",
        "_stops",
        "_stream",
        "_tokenizer",
        "_visible",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        special_ids: frozenset[int] = frozenset(),
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        prefix_ids: Sequence[int] = (),
        visible: Mapping[int, str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._visible = visible or {}
        self._special = special_ids
        self._stops = StopStrings(stop)
        self._min_tokens = min_tokens
        self._stream = DecodeStream(list(prefix_ids[-PREFIX_TOKENS:]), True)
        self._ends = array("I")  # per token whose text is complete: where it ends
        self._pending = 0  # tokens after those, whose bytes make no character yet
        self._decoded = 0
        self._shown = 0

    @property
    def stopped(self) -> bool:
        """A stop string appeared; text and ids from there on are cut."""
        return self._stops.found is not None

    @property
    def stop_string(self) -> str | None:
        """The one that appeared."""
        return self._stops.found

    def step(self, token_id: int) -> str:
        """Take the next id; return the text that may be shown now (often, not always, non-empty)."""
        assert not self.stopped
        text = self._decode(token_id)
        if text is None and (token_id not in self._special or self._pending):
            self._pending += 1
            return ""
        self._decoded += len(text or "")
        self._ends.extend([self._decoded] * (self._pending + 1))
        self._pending = 0
        if len(self._ends) <= self._min_tokens:
            return self._show(text or "")
        return self._show(self._stops.feed(text or ""))

    def flush(self) -> str:
        """End the answer: return what was held back. Bytes that never made a character stay unseen."""
        return self._show(self._stops.flush())

    @property
    def kept(self) -> Kept:
        """What the branch keeps of the ids fed so far; final after `flush`."""
        return self.kept_within(self._shown)

    def kept_within(self, text_length: int) -> Kept:
        """The most tokens whose text lies wholly within the first `text_length` characters."""
        num_tokens = bisect_right(self._ends, text_length)
        return Kept(num_tokens, self._ends[num_tokens - 1] if num_tokens else 0)

    def _show(self, text: str) -> str:
        self._shown += len(text)
        return text

    def _decode(self, token_id: int) -> str | None:
        if token_id in self._visible:
            return self._visible[token_id]
        try:
            return self._stream.step(self._tokenizer, token_id)
        except Exception as error:
            # Some decoders (Metaspace over invalid UTF-8) take back a character they gave out, and
            # DecodeStream then refuses to go on: begin anew, as vLLM does (vllm #17448).
            if "nvalid prefix" not in str(error):
                raise
            self._stream = DecodeStream([], True)
            return self._stream.step(self._tokenizer, token_id)


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that never appear in visible text."""
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)
