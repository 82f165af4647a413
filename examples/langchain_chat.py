"""A conversation over LangChain, whose session has a name.

    pip install langchain-openai
    python examples/langchain_chat.py --url http://127.0.0.1:8000

`extra_body` carries what OpenAI's API has no field for. Without it the session would be found by its text; with it the
application knows what to wake, to put to sleep, and to delete.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
import uuid
from urllib.parse import quote

from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI

QUESTIONS = ("Name three small animals.", "Which of them sleeps longest?", "Say it in one word.")


def post(url: str, key: str) -> dict[str, object]:
    """A call without a body, of the session's own routes."""
    request = urllib.request.Request(url, b"", {"authorization": f"Bearer {key}"}, method="POST")
    with urllib.request.urlopen(request) as reply:
        answer: dict[str, object] = json.load(reply)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--key", default="unused", help="API key, where the server asks for one")
    options = parser.parse_args()
    session = f"langchain-{uuid.uuid4().hex[:8]}"
    asleep = f"{options.url}/v1/sessions/{quote(session, safe='')}/sleep"
    model = ChatOpenAI(
        model=options.model,
        base_url=f"{options.url}/v1",
        api_key=options.key,
        max_tokens=40,
        extra_body={"session_id": session},
    )
    messages: list[BaseMessage] = [SystemMessage("You know all about small animals, and answer in one sentence.")]
    for question in QUESTIONS:
        messages.append(HumanMessage(question))
        answer = model.invoke(messages)
        messages.append(answer)
        usage = answer.response_metadata["token_usage"]["prompt_tokens_details"]
        print(f"{question}\n  {answer.text}\n  {usage['cached_tokens']} tokens reused")
        # Nothing more to say for now: let it sleep. The next turn wakes it by itself.
        print(f"  {post(asleep, options.key)['status']}")


if __name__ == "__main__":
    main()
