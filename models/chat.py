"""Chat messages <-> token ids of one model, with the exact tokens of a session reused.

render   messages -> text                     the model's own template
encode   text -> ids                          spliced from what a branch already ran
close    prompt + answer -> History           what the branch keeps of a completed turn
diverge  where and how a prompt left its branch, in words
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvstore.history import History, Seam, Told
from models.answer_text import AnswerText
from models.control_tokens import ControlTokens
from models.detokenize import Kept, special_ids
from models.meaning import answer_digests, digest_of, message_of
from models.output import OutputParser, PlainParser, parsed
from models.rendering import Message, Rendered, Template
from models.retelling import retell, text_digest
from models.splicing import splice
from models.thinking import thinking_switch
from models.token_names import TokenNames
from models.tool_messages import ToolMessages, probe
from models.tool_prompt import with_tools
from models.tools import output_format

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DIVERGED_CHARACTERS = 80
DIVERGED_TOKENS = 48
"""Decoded for a divergence's text; enough for 80 characters of most scripts."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt's ids. The first `spliced_tokens` are a branch's own; `seams` are those within them.

    `message_ends` and `first_answer` are Rendered's offsets, in tokens too. `text` is the prompt's, in
    the branch's own spelling where a client told its history in another (retelling.py).
    """

    text: str
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
        self.format = output_format(self._template.source)
        self._tool_messages = self._probed()

    def _probed(self) -> ToolMessages:
        """How the template takes calls; one that cannot write them is one that knows no tools."""
        if not self.format.knows_tools:
            return ToolMessages()
        found = probe(
            lambda messages, tools: self._template.render(messages, tools=tools).text,
            names_thoughts=self.format.is_harmony,
        )
        if found is None:
            self.format = self.format.without_tools()
        return found or ToolMessages()

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        reads_calls: bool = True,
    ) -> Rendered:
        """Messages, each content a string or none, as the model wants to read them; `tools` as OpenAI describes them.

        With `reads_calls` false the answer is text, though tools are described: none is to be called.

        Raises:
            TemplateFailed: the template refuses them; a 400 with its own words.
        """
        how: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
        }
        if self.format.knows_tools:
            rendered = self._template.render(self._tool_messages.adapted(messages), tools=tools, **how)
            ends = rendered.message_ends
        else:
            written = with_tools(messages, tools)
            rendered = self._template.render(written.messages, **how)
            ends = written.ends(rendered.message_ends)
        return replace(
            rendered,
            messages=tuple(messages),
            message_ends=ends,
            tools=tuple(tools),
            reads_calls=bool(tools) and reads_calls,
        )

    def parser(self, rendered: Rendered) -> OutputParser:
        """Reads the answer to a prompt."""
        return self._parser(rendered, rendered.text)

    def _parser(self, rendered: Rendered, prompt: str) -> OutputParser:
        if not rendered.messages:
            return PlainParser()  # no template asked for anything
        return self.format.parser(prompt, has_tools=rendered.reads_calls)

    def visible_ids(self, rendered: Rendered) -> frozenset[int]:
        """Special tokens that the reader of the answer must see."""
        if not rendered.messages:
            return frozenset()
        found = (self._backend.token_to_id(marker) for marker in self.format.markers(has_tools=rendered.reads_calls))
        return frozenset(token_id for token_id in found if token_id in self._special_ids)

    @property
    def template_source(self) -> str:
        """The template's own text."""
        return self._template.source

    def grammar_marker(self, text: str) -> str:
        """How a grammar names a marker: a special token by its id, anything else by its text."""
        token_id = self._backend.token_to_id(text)
        return f"<[{token_id}]>" if token_id in self._special_ids else json.dumps(text, ensure_ascii=False)

    def call_ids(self) -> tuple[int, ...]:
        """Tokens that open a call, where one token does: without them none can be begun."""
        found = (self._backend.token_to_id(opening) for opening in self.format.syntax.openings)
        return tuple(token_id for token_id in found if token_id is not None)

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
            return Encoded(rendered.text, rendered.token_ids, 0, (), (), len(rendered.token_ids))
        retold = retell(
            rendered,
            histories,
            self._control,
            lambda messages: self._history_text(rendered, messages),
            lambda prompt: self._parser(rendered, prompt),
        )
        spliced = splice(retold.text, histories, self._control, self._backend)
        source, seam = spliced.source, spliced.seam
        *tokens, first_answer = spliced.tokens_within([*retold.message_ends, rendered.first_assistant])
        is_inside = source is not None and source.first_answer < seam.num_tokens
        return Encoded(
            text=retold.text,
            token_ids=spliced.ids,
            spliced_tokens=seam.num_tokens,
            seams=tuple(each for each in source.seams if each <= seam) if source is not None else (),
            message_ends=tuple(map(Seam, retold.message_ends, tokens)),
            first_answer=source.first_answer if source is not None and is_inside else first_answer,
        )

    def close(self, rendered: Rendered, encoded: Encoded, output_ids: Sequence[int], answer: str) -> History:
        """What a branch keeps of a completed turn: `answer` is its text as the client saw it.

        Ids past a stop string (or of a character never finished) are cut; the special token that
        ended the answer is kept.
        """
        prompt = encoded.token_ids
        visible = {token_id: self._control.content(token_id) or "" for token_id in self.visible_ids(rendered)}
        decoded = AnswerText(self._backend, self._control, self._special_ids, visible, prompt, output_ids)
        if not decoded.text.startswith(answer):  # the client saw something else than what these ids say
            text = encoded.text + self._control.mark(answer)
            kept, seams = Kept(len(output_ids), 0), []
        else:
            text = encoded.text + decoded.marked(len(answer))
            kept = decoded.kept_within(len(answer))
            seams = self._answer_seams(encoded, decoded, answer)
        token_ids = prompt + array("I", output_ids[: kept.num_tokens])
        messages = self._closed_messages(rendered, answer)
        return History(
            token_ids=token_ids,
            text=text,
            seams=(*encoded.seams, *seams),
            first_answer=encoded.first_answer,
            message_ends=(*encoded.message_ends, Seam(len(text), len(token_ids))),
            digests=answer_digests(messages),
            told=self._told(rendered, encoded, messages),
        )

    def plain_ids(self, text: str) -> list[int]:
        """Ids of a text whose special tokens count as such, without a beginning of its own."""
        return self._control.encode(text).ids

    def diverge(self, encoded: Encoded, history: History, shared_tokens: int) -> Divergence:
        """Where a prompt left `history`, with which it shares its first `shared_tokens`."""
        index = sum(end.num_tokens <= shared_tokens for end in encoded.message_ends)
        return Divergence(
            message_index=min(index, max(0, len(encoded.message_ends) - 1)),
            stored=self._excerpt(history.token_ids, shared_tokens),
            received=self._excerpt(encoded.token_ids, shared_tokens),
        )

    def _answer_seams(self, encoded: Encoded, decoded: AnswerText, answer: str) -> list[Seam]:
        """Seams at the end of an answer, and before the white space that many templates strip from it."""
        seams: list[Seam] = []
        for length in sorted({len(answer.rstrip()), len(answer)}):
            kept = decoded.before_ending(length)
            marked = len(decoded.marked(kept.text_length))
            seam = Seam(len(encoded.text) + marked, len(encoded.token_ids) + kept.num_tokens)
            if not seams or seam > seams[-1]:
                seams.append(seam)
        return seams

    def _closed_messages(self, rendered: Rendered, answer: str) -> tuple[Message, ...]:
        """The prompt's messages and the answer, as a client will send them back; none where a text was continued."""
        if not rendered.messages:
            return ()
        messages, before = rendered.messages, ""
        if rendered.continues:
            before = str(messages[-1].get("content") or "")
            messages = messages[:-1]
        return (*messages, message_of(parsed(self.parser(rendered), answer), before))

    def _told(self, rendered: Rendered, encoded: Encoded, messages: Sequence[Message]) -> Told | None:
        """By what another spelling of it is known, where there can be one."""
        if not messages or rendered.continues:
            return None
        if not messages[-1].get("tool_calls") and encoded.text == rendered.text:
            return None
        return Told(
            num_messages=len(messages),
            digest=digest_of(messages),
            prompt_length=len(rendered.text),
            prompt_digest=text_digest(rendered.text),
            answer_start=len(encoded.text),
        )

    def _history_text(self, rendered: Rendered, messages: Sequence[Message]) -> str:
        return self.render(
            messages,
            add_generation_prompt=False,
            chat_template_kwargs=rendered.template_kwargs,
            tools=rendered.tools,
        ).text

    def _excerpt(self, token_ids: array[int], start: int) -> str:
        text: str = self._backend.decode(list(token_ids[start : start + DIVERGED_TOKENS]), skip_special_tokens=False)
        return text[:DIVERGED_CHARACTERS].rstrip("\ufffd")
