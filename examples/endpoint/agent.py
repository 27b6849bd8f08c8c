"""Solves sums and differences of three numbers with a calculator, using only OpenAI's client.

Run it against any model server:

    OPENAI_API_KEY=... python examples/endpoint/agent.py "412 + 305 - 118"
"""

import json
import os
import sys

import openai

MAX_CALLS = 3
CLIENT = openai.OpenAI(api_key="set per trajectory")  # shared, because each new client loads its certificates


def schema(name: str, does: str, a: str, b: str) -> dict:
    """The schema of a tool with two numbers."""
    numbers = {"a": {"type": "integer", "description": a}, "b": {"type": "integer", "description": b}}
    parameters = {"type": "object", "properties": numbers, "required": ["a", "b"]}
    return {"type": "function", "function": {"name": name, "description": does, "parameters": parameters}}


TOOLS = [
    schema("add", "Adds two numbers.", "First number.", "Second number."),
    schema("subtract", "Subtracts a number from another.", "Number to subtract from.", "Number to subtract."),
]


def solve(messages: list, base_url: str | None, api_key: str) -> str:
    """Returns the model's final answer after at most `MAX_CALLS` rounds of tool calls, and appends all messages."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)  # shares the connections
    for _ in range(MAX_CALLS + 1):
        answer = client.chat.completions.create(model="gpt-5-mini", messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": calculate(call.function)})
    return ""


def calculate(function) -> str:
    """Returns the result of a call, or its error."""
    try:
        arguments = json.loads(function.arguments)
        a, b = int(arguments["a"]), int(arguments["b"])
        return str({"add": a + b, "subtract": a - b}[function.name])
    except (KeyError, TypeError, ValueError) as error:
        return f"Error: {type(error).__name__}: {error}"


def main(row: dict, base_url: str, api_key: str) -> float:
    """Plays one trajectory and returns its reward: 1 if the answer is correct, else 0."""
    return float(solve(asked(row["prompt"]), base_url, api_key).strip() == str(row["answer"]))


def revise(row: dict, base_url: str, api_key: str) -> float:
    """Answers, then revises the answer in two independent branches. Returns the fraction of correct branches."""
    messages = asked(row["prompt"])
    solve(messages, base_url, api_key)
    branches = [[*messages, {"role": "user", "content": "Again."}] for _ in range(2)]
    return sum(solve(branch, base_url, api_key).strip() == str(row["answer"]) for branch in branches) / 2


def asked(question: str) -> list:
    """Starts a conversation with a question."""
    return [{"role": "user", "content": question}]


if __name__ == "__main__":
    print(solve(asked(sys.argv[1]), os.environ.get("OPENAI_BASE_URL"), os.environ["OPENAI_API_KEY"]))
