"""The Python in the pages on rewards is real."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from lightrl.objectives import GroupRelative
from lightrl.objectives.estimators import AdvantageInput
from tests.rewards.conftest import need_sandbox

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("rewards.md", "judges.md", "sandbox.md")
TEXT = "".join((DOCS / name).read_text() for name in PAGES)


def test_sandbox(capsys):
    need_sandbox()
    code = re.search(r"```python\n(from lightrl.rewards import Sandbox\n.*?)```", TEXT, re.S)[1]
    exec(code, {})
    assert capsys.readouterr().out == "cba 0 exit\n['ZeroDivisionError: division by zero', '[exit code 1]']\n"


def test_python(capsys):
    code = re.findall(r"```python\n(.*?)```", (DOCS / "rewards.md").read_text(), re.S)
    assert len(code) == 5
    scope: dict = {}
    for block in code[:-1]:
        exec(block, scope)
    handle = scope["rewards"].submit(
        prompts=["p"] * 2,
        completions=["#### 4", "#### 5"],
        completion_ids=[[0] * 896, [0] * 10],  # half of the buffer: a penalty of 0.5, and weight 0.5
        columns={"answer": ["#### 4"] * 2},
        group_ids=[0, 0],
    )
    assert handle.result().total == [0.75, 0.0]
    scope["rewards"].close()
    assert scope["correct"](["4 ", "5", "14"], answer=[4, "4", 4], prompts=["p"] * 3) == [1.0, 0.0, 0.0]
    assert scope["same_text"](["Paris.", " -5", "New  York!"], answer=["paris", 5, "new york"]) == [1.0, 0.0, 1.0]
    lengths = [[0] * n for n in (40, 96, 200, 40)]
    assert scope["correct_and_short"](["4", "4", "4", "5"], lengths, answer=[4] * 4) == [1.0, 0.95, 0.9, 0.0]
    page = (DOCS / "rewards.md").read_text()
    rows = re.findall(r"^\| (?:all|two) [^|]+\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", page, re.M)
    assert len(rows) == 4
    for cells in rows:
        rewards, *shown = ([float(x) for x in cell.split(", ")] for cell in cells)
        same = {"mask": torch.ones(4, 1, dtype=torch.bool), "groups": torch.zeros(4, dtype=torch.long)}
        given = AdvantageInput(rewards=torch.tensor(rewards)[:, None], **same)
        for scale, advantages in zip(("group", "none"), shown, strict=True):
            assert GroupRelative(scale)(given)[0][:, 0].tolist() == pytest.approx(advantages, abs=0.0051)
    exec(code[-1], {})
    assert capsys.readouterr().out == "[1.0, 0.0]\n"
