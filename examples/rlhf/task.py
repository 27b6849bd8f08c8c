"""A synthetic preference task: the prompt has four digits, and people prefer answers with the digits sorted.

Only `utility` implements the preference. It labels the pairs and evaluates the result. SFT sees answers by careless
writers, who mostly use the prompt's digits, in any order. The reward model sees pairs, and PPO sees the reward model.
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
    """Returns how much people like an answer. The best one has the prompt's digits in ascending order, and nothing
    else.

    u = (digits of the prompt that the answer uses) + (neighbors in ascending order) - 2 (surplus characters). The
    maximum is 7. An answer without its final period loses 2.
    """
    ended = answer.endswith(".")
    body = answer.removesuffix(".")
    used = sum((Counter(prompt[:DIGITS]) & Counter(body)).values())
    ascending = sum(a <= b for a, b in pairwise(body[:DIGITS]))
    return used + ascending - 2 * max(0, len(body) - DIGITS) - 2 * (not ended)


def prompts(split: str) -> list[str]:
    """Returns prompts such as "7203=": held-out ones (`split="eval"`), or all others."""
    deck = random.Random(0).sample(range(10**DIGITS), 10**DIGITS)
    picked = deck[:NUM_HELD_OUT] if split == "eval" else deck[NUM_HELD_OUT:]
    return [f"{number:0{DIGITS}d}=" for number in picked]


def careless_answer(prompt: str, rng: random.Random) -> str:
    """Returns the prompt's digits in any order. Sometimes one is wrong, missing, or extra, or the period is missing."""
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
    """Examples for SFT: prompts with careless answers."""

    def __init__(self, size: int = 9500, seed: int = 1) -> None:
        self.size, self.seed = size, seed

    def __call__(self) -> Dataset:
        rng, deck = random.Random(self.seed), prompts("train")
        picked = [rng.choice(deck) for _ in range(self.size)]
        return Dataset.from_list([{"prompt": p, "completion": careless_answer(p, rng)} for p in picked])


class Preferences:
    """Labeled pairs of careless answers: P(a preferred to b) = sigmoid((u(a) - u(b)) / noise).

    Args:
        split: Prompts of the pairs, "train" or "eval". The splits share no prompts.
        size: Number of pairs.
        noise: Label noise, above 0. At 0.5, one label in eight is wrong if the utilities differ by 1.
        seed: Random seed.
    """

    def __init__(self, split: str = "train", size: int = 120000, noise: float = 0.5, seed: int = 2) -> None:
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
    """Examples for PPO: prompts only."""

    def __init__(self, split: str = "train") -> None:
        self.split = split

    def __call__(self) -> Dataset:
        return Dataset.from_list([{"prompt": prompt} for prompt in prompts(self.split)])
