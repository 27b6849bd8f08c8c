"""The code example: its references pass their own tests, and its configuration trains a tiny model."""

from __future__ import annotations

import asyncio

from examples.code.tasks import HELD_OUT, TASKS, Tasks
from lightrl.rewards import CodeTests
from tests.rewards.conftest import need_sandbox


def test_every_task_can_be_solved_and_none_by_another_answer() -> None:
    need_sandbox()
    rows = list(Tasks("train")()) + list(Tasks("eval")())
    assert len({row["prompt"] for row in rows}) == len(TASKS) + len(HELD_OUT)
    sums = [row for row in rows if " plus " in row["prompt"] or "the sum of a and b" in row["prompt"]]
    reward = CodeTests(test_timeout=1.0)
    code = "def add(a, b=1): return a + b\nplus = add_one = add"
    assert asyncio.run(reward([code] * len(sums), tests=[row["tests"] for row in sums])) == [1.0] * len(sums)
    assert all(len(row["tests"]) == 4 for row in rows)
