"""Messages -> text by the model's own chat template, and where each message's content ends in it."""

from __future__ import annotations

import inspect
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from models.errors import TemplateFailed, TemplateMissing
from models.meaning import answer_digests

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from models.control_tokens import ControlTokens

Message = Mapping[str, Any]

_PLACE = "\ufdd2{}\ufdd3"  # noncharacters, which `ControlTokens.mark` removes from what clients send
_PLACES = re.compile("\ufdd2(\\d+)\ufdd3")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as text; special tokens that came from clients are marked in it (see ControlTokens).

    `message_ends` are the offsets where each message's content ends, empty where the template
    hides them; the first assistant message, or else the answer to come, begins at `first_assistant`.
    """

    text: str
    messages: tuple[Message, ...]
    template_kwargs: Mapping[str, Any]
    message_ends: tuple[int, ...]
    first_assistant: int
    continues: bool = False
    """The answer goes on with the last message."""
    token_ids: array[int] | None = None
    """The prompt's own, where it came as ids and `text` is what they say."""
    tools: tuple[Mapping[str, Any], ...] = ()
    reads_calls: bool = False
    """Calls of tools in the answer are calls, and not text like another."""

    @property
    def digests(self) -> tuple[bytes, ...]:
        """Of the conversation up to the end of each answer in it, ascending: what finds a session without an id."""
        return answer_digests(self.messages)


@dataclass(frozen=True, slots=True)
class _How:
    """How a prompt is to end."""

    add_generation_prompt: bool
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] = ()


class Template:
    """One tokenizer's chat template.

    Raises:
        TemplateMissing: the tokenizer has none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, control: ControlTokens) -> None:
        if tokenizer.chat_template is None:
            raise TemplateMissing(
                "this model's tokenizer has no chat template, so it cannot chat: take its instruct or chat variant, "
                "or put a chat_template.jinja into its folder"
            )
        self._tokenizer = tokenizer
        self._control = control
        templates = tokenizer.chat_template
        self.source: str = templates if isinstance(templates, str) else "\n".join(map(str, templates.values()))
        """Of the template, or of all where it has several."""
        taken = inspect.signature(tokenizer.apply_chat_template).parameters
        self._reserved = {*taken, "messages"} - {"kwargs"}

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Rendered:
        """The prompt of `messages`; three passes of the template at most.

        With `continue_final_message` (and no generation prompt) it ends where the last message's content does.

        Raises:
            TemplateFailed: the template refuses them, with its own words.
        """
        kwargs = dict(chat_template_kwargs or {})
        reserved = sorted(self._reserved & kwargs.keys())
        if reserved:
            raise TemplateFailed(f"chat_template_kwargs may not hold {', '.join(reserved)}")
        marked: Any = self._control.mark_all(list(messages))
        marked_kwargs: Any = self._control.mark_all(kwargs)
        marked_tools: Any = self._control.mark_all(list(tools))
        how = _How(add_generation_prompt, continue_final_message, marked_tools)
        text = self._apply(marked, how, marked_kwargs)
        ends = self._message_ends(text, marked, how, marked_kwargs)
        return Rendered(
            text=text,
            messages=tuple(messages),
            tools=tuple(tools),
            template_kwargs=kwargs,
            message_ends=ends,
            first_assistant=self._first_assistant(text, marked, ends, how, marked_kwargs),
            continues=continue_final_message,
        )

    def _apply(self, messages: Sequence[Message], how: _How, kwargs: Mapping[str, Any]) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),  # type: ignore[arg-type]
                tokenize=False,
                add_generation_prompt=how.add_generation_prompt,
                continue_final_message=how.continue_final_message,
                tools=how.tools or None,  # type: ignore[arg-type]
                **kwargs,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
            raise TemplateFailed(f"the model's chat template refuses these messages: {error}") from error
        assert isinstance(text, str)
        return text

    def _message_ends(
        self, text: str, messages: Sequence[Message], how: _How, kwargs: Mapping[str, Any]
    ) -> tuple[int, ...]:
        """Offsets where contents end, found by rendering once more with a placeholder for each.

        A message without content, which only calls tools, ends where the one before it does, as far as is known.
        """
        told = [index for index, message in enumerate(messages) if isinstance(message.get("content"), str)]
        places = [
            {**message, "content": _PLACE.format(index)} if index in told else message
            for index, message in enumerate(messages)
        ]
        try:
            skeleton = self._apply(places, how, kwargs)
        except TemplateFailed:
            return ()
        between = _PLACES.split(skeleton)  # text, index, text, index, ..., text
        if between[1::2] != [str(index) for index in told]:
            return ()
        found = _walk(text, between[::2], [str(messages[index]["content"]) for index in told])
        if len(found) != len(told):
            return ()
        ends = dict(zip(told, found, strict=True))
        all_ends: list[int] = []
        for index in range(len(messages)):
            all_ends.append(ends.get(index, all_ends[-1] if all_ends else 0))
        return tuple(all_ends)

    def _first_assistant(
        self, text: str, messages: Sequence[Message], ends: tuple[int, ...], how: _How, kwargs: Mapping[str, Any]
    ) -> int:
        roles = [message.get("role") for message in messages]
        before = roles.index("assistant") if "assistant" in roles else len(messages)
        if before == 0:
            return 0
        try:
            prefix = self._apply(messages[:before], _How(False, tools=how.tools), kwargs)
        except TemplateFailed:
            prefix = None
        if prefix is not None and text.startswith(prefix):
            return len(prefix)
        return ends[before - 1] if ends else len(text)


def _walk(text: str, between: Sequence[str], contents: Sequence[str]) -> tuple[int, ...]:
    """Follow `text` along what the template writes `between` contents; empty where it leaves that path."""
    if not text.startswith(between[0]):
        return ()
    ends: list[int] = []
    position = len(between[0])
    for content, following in zip(contents, between[1:], strict=True):
        end = _content_end(text, position, content, following)
        if end is None:
            return ()
        ends.append(end)
        position = end + len(following)
    return tuple(ends)


def _content_end(text: str, start: int, content: str, following: str) -> int | None:
    for variant in (content, content.strip(), content.rstrip(), content.lstrip()):
        end = start + len(variant)
        if text.startswith(variant, start) and text.startswith(following, end):
            return end
    # The template changed the content (dropped its reasoning, say): what follows it tells where it ends.
    place = text.find(following, start) if following else -1
    return place if place >= 0 else None
