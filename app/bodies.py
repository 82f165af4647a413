"""What all request bodies are made of: strict types, text that is Unicode, refusals that name their place."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints
from pydantic_core import PydanticCustomError

MAX_SESSION_ID = 256
"""Characters; ids are echoed in a header and kept per branch."""


def refusal(message: str, param: str, code: str) -> PydanticCustomError:
    """A validation error whose sentence stands alone; `param` is relative to where it is raised."""
    return PydanticCustomError(code, "{message}", {"message": message, "param": param, "code": code, "whole": True})


def is_session_id(value: str) -> bool:
    """1 to 256 visible ASCII characters: what can be echoed in a header. `/` is legal."""
    return 0 < len(value) <= MAX_SESSION_ID and all("!" <= character <= "~" for character in value)


def _session_id(value: str) -> str:
    if not is_session_id(value):
        message = f"must be 1 to {MAX_SESSION_ID} visible ASCII characters"
        raise PydanticCustomError("invalid_session_id", "{message}", {"message": message, "code": "invalid_value"})
    return value


def _unicode(value: str) -> str:
    """JSON can escape half a surrogate pair, which no tokenizer and no UTF-8 can take."""
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as exc:
            raise PydanticCustomError("string_unicode", "the text has a lone surrogate and is not Unicode") from exc
    return value


def list_of(value: object) -> object:
    """One string stands for a list of one."""
    return [value] if isinstance(value, str) else value


Text = Annotated[str, AfterValidator(_unicode)]
SessionIdText = Annotated[str, AfterValidator(_session_id)]
StopString = Annotated[Text, StringConstraints(min_length=1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class Body(BaseModel):
    """Strict types, unknown fields ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)
