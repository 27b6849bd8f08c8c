"""MathVerify: equality, and comparisons that would never end."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("math_verify")

from lightrl.rewards import MathVerify, RewardScorer
from tests.waiting import gone


@pytest.fixture(scope="module")
def reward():
    made = MathVerify(timeout=3.0)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("reference", "completion", "value"),
    [
        ("1/2", r"so it is \boxed{0.5}", 1.0),
        (r"\frac{1}{2}", r"$\frac{2}{4}$", 1.0),
        (r"$\frac{1}{2}$", r"\boxed{\frac{1}{3}}", 0.0),
        (r"3\sqrt{2}", r"\boxed{\sqrt{18}}", 1.0),
        (r"3\sqrt{2}", "I get 3", 0.0),  # the bare reference is not read as its first number
        ("x+1", r"\boxed{1 + x}", 1.0),
        (42, "the answer is 42", 1.0),
        (r"\boxed{7}", "7", 1.0),
        (r"\$5", r"\boxed{5}", 1.0),
        (r"\$18.90", r"so it is $\$18.90$", 1.0),
        (r"\$5", r"\boxed{\$6}", 0.0),
        ("$5", "$5", 1.0),
        ("42", "no idea", 0.0),
        (None, "42", None),
    ],
)
def test_equality(reward, reference, completion, value):
    assert reward([completion], answer=[reference]) == [value]


TOWER = "$9^{9^{9^{9}}}$"


def test_endless_comparisons_are_unscored_and_the_rest_goes_on(reward):
    logged = {}
    values = reward(["1", "1", "1", "x"], logged.__setitem__, answer=["1", TOWER, "1", None])
    assert values == [1.0, None, 1.0, None]
    assert logged == {"unparsable": 0.0, "timeouts": 0.25}


def test_an_unreadable_reference_is_not_applicable(reward):
    logged = {}
    assert reward(["1", "1"], logged.__setitem__, answer=["", "1"]) == [None, 1.0]
    assert logged["unparsable"] == 0.5


def test_a_killed_worker_is_replaced(reward):
    reward(["1"], answer=["1"])
    reward._workers.all[0]._process.kill()
    reward._workers.all[0]._process.wait()
    assert reward(["1"], answer=["1"]) == [1.0]


def test_in_a_scorer_several_workers_and_no_process_after_close():
    reward = MathVerify(num_workers=2)
    scorer = RewardScorer([reward])
    rows = {"prompts": ["p"], "completions": ["2"], "completion_ids": [[1]], "group_ids": [0]}
    handles = [scorer.submit(columns={"answer": ["2"]}, **rows) for _ in range(6)]
    assert [handle.result(240).total for handle in handles] == [[1.0]] * 6
    processes = [worker._process for worker in reward._workers.all if worker._process is not None]
    assert processes and all(process.poll() is None for process in processes)
    scorer.close()
    assert all(process.poll() is not None for process in processes)


def test_the_worker_ends_with_its_parent():
    code = """
import os, signal
from lightrl.rewards import MathVerify
reward = MathVerify()
reward(["1"], answer=["1"])
pid = reward._workers.all[0]._process.pid
print(pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=550).stdout)
    assert gone(pid), "the worker outlived its parent"
