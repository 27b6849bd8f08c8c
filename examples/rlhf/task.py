"""A synthetic preference task: four digits in, an answer out, and people who prefer the digits sorted.

Nobody but the people knows why they prefer what they prefer: `utility` labels the pairs and judges the result. SFT
sees answers of careless writers, who use the prompt's digits, mostly, in any order. The reward model sees pairs, PPO
the reward model.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import pairwise

from datasets import Dataset

DIGITS = 4
NUM_HELD_OUT = 500


def utility(prompt: str, answer: str) -> float:
    """How much people like an answer: digits of the prompt, each as often as there, ascending, and nothing else.

    u = (digits of the prompt that the answer uses) + (neighbours in ascending order) - 2 (surplus characters), so 7 is
    the best; an answer without its full stop loses 2. Without the prompt it cannot be known.
    """
    ended = answer.endswith(".")
    body = answer.removesuffix(".")
    used = sum((Counter(prompt[:DIGITS]) & Counter(body)).values())
    ascending = sum(a <= b for a, b in pairwise(body[:DIGITS]))
    return used + ascending - 2 * max(0, len(body) - DIGITS) - 2 * (not ended)


def prompts(split: str) -> list[str]:
    """ "7203=" and so on: the held-out ones (`split="eval"`), or all others."""
    deck = random.Random(0).sample(range(10**DIGITS), 10**DIGITS)
    picked = deck[:NUM_HELD_OUT] if split == "eval" else deck[NUM_HELD_OUT:]
    return [f"{number:0{DIGITS}d}=" for number in picked]


def careless_answer(prompt: str, rng: random.Random) -> str:
    """The prompt's digits in any order; now and then one is wrong, missing or one too many, or the end is missing."""
    digits = rng.sample(prompt[:DIGITS], DIGITS)
    for i in range(DIGITS):
        if rng.random() < 0.1:
            digits[i] = rng.choice("0123456789")
    slip = rng.random()
    if slip < 0.05:
        digits.pop()
    elif slip < 0.1:
        digits.append(rng.choice("0123456789"))
    return "".join(digits) + "." * (rng.random() < 0.95)


class Demonstrations:
    """Rows for supervised fine-tuning: prompts with careless answers."""

    def __init__(self, size: int = 9500, seed: int = 1) -> None:
        self.size, self.seed = size, seed

    def __call__(self) -> Dataset:
        rng, deck = random.Random(self.seed), prompts("train")
        picked = [rng.choice(deck) for _ in range(self.size)]
        return Dataset.from_list([{"prompt": p, "completion": careless_answer(p, rng)} for p in picked])


class Preferences:
    """Pairs of careless answers, labelled as people do: P(a preferred to b) = sigmoid((u(a) - u(b)) / noise).

    Args:
        split: prompts the pairs are of, "train" or "eval"; the two share none.
        size: number of pairs.
        noise: of the labels, above 0. At 0.5 one label in eight is wrong where answers differ by 1.
        seed: of the pairs.
    """

    def __init__(self, split: str = "train", size: int = 20000, noise: float = 0.5, seed: int = 2) -> None:
        self.split, self.size, self.noise, self.seed = split, size, noise, seed

    def __call__(self) -> Dataset:
        rng, deck = random.Random(f"{self.split}{self.seed}"), prompts(self.split)
        return Dataset.from_list([self._pair(rng.choice(deck), rng) for _ in range(self.size)])

    def _pair(self, prompt: str, rng: random.Random) -> dict[str, str]:
        a, b = careless_answer(prompt, rng), careless_answer(prompt, rng)
        while a == b:
            b = careless_answer(prompt, rng)
        gap = utility(prompt, a) - utility(prompt, b)
        a_wins = rng.random() < 1 / (1 + math.exp(-gap / self.noise))
        return {"prompt": prompt, "chosen": a if a_wins else b, "rejected": b if a_wins else a}


class PromptRows:
    """Rows for PPO: prompts and nothing else."""

    def __init__(self, split: str = "train") -> None:
        self.split = split

    def __call__(self) -> Dataset:
        return Dataset.from_list([{"prompt": prompt} for prompt in prompts(self.split)])
