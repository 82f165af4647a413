"""A chat of several turns by langchain-openai, streamed, no session id; prints each turn's usage_metadata."""

from __future__ import annotations

import json
import sys

from langchain_core.messages import AIMessageChunk, BaseMessage, HumanMessage
from langchain_openai import ChatOpenAI


def main(base_url: str, model: str) -> None:
    chat = ChatOpenAI(base_url=base_url, api_key="unused", model=model, temperature=0, max_tokens=20, stream_usage=True)
    messages: list[BaseMessage] = []
    turns = []
    for question in ("What does a dormouse do all winter?", "And in spring?", "Tell me why.", "Say it in one word."):
        messages.append(HumanMessage(question))
        answer, chunks = AIMessageChunk(content=""), 0
        for chunk in chat.stream(messages):
            answer += chunk
            chunks += 1
        messages.append(answer)
        turns.append({"text": answer.content, "chunks": chunks, "usage": answer.usage_metadata})
    print(json.dumps(turns))


if __name__ == "__main__":
    main(*sys.argv[1:])
