"""An agent of openai-agents with two tools, over chat completions with a custom base URL, and nothing else changed.

Prints what it finally says of each of two user turns, the tools it ran, and the usage of every request it made.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool
from openai import AsyncOpenAI

RAN: list[str] = []


def get_weather(city: str, days: int) -> str:
    """Tell the weather of a city for some days."""
    RAN.append(f"get_weather {city} {days}")
    return f"In {city}: rain for {days} days, then sun."


def get_time(zone: str) -> str:
    """Tell the time in a zone."""
    RAN.append(f"get_time {zone}")
    return f"It is noon in {zone}."


async def main(base_url: str, model: str, stream: str) -> None:
    client = AsyncOpenAI(base_url=base_url, api_key="unused")
    agent = Agent(
        name="Guide",
        instructions="You are a guide who looks things up with tools before answering, and answers briefly.",
        model=OpenAIChatCompletionsModel(model=model, openai_client=client),
        model_settings=ModelSettings(include_usage=True, max_tokens=200),
        tools=[function_tool(get_weather), function_tool(get_time)],
    )
    said: list[Any] = []
    usages: list[dict[str, Any]] = []
    history: list[Any] = []
    for question in ("Will I need an umbrella in Paris this week?", "Thank you. And what time is it there?"):
        asked = [*history, {"role": "user", "content": question}]
        if stream == "stream":
            result: Any = Runner.run_streamed(agent, asked)
            async for _event in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, asked)
        said.append(result.final_output)
        usages += [
            {
                "input": response.usage.input_tokens,
                "output": response.usage.output_tokens,
                "cached": response.usage.input_tokens_details.cached_tokens,
            }
            for response in result.raw_responses
        ]
        history = result.to_input_list()
    print(json.dumps({"said": said, "ran": RAN, "usages": usages}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
