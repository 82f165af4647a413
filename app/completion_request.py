"""The body of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, model_validator

from app.bodies import Text, refusal
from app.fields import COMPLETION_NOT_BUILT, Values
from app.schema import MAX_TOP_LOGPROBS, TurnRequest

MOST_TURNS = 128
"""Prompts times choices: each is a turn of its own in the queue."""

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Prompt = Text | TokenIds

_TEXTS = TypeAdapter(list[Text])
_IDS = TypeAdapter(list[TokenIds])


def _prompts(value: object) -> object:
    """One prompt or several, text or token ids -> a list of prompts."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise refusal("'prompt' must be a text, a list of token ids, or a list of either.", "", "invalid_type")
    if all(isinstance(one, int) for one in value):
        value = [value]
    try:
        if all(isinstance(one, str) for one in value):
            return _TEXTS.validate_python(value, strict=True)
        return _IDS.validate_python(value, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = "".join(f"[{part}]" for part in first["loc"] if isinstance(part, int))
        raise refusal(f"Invalid 'prompt{place}': {first['msg']}.", place, "invalid_value") from error


class CompletionRequest(TurnRequest):
    """A prompt is text or token ids; one of either, or a list."""

    not_built: ClassVar[dict[str, Values]] = COMPLETION_NOT_BUILT

    prompt: Annotated[list[Prompt], BeforeValidator(_prompts)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _not_too_many(self) -> CompletionRequest:
        if len(self.prompt) * self.choices > MOST_TURNS:
            message = f"A request may have {MOST_TURNS} answers at most: its prompts times 'n'."
            raise refusal(message, "prompt", "invalid_value")
        return self

    @property
    def told_logprobs(self) -> int | None:
        """As TurnRequest's."""
        return self.logprobs

    @property
    def wants_prompt_logprobs(self) -> bool:
        """As TurnRequest's: an echoed prompt is told like the answer."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def output_limit(self) -> int | None:
        """As TurnRequest's; OpenAI's own default here is 16."""
        limit = super().output_limit
        return 16 if limit is None else limit

    def prompt_of(self, choice: int) -> Any:
        """The prompt that a choice answers."""
        return self.prompt[choice // self.choices]
