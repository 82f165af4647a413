"""The text of an answer beside the ids that said it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from models.detokenize import Detokenizer, Kept

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from models.control_tokens import ControlTokens


class AnswerText:
    """An answer's ids decoded again, so that places in its text are known in tokens and the other way round.

    Special tokens among `visible` are themselves in the marked text, and only what is spelled like one is marked.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        control: ControlTokens,
        special_ids: frozenset[int],
        visible: Mapping[int, str],
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
    ) -> None:
        self._control = control
        self._hidden = special_ids - visible.keys()
        self._output_ids = output_ids
        self._detokenizer = Detokenizer(tokenizer, special_ids, prefix_ids=prompt_ids, visible=visible)
        self.text = ""
        self._visible_spans: list[tuple[int, int]] = []
        for token_id in output_ids:
            piece = self._detokenizer.step(token_id)
            if token_id in visible:
                self._visible_spans.append((len(self.text), len(self.text) + len(piece)))
            self.text += piece

    def kept_within(self, length: int) -> Kept:
        """The most tokens whose text lies within the first `length` characters."""
        return self._detokenizer.kept_within(length)

    def before_ending(self, length: int) -> Kept:
        """The same without the special tokens that ended the answer: a template writes its own."""
        kept = self.kept_within(length)
        num_tokens = kept.num_tokens
        while num_tokens and self._output_ids[num_tokens - 1] in self._hidden:
            num_tokens -= 1
        return Kept(num_tokens, kept.text_length)

    def marked(self, length: int) -> str:
        """The first `length` characters, with what only looks like a special token marked."""
        marked, place = "", 0
        for start, end in self._visible_spans:
            if start >= length:
                break
            marked += self._control.mark(self.text[place:start]) + self.text[start : min(end, length)]
            place = end
        return marked + self._control.mark(self.text[place:length]) if place < length else marked
