"""The configurations and the Python in docs/rewards.md are real."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentParser

from lightrl.rewards import RewardScorer

TEXT = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
BLOCKS = re.findall(r"```yaml\n(.*?)```", TEXT, re.S)


@pytest.mark.parametrize("block", BLOCKS)
def test_yaml(block):
    if "MathVerify" in block:
        pytest.importorskip("math_verify")
    rewards = yaml.safe_load(block)["data"]["init_args"]["rewards"]
    rewards = {"functions": rewards} if isinstance(rewards, list) else rewards
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(RewardScorer, "scorer")
    config = parser.parse_object({"scorer": rewards})
    scorer = parser.instantiate(config).scorer
    assert len(scorer.names) == len(rewards["functions"])


def test_python(capsys):
    code = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    assert len(BLOCKS) == 7 and len(code) == 2
    scope: dict = {}
    exec(code[0], scope)
    assert scope["short_and_right"](["p"] * 2, ["4 ", "5"], answer=[4, 4]) == [1.0, 0.0]
    exec(code[1], {})
    assert capsys.readouterr().out == "[1.0, 0.0]\n"
