"""Import paths, and reward functions in YAML as jsonargparse reads them."""

from __future__ import annotations

import json
import sys

import pytest
from jsonargparse import ArgumentParser

from lightrl.rewards import ExactAnswer, RewardSpec, load_reward, reward_name

SOURCE = """
from lightrl.rewards import Reward
NUMBER = 3
def good(completions):
    return [1.0] * len(completions)
class Ready(Reward):
    def __call__(self, completions):
        return [2.0] * len(completions)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(SOURCE)
    (tmp_path / "broken_rewards.py").write_text("import not_there_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("my_rewards", "broken_rewards"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("path", ["my_rewards:good", "my_rewards.good", "my_rewards.py:good", "./my_rewards.py:good"])
def test_three_ways_to_name_a_function(module, path):
    function = load_reward(path)
    assert function(["a", "b"]) == [1.0, 1.0]
    assert reward_name(function) == "good"


def test_a_class_without_arguments_is_instantiated(module):
    reward = load_reward("my_rewards:Ready")
    assert reward(["a"]) == [2.0] and reward_name(reward) == "Ready"


class Holder:
    def __init__(self, functions: list[RewardSpec]) -> None:
        self.functions = [load_reward(function) for function in functions]


def parse(config):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Holder, "holder")
    return parser.instantiate(parser.parse_string(json.dumps({"holder": {"functions": config}}))).holder.functions


def test_yaml_takes_import_paths_and_configured_classes(module):
    answer = {"class_path": "lightrl.rewards.ExactAnswer", "init_args": {"column": "solution", "ignore_case": True}}
    functions = parse([answer, "my_rewards.good", "my_rewards.py:good"])
    assert isinstance(functions[0], ExactAnswer) and functions[0].column == "solution" and functions[0].ignore_case
    assert [reward_name(function) for function in functions] == ["ExactAnswer", "good", "good"]


def test_yaml_takes_short_class_names_and_nested_rewards():
    cosine = {"class_path": "CosineLength", "init_args": {"correct": {"class_path": "ExactAnswer"}, "max_tokens": 8}}
    (function,) = parse([cosine])
    assert isinstance(function.parts[0].function, ExactAnswer)
