"""Sums and differences of three numbers with a calculator for two, by a program that knows only OpenAI's client.

With any model server:

    OPENAI_API_KEY=... python examples/endpoint/agent.py "412 + 305 - 118"
"""

import json
import os
import sys

import openai

MAX_CALLS = 3
CLIENT = openai.OpenAI(api_key="of each attempt")  # one for all: each new client reads its certificates anew


def schema(name: str, does: str, a: str, b: str) -> dict:
    """A tool of two numbers."""
    numbers = {"a": {"type": "integer", "description": a}, "b": {"type": "integer", "description": b}}
    parameters = {"type": "object", "properties": numbers, "required": ["a", "b"]}
    return {"type": "function", "function": {"name": name, "description": does, "parameters": parameters}}


TOOLS = [
    schema("add", "Adds two numbers.", "one number", "the other number"),
    schema("subtract", "Subtracts a number from another.", "from this", "this"),
]


def solve(messages: list, base_url: str | None, api_key: str) -> str:
    """The model's last word, after at most `MAX_CALLS` rounds with the calculator; all is added to the messages."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)  # on the same connections
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
    """The result of a call, or what is wrong with it."""
    try:
        arguments = json.loads(function.arguments)
        a, b = int(arguments["a"]), int(arguments["b"])
        return str({"add": a + b, "subtract": a - b}[function.name])
    except (KeyError, TypeError, ValueError) as error:
        return f"Error: {type(error).__name__}: {error}"


def main(row: dict, base_url: str, api_key: str) -> float:
    """One attempt, and its reward: whether the answer is right."""
    return float(solve(asked(row["prompt"]), base_url, api_key).strip() == str(row["answer"]))


def revise(row: dict, base_url: str, api_key: str) -> float:
    """One attempt that forks: two revisions of one answer, which know nothing of each other; how many are right."""
    messages = asked(row["prompt"])
    solve(messages, base_url, api_key)
    branches = [[*messages, {"role": "user", "content": "Again."}] for _ in range(2)]
    return sum(solve(branch, base_url, api_key).strip() == str(row["answer"]) for branch in branches) / 2


def asked(question: str) -> list:
    """A conversation that begins with a question."""
    return [{"role": "user", "content": question}]


if __name__ == "__main__":
    print(solve(asked(sys.argv[1]), os.environ.get("OPENAI_BASE_URL"), os.environ["OPENAI_API_KEY"]))
