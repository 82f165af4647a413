"""Request bodies of the OpenAI dialect, with Dormouse's extras.

Three kinds of field:
- honoured: declared below, typed strictly (a string is no number here, as at OpenAI);
- known and not built: `NOT_BUILT` lists the values that change nothing; any other value is a 400
  that names the field, because ignoring it in silence would answer another question than was asked;
- unknown: accepted and ignored, since clients add fields of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

MAX_SESSION_ID = 256
"""Characters; ids are echoed in a header and kept per branch."""

NOT_BUILT: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "moderation": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "reasoning_effort": ("none", "medium"),
    "verbosity": ("medium",),
    # vLLM's names for the same wishes, and what would change the rendered prompt
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "use_beam_search": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
}
"""Field -> values that ask for nothing; null always does."""


def refusal(message: str, param: str, code: str) -> PydanticCustomError:
    """A validation error whose sentence stands alone; `param` is relative to where it is raised."""
    return PydanticCustomError(code, "{message}", {"message": message, "param": param, "code": code, "whole": True})


def _same(value: object, benign: object) -> bool:
    """Equality that keeps `true` and `1` apart."""
    return isinstance(value, bool) == isinstance(benign, bool) and value == benign


def _refuse_not_built(body: Mapping[str, Any]) -> None:
    for name, benign in NOT_BUILT.items():
        value = body.get(name)
        if value is None or any(_same(value, one) for one in benign):
            continue
        hint = f"leave it out or send {_spelled(benign[0])}" if benign else "leave it out"
        raise refusal(f"'{name}' is not supported by this server yet: {hint}.", name, "unsupported_parameter")


def _spelled(value: object) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value).replace("'", '"')


def _text_of(content: object) -> object:
    """A string, or text parts joined by line breaks; whatever else pydantic then refuses as no string."""
    if not isinstance(content, list):
        return content
    return "\n".join(_text_of_part(index, part) for index, part in enumerate(content))


def _text_of_part(index: int, part: object) -> str:
    if not isinstance(part, dict):
        raise refusal("A content part must be an object with a 'type'.", f"[{index}]", "invalid_type")
    kind = part.get("type")
    if kind != "text":
        message = f"Content parts of type '{str(kind)[:40]}' are not supported: this server reads text parts only."
        raise refusal(message, f"[{index}].type", "unsupported_content_part")
    text = part.get("text")
    if not isinstance(text, str):
        raise refusal("A text part must carry a string 'text'.", f"[{index}].text", "invalid_type")
    return text


def _list_of(value: object) -> object:
    """One string stands for a list of one."""
    return [value] if isinstance(value, str) else value


def _session_id(value: str) -> str:
    if not is_session_id(value):
        message = f"must be 1 to {MAX_SESSION_ID} visible ASCII characters"
        raise PydanticCustomError("invalid_session_id", "{message}", {"message": message, "code": "invalid_value"})
    return value


def is_session_id(value: str) -> bool:
    """1 to 256 visible ASCII characters: what can be echoed in a header. `/` is legal."""
    return 0 < len(value) <= MAX_SESSION_ID and all("!" <= character <= "~" for character in value)


def _unicode(value: str) -> str:
    """JSON can escape half a surrogate pair, which no tokenizer and no UTF-8 can take."""
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as exc:
            raise PydanticCustomError("string_unicode", "the text has a lone surrogate and is not Unicode") from exc
    return value


Text = Annotated[str, AfterValidator(_unicode)]
SessionIdText = Annotated[str, AfterValidator(_session_id)]
Content = Annotated[Text, BeforeValidator(_text_of)]
StopString = Annotated[Text, StringConstraints(min_length=1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Body(BaseModel):
    """Strict types, unknown fields ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class Message(Body):
    """One message of text."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    def as_template(self) -> dict[str, str]:
        """As chat templates know it; few have heard of developers, who took the place of the system."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, message: object) -> object:
        if not isinstance(message, dict):
            return message
        if message.get("role") in {"tool", "function"}:
            raise refusal("Tool messages are not supported by this server yet.", "role", "unsupported_value")
        for name in ("tool_calls", "function_call", "audio"):
            if message.get(name):
                raise refusal(f"'{name}' is not supported by this server yet.", name, "unsupported_parameter")
        if message.get("role") == "assistant" and message.get("content", "") is None:
            return {**message, "content": ""}  # what SDKs send back for an answer without text
        return message


class StreamOptions(Body):
    """How a stream is dressed."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class PromptCacheOptions(Body):
    """OpenAI's hints; `prewarm` computes and keeps the prompt and answers with nothing."""

    prewarm: bool | None = None


class SessionExtras(Body):
    """What the client expects of the session after this turn; soft hints, but for what is refused here."""

    expected_idle_seconds: Seconds | None = None
    keep_seconds: Seconds | None = None
    expire_seconds: Seconds | None = None
    persist: Literal["disk", "memory", "none"] = "disk"
    final: bool = False

    @model_validator(mode="after")
    def _promises_kept(self) -> SessionExtras:
        # Both are promises that bytes are gone; accepting one without keeping it would be a lie.
        if self.expire_seconds is not None:
            raise refusal("'expire_seconds' is not supported yet.", "expire_seconds", "unsupported_parameter")
        if self.persist == "none":
            message = "'persist': \"none\" is not supported yet; 'cache_prompt': false keeps nothing either."
            raise refusal(message, "persist", "unsupported_value")
        return self


class ChatRequest(Body):
    """`POST /v1/chat/completions`."""

    model: Text
    messages: Annotated[list[Message], Field(min_length=1)]

    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[list[StopString], Field(max_length=4), BeforeValidator(_list_of)] | None = None
    ignore_eos: bool | None = None

    stream: bool | None = None
    stream_options: StreamOptions | None = None

    session_id: SessionIdText | None = None
    parent_session_id: SessionIdText | None = None
    cache_salt: Annotated[Text, StringConstraints(min_length=1, max_length=1024)] | None = None
    cache_prompt: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    session: SessionExtras | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    metadata: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _known_but_not_built(cls, body: object) -> object:
        if isinstance(body, dict):
            _refuse_not_built(body)
        return body

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise refusal(
                "'max_tokens' and 'max_completion_tokens' differ; send one of them.", "max_tokens", "invalid_value"
            )
        if self.stream_options is not None and not self.stream:
            message = "'stream_options' is only allowed when 'stream' is true."
            raise refusal(message, "stream_options", "invalid_value")
        return self

    @property
    def output_limit(self) -> int | None:
        """The most tokens the client wants, 0 for none at all, None for as many as fit."""
        if self.prompt_cache_options is not None and self.prompt_cache_options.prewarm:
            return 0
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def session_in_metadata(self) -> str | None:
        """`metadata.user_id`, where Claude Code hides its session."""
        value = (self.metadata or {}).get("user_id")
        return value if isinstance(value, str) else None
