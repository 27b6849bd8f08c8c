"""The configurations and the Python in the pages on rewards are real."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentParser

import lightrl.rewards
from lightrl.rewards import RewardScorer
from tests.rewards.conftest import need_sandbox

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("rewards.md", "judges.md", "sandbox.md")
TEXT = "".join((DOCS / name).read_text() for name in PAGES)
for name in lightrl.rewards.__all__:  # as the command does, so that YAML may name any class without its module
    getattr(lightrl.rewards, name)
BLOCKS = re.findall(r"```yaml\n(.*?)```", TEXT, re.S)


@pytest.mark.parametrize("block", [block for block in BLOCKS if "rewards:" in block])
def test_yaml(block, tmp_path, monkeypatch):
    (tmp_path / "rewards.py").write_text(re.search(r"```python\n(.*?)```", TEXT, re.S)[1])
    monkeypatch.chdir(tmp_path)
    if "MathVerify" in block:
        pytest.importorskip("math_verify")
    if "CodeTests" in block:
        need_sandbox()
    rewards = yaml.safe_load(block)["data"]["init_args"]["rewards"]
    rewards = {"functions": rewards} if isinstance(rewards, list) else rewards
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(RewardScorer, "scorer")
    config = parser.parse_object({"scorer": rewards})
    scorer = parser.instantiate(config).scorer
    assert len(scorer.names) == len(rewards["functions"])


def test_sandbox(capsys):
    need_sandbox()
    code = re.search(r"```python\n(from lightrl.rewards import Sandbox\n.*?)```", TEXT, re.S)[1]
    exec(code, {})
    assert capsys.readouterr().out == "cba 0 exit\n['ZeroDivisionError: division by zero', '[exit code 1]']\n"


def test_python(capsys):
    code = re.findall(r"```python\n(.*?)```", (DOCS / "rewards.md").read_text(), re.S)
    assert len(BLOCKS) == 8 and len(code) == 2
    scope: dict = {}
    exec(code[0], scope)
    assert scope["short_and_correct"](["4 ", "5"], [[1, 2], [3]], answer=[4, 4], prompts=["p"] * 2) == [0.998, 0.0]
    exec(code[-1], {})
    assert capsys.readouterr().out == "[1.0, 0.0]\n"
