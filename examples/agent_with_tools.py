"""An agent that calls tools. Its session sleeps while a tool runs, and is awake when the result is there.

    python examples/agent_with_tools.py --url http://127.0.0.1:8000

An agent knows what a server cannot: that it will be away for a while, and when it is about to return. It says the one
with `expected_idle_seconds`, the other with `/wake`; both are hints, and neither is ever an error.
"""

from __future__ import annotations

import argparse
import json
import time
import uuid
from typing import Any
from urllib.parse import quote

import httpx
import openai

TOOL_SECONDS = 0.2
"""How long a tool takes."""

WEATHER = {"Paris": "12 degrees, rain", "Oslo": "-3 degrees, snow", "Lima": "24 degrees, sun"}
SLEEP = {"dormouse": "seven months", "hedgehog": "five months", "bat": "six months"}

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": list(WEATHER)}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "winter_sleep",
            "description": "How long an animal sleeps in winter.",
            "parameters": {
                "type": "object",
                "properties": {"animal": {"type": "string", "enum": list(SLEEP)}},
                "required": ["animal"],
                "additionalProperties": False,
            },
        },
    },
]


def call(name: str, arguments: dict[str, str]) -> str:
    """Run one tool; it takes its time, as tools do."""
    time.sleep(TOOL_SECONDS)
    return WEATHER[arguments["city"]] if name == "weather" else SLEEP[arguments["animal"]]


class Agent:
    """One conversation with tools in it, under one session id."""

    def __init__(self, client: openai.OpenAI, http: httpx.Client, model: str) -> None:
        self.client = client
        self.http = http
        self.model = model
        self.session = f"agent-{uuid.uuid4().hex[:8]}"
        self.messages: list[Any] = []
        self.sessions: list[dict[str, Any]] = []

    def ask(self, question: str, most_steps: int = 4) -> str:
        """Put a question; call tools until there is an answer in words, or the steps are used up."""
        self.messages.append({"role": "user", "content": question})
        for step in range(most_steps):
            # A small model would rather talk: the first step must be a call, the last one must not.
            choice = "required" if step == 0 else "none" if step == most_steps - 1 else "auto"
            message = self._step(choice)
            if not message.tool_calls:
                return message.content or ""
            for each in message.tool_calls:
                arguments = json.loads(each.function.arguments)
                result = call(each.function.name, arguments)
                print(f"    {each.function.name}({each.function.arguments}) -> {result}")
                self.messages.append({"role": "tool", "tool_call_id": each.id, "content": result})
            self._wake()
        raise AssertionError("the last step may not call tools")

    def _step(self, choice: Any) -> Any:
        tools: Any = TOOLS
        reply = self.client.chat.completions.create(
            model=self.model,
            messages=self.messages,
            tools=tools,
            tool_choice=choice,
            max_tokens=60,
            temperature=0,
            extra_body={"session_id": self.session, "session": {"expected_idle_seconds": TOOL_SECONDS}},
        )
        assert reply.model_extra is not None
        session = reply.model_extra["session"]
        self.sessions.append(session)
        reused = sum(session["reused_tokens"].values())
        print(f"  turn {session['turn']}: {reused} tokens reused, {session['computed_tokens']} computed")
        message = reply.choices[0].message
        self.messages.append(message.model_dump(exclude_none=True))
        return message

    def _wake(self) -> None:
        """A result is here, the next turn follows at once: whatever of the session sleeps may come up."""
        self.http.post(f"/v1/sessions/{quote(self.session, safe='')}/wake", json={})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default=None, help="by default the first one served")
    parser.add_argument("--key", default="unused", help="API key, where the server asks for one")
    options = parser.parse_args()
    headers = {"authorization": f"Bearer {options.key}"}
    with (
        openai.OpenAI(base_url=f"{options.url}/v1", api_key=options.key) as client,
        httpx.Client(base_url=options.url, headers=headers) as http,
    ):
        agent = Agent(client, http, options.model or client.models.list().data[0].id)
        for question in ("What is the weather in Oslo?", "How long does the dormouse sleep?"):
            print(question)
            print(f"  {agent.ask(question)}")


if __name__ == "__main__":
    main()
