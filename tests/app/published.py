"""Whether what we answer is what OpenAI published: strictly, and with no key but theirs and those listed here.

The SDK itself builds its objects without looking at a value's type; so does `model_validate` with an unknown key.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any, TypeVar

from openai.types import Completion, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from openai.types.completion_usage import PromptTokensDetails
from openai.types.shared import ErrorObject
from pydantic import BaseModel

M = TypeVar("M", bound=BaseModel)

OURS: dict[type[BaseModel], frozenset[str]] = {
    ChatCompletion: frozenset({"session", "timings"}),
    ChatCompletionChunk: frozenset({"session", "timings"}),
    Completion: frozenset({"session", "timings"}),
    ChatCompletionMessage: frozenset({"reasoning_content"}),
    ChoiceDelta: frozenset({"reasoning_content"}),
    PromptTokensDetails: frozenset({"reused_tokens", "miss_reason"}),
    CompletionUsage: frozenset(),
}
"""What answers have beside OpenAI's keys; docs/api.md describes them, reasoning_content as others have it."""

WHOLE: dict[str, type[BaseModel]] = {"chat.completion": ChatCompletion, "text_completion": Completion}


def published(model: type[M], value: Any) -> M:
    """`value` as the published `model`; fails where it is not, or has a key that is neither theirs nor listed."""
    object_ = model.model_validate(value, strict=True)
    strange = [f"{kind.__name__}.{name}" for kind, name in _extras(object_) if name not in OURS.get(kind, ())]
    assert not strange, strange
    return object_


def error_of(value: Any) -> ErrorObject:
    """The error in an error's body: four keys, and nothing beside it."""
    assert set(value) == {"error"}, value
    assert set(value["error"]) == {"message", "type", "param", "code"}, value
    return ErrorObject.model_validate({**value["error"], "code": value["error"]["code"]}, strict=True)


def whole(text: str) -> Any:
    """A body that is no stream, validated."""
    value = json.loads(text)
    published(WHOLE[value["object"]], _first_made_likely(value))
    return value


def stream(text: str, *, usage: bool) -> list[Any]:
    """The chunks of a stream, each validated, and together: one head, a role first, each choice finished once."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    assert blocks.pop() == "data: [DONE]"
    chunks = [json.loads(block[6:]) for block in blocks]
    for chunk in chunks:
        # A text completion's chunks have no reason to finish until the last one, OpenAI's own as well; the SDK has one
        # model for them and for whole ones.
        if chunk["object"] == "text_completion":
            published(Completion, _finished(_first_made_likely(chunk)))
        else:
            published(ChatCompletionChunk, chunk)
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    told = [chunk for chunk in chunks if chunk["choices"]]
    assert [chunk for chunk in chunks if not chunk["choices"]] == (chunks[-1:] if usage else [])
    assert all(chunk.get("usage") is None for chunk in told)
    assert all(("usage" in chunk) == usage for chunk in chunks)
    choices = [choice for chunk in told for choice in chunk["choices"]]
    for index in {choice["index"] for choice in choices}:
        of_one = [choice for choice in choices if choice["index"] == index]
        assert all(choice["finish_reason"] is None for choice in of_one[:-1])
        assert of_one[-1]["finish_reason"] is not None
        if "delta" in of_one[0]:
            assert of_one[0]["delta"]["role"] == "assistant"
            assert not any("role" in choice["delta"] for choice in of_one[1:])
    assert {"session", "timings"} <= set(told[-1])
    return chunks


def _first_made_likely(value: Any) -> Any:
    """With a logprob for an echo's first token, where OpenAI's API has null and its SDK does not know it."""
    value = copy.deepcopy(value)
    for choice in value["choices"]:
        told = choice.get("logprobs")
        if told and told.get("token_logprobs", [0])[:1] == [None]:
            assert told["top_logprobs"][0] is None
            told["token_logprobs"][0], told["top_logprobs"][0] = 0.0, {}
    return value


def _finished(value: Any) -> Any:
    return {**value, "choices": [{**one, "finish_reason": one["finish_reason"] or "stop"} for one in value["choices"]]}


def _extras(value: Any) -> Iterator[tuple[type[BaseModel], str]]:
    if isinstance(value, BaseModel):
        yield from ((type(value), name) for name in value.model_extra or ())
        for name in type(value).model_fields:
            yield from _extras(getattr(value, name))
    elif isinstance(value, list):
        for each in value:
            yield from _extras(each)
