"""The scorers of `reasoning-gym` as a reward function."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal

from lightrl.rewards.base import Reward
from lightrl.rewards.extract import extract_boxed, extract_number


def extract_tags(text: str) -> str | None:
    """The text in the last `<answer>...</answer>`."""
    _, found, rest = text.rpartition("<answer>")
    answer, closed, _ = rest.partition("</answer>")
    return answer.strip() if found and closed else None


def extract_last_line(text: str) -> str | None:
    """The last line that is not blank."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "tags": extract_tags,
    "boxed": extract_boxed,
    "number": extract_number,
    "last_line": extract_last_line,
    "text": str.strip,
}


class ReasoningGymReward(Reward):
    """The score that the row's own generator gives the answer, in [0, 1]; 0 if the completion has no answer.

    Use it with rows of `ReasoningGymRows`. Some generators give partial credit: read the score as a reward, not as
    accuracy, unless their scores are 0 and 1.

    Args:
        extract: Where the answer is: "tags" (inside the last `<answer>` tags, what reasoning-gym's own system prompts
            ask for), "boxed" (the last `\\boxed{}`), "number" (the last number), "last_line", or "text" (everything).

    Raises:
        ValueError: Unknown `extract`.
        RewardError: when called: the rows are not from `ReasoningGymRows`.

    Source: https://github.com/open-thought/reasoning-gym (`score_answer`). Unlike its own training scripts, there is no
        bonus for the format; add `RegexFormat` for one.
    """

    needed_columns = ("gym",)

    def __init__(self, extract: Literal["tags", "boxed", "number", "last_line", "text"] = "tags") -> None:
        if extract not in EXTRACTORS:
            raise ValueError(f"ReasoningGymReward.extract={extract!r}: must be one of {', '.join(EXTRACTORS)}.")
        self.extract = extract

    def __call__(self, completions: Sequence[str], gym: Sequence[str], **columns: Any) -> list[float]:
        return [self._score(text, made) for text, made in zip(completions, gym, strict=True)]

    def extract_answer(self, completion: str) -> str | None:
        return EXTRACTORS[self.extract](completion)

    def _score(self, completion: str, made: str) -> float:
        answer = self.extract_answer(completion)
        if answer is None:
            return 0.0
        score, item = _scorer(made)
        return float(score(answer, item))


@lru_cache(maxsize=4096)
def _scorer(made: str) -> tuple[Callable[[str, Any], float], Any]:
    """The generator's scorer and the item, made again from a row's column."""
    row = json.loads(made)
    items = _items(row["name"], json.dumps(row["settings"]), row["seed"], row["size"])
    return items.score_answer, items[row["index"]]


@lru_cache(maxsize=64)
def _items(name: str, settings: str, seed: int, size: int) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, seed=seed, size=size, **json.loads(settings))
