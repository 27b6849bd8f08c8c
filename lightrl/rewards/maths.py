"""Checks mathematical equality with `math-verify` in child processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightrl.compat.arguments import require_packages
from lightrl.rewards.base import Reward
from lightrl.rewards.rules import column_of
from lightrl.rewards.workers import Workers


class MathVerify(Reward):
    """1 if the final answer is mathematically equal to the reference (`1/2` = `0.5`), 0 otherwise.

    math-verify finds the answer: the last box, LaTeX formula, or number. A completion is unscored if the reference is
    None or not a formula, or if the comparison times out. Logs the fractions of `unparsable` references and
    `timeouts`, which include comparisons that ran out of memory.

    Args:
        column: Dataset column with the reference: LaTeX with or without dollar signs, or a number.
        timeout: Time limit per comparison in seconds. Excludes the startup of a process.
        num_workers: Maximum number of processes. Each uses about 80 MB and starts on demand.

    Raises:
        ValueError: math-verify is not installed.

    Source: https://github.com/huggingface/Math-Verify with its default settings.
    """

    def __init__(self, column: str = "answer", timeout: float = 5.0, num_workers: int = 1) -> None:
        require_packages("MathVerify", "math", "math_verify")
        self.column = column
        self.needed_columns = (column,)
        self.timeout = timeout
        self.max_concurrency = num_workers
        self._workers = Workers("maths", num_workers)

    def __call__(
        self, completions: Sequence[str], log_metric: Callable[[str, float], None] | None = None, **columns: Any
    ) -> list[float | None]:
        verdicts = self._workers.ask(
            [
                None if gold is None else {"gold": str(gold), "text": text, "timeout": self.timeout}
                for gold, text in zip(column_of(columns, self.column), completions, strict=True)
            ]
        )
        if log_metric is not None:
            for name, verdict in (("unparsable", "unparsable"), ("timeouts", "timeout")):
                log_metric(name, verdicts.count(verdict) / max(1, len(verdicts)))
        return [{"equal": 1.0, "unequal": 0.0}.get(verdict) for verdict in verdicts]

    def extract_answer(self, completion: str) -> str | None:
        (answer,) = self._workers.ask([{"text": completion, "timeout": self.timeout}])
        return str(answer).removeprefix("=") if str(answer).startswith("=") else None

    def close(self) -> None:
        self._workers.close()
