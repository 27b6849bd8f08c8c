"""Programs as users write them: with official clients, knowing nothing of the run."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai


def add(a: int, b: int) -> int:
    return a + b


def multiply(a: int, b: int) -> int:
    return a * b


TOOL = {
    "name": "add",
    "description": "Adds.",
    "parameters": {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "one"},
            "b": {"type": "integer", "description": "two"},
        },
        "required": ["a", "b"],
    },
}
QUESTION = "Add 1 and 2."


def result(name: str, arguments: str) -> str:
    return str({"add": add, "multiply": multiply}[name](**json.loads(arguments)))


def chat(
    row: dict[str, Any], base_url: str, api_key: str, question: str = QUESTION, tools: Any = (TOOL,), answer: str = "3"
) -> float | None:
    """Chat completions, until there is no call."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = [{"role": "user", "content": question}]
    tools = [{"type": "function", "function": tool} for tool in tools]
    while True:
        if row.get("stream"):
            with client.chat.completions.stream(model="m", messages=messages, tools=tools) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(model="m", messages=messages, tools=tools).choices[0].message
        if not message.tool_calls:
            return float(message.content == answer)
        messages.append(message)
        for call in message.tool_calls:
            content = result(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


async def responses(
    row: dict[str, Any], base_url: str, api_key: str, question: str = QUESTION, tools: Any = (TOOL,), answer: str = "3"
) -> float | None:
    """Responses, each continuing the last by its id, or by all items where the row says so."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    tools = [{"type": "function", **tool} for tool in tools]
    items: list[Any] = [{"role": "user", "content": question}]
    earlier: Any = openai.omit
    while True:
        asked: dict[str, Any] = {"model": "m", "input": items, "tools": tools, "previous_response_id": earlier}
        if row.get("stream"):
            async with client.responses.stream(**asked) as stream:
                response = await stream.get_final_response()
        else:
            response = await client.responses.create(**asked)
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return float(response.output_text == answer)
        results = [
            {"type": "function_call_output", "call_id": c.call_id, "output": result(c.name, c.arguments)} for c in calls
        ]
        if row.get("items"):
            items += [item.model_dump(exclude={"parsed_arguments"}) for item in response.output] + results
        else:
            items, earlier = results, response.id


def messages(row: dict[str, Any], base_url: str, api_key: str) -> float | None:
    client = anthropic.Anthropic(base_url=base_url, api_key=api_key)
    tools: Any = [
        {"name": "add", "description": TOOL["description"], "input_schema": TOOL["parameters"]},
    ]
    said: list[Any] = [{"role": "user", "content": QUESTION}]
    while True:
        asked: dict[str, Any] = {"model": "m", "max_tokens": 1000, "messages": said, "tools": tools}
        if row.get("stream"):
            with client.messages.stream(**asked) as stream:
                message = stream.get_final_message()
        else:
            message = client.messages.create(**asked)
        calls = [block for block in message.content if block.type == "tool_use"]
        if not calls:
            return float(message.content[0].text == "3")
        said.append({"role": "assistant", "content": message.content})
        results = [{"type": "tool_result", "tool_use_id": c.id, "content": str(add(**c.input))} for c in calls]
        said.append({"role": "user", "content": results})
