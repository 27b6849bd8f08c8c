"""Import paths, and reward functions in YAML as jsonargparse reads them."""

from __future__ import annotations

import functools
import json
import math
import subprocess
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
class Needs(Reward):
    def __init__(self, target):
        self.target = target
    def __call__(self, completions):
        return [self.target]
class Plain:
    pass
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


def test_absolute_file_is_loaded_once(module):
    path = f"{module / 'my_rewards.py'}:good"
    assert load_reward(path) is load_reward(path)


def test_a_class_without_arguments_is_instantiated(module):
    reward = load_reward("my_rewards:Ready")
    assert reward(["a"]) == [2.0] and reward_name(reward) == "Ready"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("good", "package.module:name"),
        ("my_rewards.py", "package.module:name"),
        ("my_rewards:absent", "no 'absent'.*good"),
        ("no_such_module:good", "ModuleNotFoundError"),
        ("lightrl.no_such:good", "ModuleNotFoundError"),
        ("nowhere/x.py:good", "FileNotFoundError"),
        ("broken_rewards:good", "not_there_at_all"),
        ("broken_rewards.py:good", "not_there_at_all"),
        ("my_rewards:NUMBER", "type int"),
        ("my_rewards:Plain", "a function or a subclass of Reward"),
        ("my_rewards:Needs", "class_path: my_rewards.Needs"),
    ],
)
def test_errors_say_what_is_wrong(module, path, words):
    with pytest.raises(ValueError, match=words) as info:
        load_reward(path)
    assert repr(path) in str(info.value)


def test_partial_has_the_name_of_its_function():
    assert reward_name(functools.partial(math.sqrt, 4)) == "sqrt"


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
    assert isinstance(function.correct.function, ExactAnswer)


def test_yaml_refuses_a_wrong_argument():
    with pytest.raises(Exception, match="no_such_argument"):
        parse([{"class_path": "lightrl.rewards.ExactAnswer", "init_args": {"no_such_argument": 1}}])


def test_a_text_run_with_a_python_reward_loads_no_rules_judges_servers_or_media():
    code = """
import subprocess
import sys
import lightrl.algorithms, lightrl.rollout
from lightrl.rewards import RewardScorer
def fn(completions):
    return [1.0] * len(completions)
rows = {"prompts": ["p"], "completions": ["c"], "completion_ids": [[1]], "columns": {}, "group_ids": [0]}
scorer = RewardScorer([fn])
assert scorer.submit(**rows).result(60).total == [1.0]
scorer.close()
print(sorted(name for name in sys.modules if name.startswith("lightrl.rewards.")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout == "['lightrl.rewards.base', 'lightrl.rewards.scorer']\n", done.stderr
