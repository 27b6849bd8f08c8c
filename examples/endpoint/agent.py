"""Sums of three numbers with a calculator that adds two, by a program that knows only OpenAI's client.

With any model server:

    OPENAI_API_KEY=... python examples/endpoint/agent.py "Sum 12 34 56"
"""

import json
import os
import sys

import openai

MAX_CALLS = 3
ADD = {
    "name": "add",
    "description": "Adds two numbers.",
    "parameters": {
        "type": "object",
        "properties": {
            "a": {"type": "integer", "description": "one number"},
            "b": {"type": "integer", "description": "the other number"},
        },
        "required": ["a", "b"],
    },
}


def solve(question: str, base_url: str | None, api_key: str) -> str:
    """The model's last word, after at most `MAX_CALLS` rounds with the calculator."""
    messages = [{"role": "user", "content": question}]
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(MAX_CALLS + 1):
            answer = client.chat.completions.create(
                model="gpt-5-mini", messages=messages, tools=[{"type": "function", "function": ADD}]
            )
            message = answer.choices[0].message
            if not message.tool_calls:
                return message.content or ""
            messages.append(message)
            for call in message.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": calculate(call.function)})
    return ""


def calculate(function) -> str:
    """The result of a call, or what is wrong with it."""
    try:
        arguments = json.loads(function.arguments)
        return str(int(arguments["a"]) + int(arguments["b"]))
    except (KeyError, TypeError, ValueError) as error:
        return f"Error: {type(error).__name__}: {error}"


def main(row: dict, base_url: str, api_key: str) -> float:
    """One attempt, and its reward: whether the sum is right."""
    return float(solve(row["prompt"], base_url, api_key).strip() == str(row["answer"]))


if __name__ == "__main__":
    print(solve(sys.argv[1], os.environ.get("OPENAI_BASE_URL"), os.environ["OPENAI_API_KEY"]))
