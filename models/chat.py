"""Chat messages <-> token ids of one model, with the exact tokens of a session reused.

render   messages -> text                     the model's own template
encode   text -> ids                          spliced from what a branch already ran
close    prompt + answer -> History           what the branch keeps of a completed turn
diverge  where and how a prompt left its branch, in words
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore.history import History, Seam, text_digests
from models.control_tokens import ControlTokens
from models.detokenize import Detokenizer, Kept, special_ids
from models.errors import TemplateFailed
from models.rendering import Message, Rendered, Template
from models.splicing import splice
from models.thinking import thinking_switch
from models.token_names import TokenNames

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DIVERGED_CHARACTERS = 80
DIVERGED_TOKENS = 48
"""Decoded for a divergence's text; enough for 80 characters of most scripts."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt's ids. The first `spliced_tokens` are a branch's own; `seams` are those within them.

    `message_ends` and `first_answer` are Rendered's offsets, in tokens too.
    """

    token_ids: array[int]
    spliced_tokens: int
    seams: tuple[Seam, ...]
    message_ends: tuple[Seam, ...]
    first_answer: int


@dataclass(frozen=True, slots=True)
class Divergence:
    """The message in which a prompt left its branch, and up to 80 characters of both from there on."""

    message_index: int
    stored: str
    received: str


class ChatTemplate:
    """One model's tokenizer and chat template; may be used by several threads.

    Raises:
        TemplateMissing: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._backend = tokenizer.backend_tokenizer
        # A tokenizer.json may carry the lengths it was trained with; a prompt is neither cut nor padded.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._special_ids = special_ids(self._backend)
        self._control = ControlTokens(self._backend)
        self._template = Template(tokenizer, self._control)
        begins: list[int] = self._backend.encode("", add_special_tokens=True).ids
        self._beginning: str = self._backend.decode(begins, skip_special_tokens=False)
        self.names = TokenNames(self._backend)
        self.thinking = thinking_switch(self._template.source)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Messages, each content a string, as the model wants to read them.

        Raises:
            TemplateFailed: the template refuses them; a 400 with its own words.
        """
        return self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )

    def plain(self, text: str, *, add_special_tokens: bool = True) -> Rendered:
        """A text that no template touches; special tokens in it count as such, as its author wants them.

        With `add_special_tokens` it begins as the tokenizer would begin a text, if it does not already.
        """
        begins = self._beginning if add_special_tokens and not text.startswith(self._beginning) else ""
        return Rendered(begins + text, (), {}, (), len(begins + text))

    def given(self, token_ids: Sequence[int]) -> Rendered:
        """A prompt that is ids already."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=False)
        return Rendered(text, (), {}, (), len(text), token_ids=array("I", token_ids))

    def encode(self, rendered: Rendered, histories: Sequence[History] = ()) -> Encoded:
        """Ids of a prompt, spliced from the history that shares most of its text."""
        if rendered.token_ids is not None:
            return Encoded(rendered.token_ids, 0, (), (), len(rendered.token_ids))
        spliced = splice(rendered.text, histories, self._control, self._backend)
        source, seam = spliced.source, spliced.seam
        *tokens, first_answer = spliced.tokens_within([*rendered.message_ends, rendered.first_assistant])
        is_inside = source is not None and source.first_answer < seam.num_tokens
        return Encoded(
            token_ids=spliced.ids,
            spliced_tokens=seam.num_tokens,
            seams=tuple(each for each in source.seams if each <= seam) if source is not None else (),
            message_ends=tuple(map(Seam, rendered.message_ends, tokens)),
            first_answer=source.first_answer if source is not None and is_inside else first_answer,
        )

    def close(self, rendered: Rendered, encoded: Encoded, output_ids: Sequence[int], answer: str) -> History:
        """What a branch keeps of a completed turn: `answer` is its text as the client saw it.

        Ids past a stop string (or of a character never finished) are cut; the special token that
        ended the answer is kept.
        """
        prompt, text = encoded.token_ids, rendered.text + self._control.mark(answer)
        detokenizer = Detokenizer(self._backend, self._special_ids, prefix_ids=prompt)
        decoded = "".join([detokenizer.step(token_id) for token_id in output_ids])
        if not decoded.startswith(answer):  # the client saw something else than what these ids say
            kept, seams = Kept(len(output_ids), 0), []
        else:
            kept = detokenizer.kept_within(len(answer))
            seams = self._answer_seams(rendered, prompt, output_ids, answer, detokenizer)
        token_ids = prompt + array("I", output_ids[: kept.num_tokens])
        return History(
            token_ids=token_ids,
            text=text,
            seams=(*encoded.seams, *seams),
            first_answer=encoded.first_answer,
            message_ends=(*encoded.message_ends, Seam(len(text), len(token_ids))),
            digests=self._closed_digests(rendered, answer, text),
        )

    def diverge(self, encoded: Encoded, history: History, shared_tokens: int) -> Divergence:
        """Where a prompt left `history`, with which it shares its first `shared_tokens`."""
        index = sum(end.num_tokens <= shared_tokens for end in encoded.message_ends)
        return Divergence(
            message_index=min(index, max(0, len(encoded.message_ends) - 1)),
            stored=self._excerpt(history.token_ids, shared_tokens),
            received=self._excerpt(encoded.token_ids, shared_tokens),
        )

    def _answer_seams(
        self, rendered: Rendered, prompt: array[int], output_ids: Sequence[int], answer: str, detokenizer: Detokenizer
    ) -> list[Seam]:
        """Seams at the end of an answer, and before the white space that many templates strip from it."""
        seams: list[Seam] = []
        for length in sorted({len(answer.rstrip()), len(answer)}):
            kept = detokenizer.kept_within(length)
            num_tokens = kept.num_tokens
            # Before the special token that ended it: the template writes its own.
            while num_tokens and output_ids[num_tokens - 1] in self._special_ids:
                num_tokens -= 1
            seam = Seam(
                len(rendered.text) + len(self._control.mark(answer[: kept.text_length])), len(prompt) + num_tokens
            )
            if not seams or seam > seams[-1]:
                seams.append(seam)
        return seams

    def _closed_digests(self, rendered: Rendered, answer: str, text: str) -> tuple[bytes, ...]:
        """Digests up to the end of each answer as the *next* prompt will write them.

        A template may write an answer otherwise once it is history (white space stripped, an empty
        thought dropped), so it is asked, with a user's message behind it.
        """
        if not rendered.messages:
            return ()  # a text has no messages to be known by
        messages, before = list(rendered.messages), ""
        if rendered.continues:
            before = str(messages.pop().get("content"))
        said = {"role": "assistant", "content": before + answer}
        following = [*messages, said, {"role": "user", "content": "."}]
        try:
            closed = self.render(following, chat_template_kwargs=rendered.template_kwargs).digests
        except TemplateFailed:
            closed = ()
        return closed or (*rendered.digests, *text_digests(text, [len(text)]))

    def _excerpt(self, token_ids: array[int], start: int) -> str:
        text: str = self._backend.decode(list(token_ids[start : start + DIVERGED_TOKENS]), skip_special_tokens=False)
        return text[:DIVERGED_CHARACTERS].rstrip("\ufffd")
