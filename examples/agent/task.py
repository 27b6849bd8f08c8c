"""Sums and differences of three numbers, and careless demonstrations that use a calculator."""

from __future__ import annotations

import random
from typing import Any

from datasets import Dataset

from examples.agent.make_model import make_tokenizer
from examples.agent.tools import Calculator
from lightrl.environments import ToolEnvironment

NUM_HELD_OUT = 256
TOOLS = {"+": "add", "-": "subtract"}
ASSISTANT = "<|im_start|>assistant\n"


def questions(split: str) -> list[tuple[int, str, int, str, int]]:
    """Questions such as "412 + 305 - 118": held-out ones (`split="eval"`), or 8,000 others. No step is negative."""
    rng = random.Random(0)
    drawn: dict[tuple[int, str, int, str, int], None] = {}
    while len(drawn) < NUM_HELD_OUT + 8000:
        a, b, c = (rng.randint(100, 999) for _ in range(3))
        first, second = rng.choice("+-"), rng.choice("+-")
        if min(calculate(a, first, b), calculate(calculate(a, first, b), second, c)) >= 0:
            drawn[a, first, b, second, c] = None
    return list(drawn)[:NUM_HELD_OUT] if split == "eval" else list(drawn)[NUM_HELD_OUT:]


def calculate(a: int, sign: str, b: int) -> int:
    """Returns the result of the correct tool."""
    return a + b if sign == "+" else a - b


class Questions:
    """Examples for reinforcement learning: the prompt, and the answer for the reward.

    Args:
        split: "eval" for held-out questions, otherwise the others.
    """

    def __init__(self, split: str = "train") -> None:
        self.split = split

    def __call__(self) -> Dataset:
        rows = []
        for a, first, b, second, c in questions(self.split):
            answer = calculate(calculate(a, first, b), second, c)
            rows.append({"prompt": f"{a} {first} {b} {second} {c}", "answer": str(answer)})
        return Dataset.from_list(rows)


class Demonstrations:
    """Examples for SFT: each turn of a careless writer, with the conversation before it as the prompt.

    Args:
        size: Number of conversations, each with up to three turns.
        careful: Fraction of correct conversations, in [0, 1]. In the others, the writer guesses an answer, stops after
            the first step, uses the wrong tool for the second, or forgets the first result, with equal frequency.
        seed: Random seed.
    """

    def __init__(self, size: int = 12000, careful: float = 0.4, seed: int = 1) -> None:
        self.size = size
        self.careful = careful
        self.seed = seed

    def __call__(self) -> Dataset:
        rng, deck = random.Random(self.seed), questions("train")
        tokenizer, tools = make_tokenizer(), ToolEnvironment(Calculator).tools
        rows = []
        for _ in range(self.size):
            said = self._conversation(rng.choice(deck), rng)
            turns = str(tokenizer.apply_chat_template(said, tools=tools, tokenize=False)).split(ASSISTANT)
            for i in range(1, len(turns)):
                prompt = ASSISTANT.join(turns[:i]) + ASSISTANT
                rows.append({"prompt": prompt, "completion": turns[i].split("<|im_end|>")[0]})
        return Dataset.from_list(rows)

    def _conversation(self, question: tuple[int, str, int, str, int], rng: random.Random) -> list[dict[str, Any]]:
        a, first, b, second, c = question
        slips = ["guess", "stop", "tool", "forget"]
        slip = None if rng.random() < self.careful else rng.choice(slips)
        said: list[dict[str, Any]] = [{"role": "user", "content": f"{a} {first} {b} {second} {c}"}]

        def call(x: int, sign: str, y: int) -> int:
            function = {"name": TOOLS[sign], "arguments": {"a": x, "b": y}}
            said.append(
                {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
            )
            said.append({"role": "tool", "content": str(calculate(x, sign, y))})
            return calculate(x, sign, y)

        if slip == "guess":
            answer = rng.randint(100, 999)
        else:
            answer = call(a, first, b)
            if slip != "stop":
                sign = "-+"[second == "-"] if slip == "tool" else second
                answer = call(b if slip == "forget" else answer, sign, c)
        return [*said, {"role": "assistant", "content": str(answer)}]
