"""A chat of several turns by litellm, every other turn streamed; prints each turn's text and usage, and an error."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm


def main(base_url: str, model: str) -> None:
    asked: dict[str, Any] = {"model": f"openai/{model}", "api_base": base_url, "api_key": "unused", "temperature": 0}
    messages: list[dict[str, str]] = []
    turns = []
    for number, question in enumerate(("Name a nut that dormice eat.", "And another?", "Which is bigger?", "Why?")):
        messages.append({"role": "user", "content": question})
        if number % 2:
            options = {"stream": True, "stream_options": {"include_usage": True}}
            chunks = list(litellm.completion(messages=messages, max_tokens=20, **asked, **options))
            reply: Any = litellm.stream_chunk_builder(chunks, messages=messages)
        else:
            reply = litellm.completion(messages=messages, max_tokens=20, **asked)
        text = reply.choices[0].message.content
        messages.append({"role": "assistant", "content": text})
        turns.append({"text": text, "usage": reply.usage.model_dump(), "finish_reason": reply.choices[0].finish_reason})
    try:
        litellm.completion(messages=[{"role": "user", "content": "long " * 20_000}], **asked)
        error = "none"
    except litellm.ContextWindowExceededError:
        error = "ContextWindowExceededError"
    except litellm.BadRequestError as refused:
        error = f"BadRequestError: {refused}"
    print(json.dumps({"turns": turns, "error": error}))


if __name__ == "__main__":
    main(*sys.argv[1:])
