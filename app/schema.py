"""Request bodies of the OpenAI dialect, with Dormouse's extras. What becomes of which field: fields.py."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from app.bodies import Body, Priority, SessionIdText, StopString, Text, list_of, refusal
from app.extras import AgentHint, Nvext, PromptCacheOptions, SessionExtras, StreamOptions, seconds_of
from app.fields import CHAT_NOT_BUILT, Values, refuse_not_built
from app.messages import Message
from app.structure_bodies import Choices, Pattern, ResponseFormat, Schema, StructuredOutputs, ToolChoice, choice_of
from app.tool_bodies import MAX_TOOLS, Tool
from kvstore.terms import Persist, Wishes

NO_EXTRAS = SessionExtras()
NO_HINT = AgentHint()
NO_NVEXT = Nvext()

MAX_CHOICES = 16
"""Each is a turn of its own in the queue."""

MAX_TOP_LOGPROBS = 20

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]


class TurnRequest(Body):
    """What chat completions and completions share: sampling, streaming, and the session."""

    not_built: ClassVar[dict[str, Values]] = {}

    model: Text
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=1024)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Annotated[list[StopString], Field(max_length=4), BeforeValidator(list_of)] | None = None
    ignore_eos: bool | None = None

    stream: bool | None = None
    stream_options: StreamOptions | None = None

    session_id: SessionIdText | None = None
    parent_session_id: SessionIdText | None = None
    cache_salt: Annotated[Text, StringConstraints(min_length=1, max_length=1024)] | None = None
    cache_prompt: bool | None = None
    priority: Priority | None = None
    session: SessionExtras | None = None
    prompt_cache_key: Annotated[Text, StringConstraints(max_length=1024)] | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    agent_hint: AgentHint | None = None
    nvext: Nvext | None = None
    metadata: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _known_but_not_built(cls, body: Any) -> Any:
        if isinstance(body, dict):
            refuse_not_built(body, cls.not_built)
        return body

    @model_validator(mode="after")
    def _consistent(self) -> TurnRequest:
        if self.stream_options is not None and not self.stream:
            message = "'stream_options' is only allowed when 'stream' is true."
            raise refusal(message, "stream_options", "invalid_value")
        for key in self.logit_bias or ():
            if not key.isdecimal() or len(key) > 9:
                message = f"The keys of 'logit_bias' are token ids, and '{key[:40]}' is none."
                raise refusal(message, "logit_bias", "invalid_value")
        return self

    # --- what it comes to, whichever dialect's words were used ---------------------------------

    @property
    def output_limit(self) -> int | None:
        """The most tokens the client wants, 0 for none at all, None for as many as fit."""
        is_prewarm = self.prompt_cache_options is not None and self.prompt_cache_options.prewarm
        return 0 if is_prewarm else self.max_tokens

    @property
    def choices(self) -> int:
        """Answers wanted to one prompt."""
        return self.n or 1

    @property
    def told_logprobs(self) -> int | None:
        """Alternatives to tell for every token of the answer; None: no logprobs at all."""
        return None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """The prompt's own tokens are to be told, too."""
        return False

    @property
    def named_session(self) -> str | None:
        """The session's id, where the body has it."""
        control = (self.nvext or NO_NVEXT).session_control
        foreign = (self.agent_hint or NO_HINT).session_id or (None if control is None else control.session_id)
        return self.session_id or foreign

    @property
    def named_parent(self) -> str | None:
        """The id of the session that it came from, where the body has it."""
        return self.parent_session_id or (self.agent_hint or NO_HINT).parent_session_id

    @property
    def salt(self) -> str | None:
        """What the session and its K/V are met under."""
        return self.cache_salt or (self.nvext or NO_NVEXT).cache_salt

    @property
    def wishes(self) -> Wishes:
        """On which terms the session is to be kept, as far as the request says."""
        extras, nvext = self.session or NO_EXTRAS, self.nvext or NO_NVEXT
        hints = nvext.agent_hints
        foreign = None if hints is None or hints.priority is None else -hints.priority
        return Wishes(
            priority=foreign if self.priority is None else self.priority,
            keep_seconds=self._ttl if extras.keep_seconds is None else extras.keep_seconds,
            expire_seconds=extras.expire_seconds,
            persist=None if extras.persist is None else Persist(extras.persist),
            expected_idle_seconds=extras.expected_idle_seconds,
            final=extras.final,
        )

    @property
    def _ttl(self) -> float | None:
        own = None if self.prompt_cache_options is None else self.prompt_cache_options.ttl_seconds
        others = ((self.agent_hint or NO_HINT).cache_control, (self.nvext or NO_NVEXT).cache_control)
        told = [seconds_of(one.ttl) for one in others if one is not None]
        return next((ttl for ttl in (own, *told) if ttl is not None), None)

    @property
    def session_in_metadata(self) -> str | None:
        """`metadata.user_id`, where Claude Code hides its session."""
        value = (self.metadata or {}).get("user_id")
        return value if isinstance(value, str) else None


class ChatRequest(TurnRequest):
    """`POST /v1/chat/completions`."""

    not_built: ClassVar[dict[str, Values]] = CHAT_NOT_BUILT
    schema_field: ClassVar[str] = "response_format.json_schema.schema"
    """What the client calls the schema of its answer."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    reasoning_effort: Effort | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(choice_of)] = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_grammar: Pattern | None = None

    @model_validator(mode="after")
    def _consistent_chat(self) -> ChatRequest:
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise refusal(
                "'max_tokens' and 'max_completion_tokens' differ; send one of them.", "max_tokens", "invalid_value"
            )
        if self.top_logprobs is not None and self.top_logprobs and not self.logprobs:
            raise refusal("'top_logprobs' is only allowed when 'logprobs' is true.", "top_logprobs", "invalid_value")
        if len({tool.function.name for tool in self.tools or ()}) < len(self.tools or ()):
            raise refusal("Two of the 'tools' have the same name.", "tools", "invalid_value")
        if self.must_call and self.tool_choice is not None:
            known = {tool.function.name for tool in self.tools or ()}
            unknown = sorted((self.tool_choice.names or set()) - known)
            if unknown or not known:
                message = (
                    f"'tool_choice' names {unknown[0]!r}, which is none of the 'tools'."
                    if unknown
                    else ("'tool_choice' wants a call, and there are no 'tools'.")
                )
                raise refusal(message, "tool_choice", "invalid_value")
        if self.continue_final_message and self.add_generation_prompt:
            message = "'continue_final_message' and 'add_generation_prompt' cannot both be true."
            raise refusal(message, "continue_final_message", "invalid_value")
        return self

    @property
    def must_call(self) -> bool:
        """The answer must be a call of a tool."""
        return self.tool_choice is not None and self.tool_choice.mode == "required"

    @property
    def names_a_tool(self) -> bool:
        """It must be a call of one tool that is named."""
        return self.tool_choice is not None and self.tool_choice.is_named

    @property
    def output_limit(self) -> int | None:
        """As TurnRequest's, from whichever name was used."""
        limit = super().output_limit
        return limit if limit is not None else self.max_completion_tokens

    @property
    def told_logprobs(self) -> int | None:
        """As TurnRequest's."""
        return (self.top_logprobs or 0) if self.logprobs else None
