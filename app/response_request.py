"""The body of `POST /v1/responses`, and the chat request that it means."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PrivateAttr,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from app.bodies import Body, Text, refusal
from app.fields import RESPONSE_NOT_BUILT, Values
from app.messages import Message
from app.response_items import messages_of
from app.response_tools import ChosenTool, ResponseTool, choice_of, only_functions
from app.schema import MAX_TOP_LOGPROBS, ChatRequest, Effort, TurnRequest
from app.structure_bodies import JsonSchema, ResponseFormat
from app.tool_bodies import MAX_TOOLS

if TYPE_CHECKING:
    from app.errors import ErrorReply

INPUT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}

Includable = Literal[
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
]
"""The first two are honoured. The rest is of tools and parts that this server does not have, so nothing is left out."""

PASSED_ON = (
    *("model", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "seed", "stop", "ignore_eos", "session_id", "parent_session_id"),
    *("cache_salt", "cache_prompt", "priority", "session", "prompt_cache_key", "prompt_cache_options", "agent_hint"),
    *("nvext", "metadata", "chat_template_kwargs", "parallel_tool_calls"),
)
"""What means the same in a chat."""

CHAT_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
}
"""What a refusal of the chat request calls a field, and what it is called here."""

ResponseIdText = Annotated[Text, StringConstraints(min_length=1, max_length=512)]


class Format(Body):
    """OpenAI's `response_format`, flat."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[Text, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Format:
        if self.type == "json_schema":
            for name, value in (("name", self.name), ("schema", self.schema_)):
                if value is None:
                    message = f"A format of type 'json_schema' must have a '{name}'."
                    raise refusal(message, name, "missing_required_parameter")
        return self

    def as_chat(self) -> ResponseFormat:
        """The same as a chat request has it."""
        if self.type != "json_schema":
            return ResponseFormat(type=self.type)
        assert self.name is not None
        schema = JsonSchema(name=self.name, description=self.description, schema=self.schema_, strict=self.strict)
        return ResponseFormat(type="json_schema", json_schema=schema)


class TextConfig(Body):
    """What the text of the answer is to be."""

    format: Format | None = None
    verbosity: Text | None = None

    @model_validator(mode="after")
    def _usual(self) -> TextConfig:
        if self.verbosity not in (None, "medium"):
            message = "'text.verbosity' is not supported by this server: leave it out or send medium."
            raise refusal(message, "verbosity", "unsupported_parameter")
        return self


class ReasoningConfig(Body):
    """How much to think. A summary is never made: the thought itself is told."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class ConversationName(Body):
    """A conversation as an object."""

    id: ResponseIdText


def _conversation(value: object) -> object:
    return {"id": value} if isinstance(value, str) else value


def reply_here(reply: ErrorReply) -> ErrorReply:
    """A refusal of the chat request that this one means, in this one's words."""
    name = reply.param and CHAT_NAMES.get(reply.param)
    if not name:
        return reply
    return replace(reply, param=name, message=reply.message.replace(f"'{reply.param}'", f"'{name}'"))


class ResponsesRequest(TurnRequest):
    """`POST /v1/responses`. With `previous_response_id` or `conversation`, `input` is what is new."""

    not_built: ClassVar[dict[str, Values]] = RESPONSE_NOT_BUILT

    input: Annotated[list[Message], BeforeValidator(messages_of), WithJsonSchema(INPUT_SCHEMA)] = Field(
        default_factory=list
    )
    instructions: Text | None = None
    previous_response_id: ResponseIdText | None = None
    conversation: Annotated[ConversationName | None, BeforeValidator(_conversation)] = None
    store: bool | None = None
    include: list[Includable] | None = None
    max_output_tokens: Annotated[int, Field(ge=0)] | None = None
    metadata: Annotated[dict[str, Text], Field(max_length=16)] | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS), BeforeValidator(only_functions)] | None = None
    tool_choice: Annotated[ChosenTool | None, BeforeValidator(choice_of)] = None
    parallel_tool_calls: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    _chat: ChatRequest = PrivateAttr()

    @model_validator(mode="after")
    def _means_a_chat(self) -> ResponsesRequest:
        if self.previous_response_id is not None and self.conversation is not None:
            message = "'previous_response_id' and 'conversation' cannot both be given."
            raise refusal(message, "conversation", "mutually_exclusive_parameters")
        if not (self.input or self.previous_response_id or self.conversation):
            raise refusal("Missing required parameter: 'input'.", "input", "missing_required_parameter")
        try:
            self._chat = self._as_chat()
        except ValidationError as error:
            first = error.errors()[0]
            context = first.get("ctx") or {}
            param = ".".join(str(part) for part in [*first["loc"], context.get("param")] if part)
            code = str(context.get("code", "invalid_value"))
            raise refusal(first["msg"], CHAT_NAMES.get(param, param), code) from error
        return self

    def _as_chat(self) -> ChatRequest:
        given = {name: value for name in PASSED_ON if (value := getattr(self, name)) is not None}
        written = self.text.format if self.text is not None else None
        chosen = self.tool_choice
        return ChatRequest(
            **given,
            messages=self._told(()) or [Message(role="user", content="")],
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.tells_logprobs,
            top_logprobs=self.top_logprobs if self.tells_logprobs else None,
            reasoning_effort=self.reasoning.effort if self.reasoning is not None else None,
            response_format=None if written is None else written.as_chat(),
            tools=[tool.as_chat() for tool in self.tools or ()] or None,
            tool_choice=None if chosen is None else chosen.as_chat(),
        )

    def as_chat(self, before: tuple[Message, ...]) -> ChatRequest:
        """The same question as a chat's: `before` are the messages that it goes on from."""
        return self._chat.model_copy(update={"messages": self._told(before)})

    def _told(self, before: tuple[Message, ...]) -> list[Message]:
        """All messages. Few templates take a second system message, so those at the beginning are one."""
        first = () if self.instructions is None else (Message(role="system", content=self.instructions),)
        messages = [*first, *before, *self.input]
        count = sum(1 for _ in itertools.takewhile(lambda each: each.role in ("system", "developer"), messages))
        if count < 2:
            return messages
        merged = "\n\n".join(each.content for each in messages[:count])
        return [Message(role="system", content=merged), *messages[count:]]

    @property
    def tells_logprobs(self) -> bool:
        """Tokens of the text are to be told with their probabilities."""
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())

    @property
    def seals_thoughts(self) -> bool:
        """The client keeps the conversation and wants back what it need not understand."""
        return "reasoning.encrypted_content" in (self.include or ())

    @property
    def is_prewarm(self) -> bool:
        """Nothing is to be said."""
        return self._chat.output_limit == 0

    @property
    def is_kept(self) -> bool:
        """A later request may go on from the answer by its id: OpenAI's default. A conversation is kept anyway."""
        return self.store is not False or self.conversation is not None

    @property
    def comparison(self) -> str | None:
        """The response whose cache this one's is to be compared with."""
        return None if self.prompt_cache_options is None else self.prompt_cache_options.comparison_response_id
