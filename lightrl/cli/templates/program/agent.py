"""The agent, written with the OpenAI client. `main` runs one trajectory.

To run it against any model server: OPENAI_API_KEY=... python agent.py "What is 61 * 65 + 141?"
"""

import asyncio
import json
import os
import re
import sys

import openai

MODEL = os.environ.get("MODEL", "policy")  # ignored in training
CLIENT = openai.AsyncOpenAI(api_key="set for each trajectory")  # shared by all trajectories
NUMBERS = {name: {"type": "integer", "description": f"the {name} number"} for name in ("first", "second")}
CALCULATOR = {
    "name": "calculate",
    "description": "Adds or multiplies two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"operation": {"type": "string", "enum": ["add", "multiply"]}, **NUMBERS},
        "required": ["operation", "first", "second"],
    },
}


def calculate(arguments: str) -> str:
    """The result of a tool call, or an error message for the model."""
    try:
        given = json.loads(arguments)
        first, second = int(given["first"]), int(given["second"])
        return str({"add": first + second, "multiply": first * second}[given["operation"]])
    except (KeyError, TypeError, ValueError) as error:
        return f"Error: {type(error).__name__}: {error}"


async def solve(client: openai.AsyncOpenAI, question: str) -> str:
    """The model's answer after at most three rounds of tool calls."""
    messages = [{"role": "user", "content": question}]
    for _ in range(4):
        tools = [{"type": "function", "function": CALCULATOR}]
        reply = await client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            result = calculate(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return ""


async def main(row: dict, base_url: str, api_key: str) -> float:
    """Runs one trajectory and returns its reward: 1 if the last number of the answer is correct, and 0 otherwise.

    Args:
        row: Columns of an example in `rows.jsonl`.
        base_url: URL of the policy's endpoint.
        api_key: Key of this trajectory.
    """
    answer = await solve(CLIENT.with_options(base_url=base_url, api_key=api_key), row["prompt"])
    numbers = re.findall(r"-?\d+", answer.replace(",", ""))
    return float(numbers[-1:] == [str(row["answer"])])


if __name__ == "__main__":
    print(asyncio.run(solve(openai.AsyncOpenAI(), sys.argv[1])))
