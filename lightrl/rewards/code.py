"""Rewards generated code with hidden tests."""

from __future__ import annotations

import ast
import asyncio
import functools
import json
import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from lightrl.engines.background import in_thread
from lightrl.rewards.base import Reward, RewardError
from lightrl.rewards.rules import column_of
from lightrl.rewards.sandbox import Sandbox

_FENCES = ("```", "```python", "```python3", "```py")


def extract_code(completion: str) -> str:
    """The last block tagged as Python, otherwise the last block without a tag, otherwise the whole completion."""
    blocks: dict[bool, list[str]] = {}  # the last block, by whether it is tagged as Python
    block: list[str] | None = None
    for line in completion.split("\n"):
        fence = line.strip().lower()
        if not fence.startswith("```"):
            if block is not None:
                block.append(line)
        elif block is not None:  # the end
            block = None
        else:
            block = []
            if fence in _FENCES:
                blocks[fence != "```"] = block
    found = blocks.get(True, blocks.get(False))  # a block without a tag may be the output
    return completion if found is None else "\n".join(found)


class CodeTests(Reward):
    """Fraction of hidden tests that a completion's code passes, run in a `Sandbox`.

    The tests of an example have one of these forms, or are JSON of it:

    - A list of Python snippets, such as `assert add(1, 2) == 3`. Each is a test that passes if it raises nothing.
    - Python code. It is split into tests after each top-level statement with an `assert`.
    - A list of `{"input": ..., "output": ...}`, or `{"inputs": [...], "outputs": [...]}`: the program's stdin and
      expected stdout. Trailing whitespace of lines and of the output is ignored.

    Code and tests run in separate sandboxes that exchange only built-in values, so the code can't read the tests or
    fake a result. Tests must import the modules they use. They can access attributes, methods, items, and the length of
    other objects, but must compare built-in values, since other objects equal only themselves.

    A completion is unscored if its tests are None or have a syntax error. Logs the fractions `all_passed` and
    `unusable`.

    Args:
        column: Dataset column with the tests.
        all_or_nothing: Whether to return 1 if all tests pass and 0 otherwise, instead of the fraction.
        test_timeout: Time limit per test in seconds.
        sandbox: Sandbox for the code. Its `timeout` applies to all tests of a completion together. Defaults to a
            `Sandbox` with a timeout of 30 seconds.
        concurrency: Maximum number of completions tested concurrently. Defaults to the number of CPUs.

    Raises:
        ValueError: No sandbox works on this system, or it runs no test.
    """

    def __init__(
        self,
        column: str = "tests",
        all_or_nothing: bool = False,
        test_timeout: float = 3.0,
        sandbox: Sandbox | None = None,
        concurrency: int | None = None,
    ) -> None:
        self.column = column
        self.needed_columns = (column,)
        self.all_or_nothing = all_or_nothing
        self.test_timeout = test_timeout
        self.sandbox = sandbox or Sandbox(timeout=30.0)
        self._slots = threading.Semaphore(concurrency or os.cpu_count() or 1)
        if self._verdicts("one = 1", ["assert one == 1"]) != [True]:  # every reward would be 0
            raise ValueError(f"CodeTests.sandbox: {self.sandbox.python} runs no test. Fix `python`, or raise limits.")

    async def __call__(
        self, completions: Sequence[str], log_metric: Callable[[str, float], None] | None = None, **columns: Any
    ) -> list[float | None]:
        tests = [parse_tests(cell) for cell in column_of(columns, self.column)]
        shares = await asyncio.gather(*map(self._share, completions, tests))
        if log_metric is not None and shares:
            log_metric("all_passed", shares.count(1.0) / len(shares))
            log_metric("unusable", shares.count(None) / len(shares))
        return [float(share == 1.0) if self.all_or_nothing and share is not None else share for share in shares]

    async def _share(self, completion: str, tests: list[Any] | None) -> float | None:
        if tests is None:
            return None
        share, error = await in_thread(functools.partial(self._passed, extract_code(completion), tests), "code-tests")
        if error is not None:
            raise error
        return share

    def _passed(self, code: str, tests: list[Any]) -> float:
        with self._slots:
            results = self._verdicts(code, tests) if isinstance(tests[0], str) else self._outputs(code, tests)
        return sum(results) / len(tests)

    def _verdicts(self, code: str, tests: list[str]) -> list[bool]:
        """Whether each test passed, up to the end of the tests."""
        (answers, tell), (requests, ask) = os.pipe(), os.pipe()
        streams = [answers, tell, requests, ask]
        try:
            with (
                self._started("candidate", requests, tell, subprocess.DEVNULL, code=code),
                self._started("tester", answers, ask, subprocess.PIPE, tests=tests) as tester,
            ):
                while streams:
                    os.close(streams.pop())
                (_, verdicts), _ = tester.read(len(tests))
                tester.end()
        finally:
            for stream in streams:
                os.close(stream)
        return [verdict == ord("1") for verdict in verdicts]

    def _outputs(self, code: str, pairs: list[tuple[str, str]]) -> list[bool]:
        size = 2 * max(len(output.encode()) for _, output in pairs) + 4096
        inputs = [text for text, _ in pairs]
        with self._started(
            "programs", subprocess.DEVNULL, subprocess.PIPE, subprocess.DEVNULL, code=code, inputs=inputs, output=size
        ) as running:
            (said, _), _ = running.read(6 * size * len(pairs))
            running.end()
        try:
            outputs = json.loads(said)
            return [
                isinstance(text, str) and _lines(text) == _lines(output)
                for text, (_, output) in zip(outputs, pairs, strict=True)
            ]
        except (ValueError, TypeError, RecursionError):  # the completion's code wrote something else
            return []

    def _started(self, role: str, stdin: int, stdout: int, stderr: int, code: str = "", **job: Any) -> Any:
        driver = Path(__file__).with_name("code_driver.py").read_text()
        files = {"main.py": driver, "job.json": json.dumps({**job, "seconds": self.test_timeout}), "code.py": code}
        return self.sandbox.started(
            [self.sandbox.python, "-I", "../program/main.py", role], files, stdin, stdout, stderr
        )


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def parse_tests(cell: Any) -> list[Any] | None:
    """Parses tests to snippets or (input, output) pairs. None if unusable; a RewardError for other forms."""
    if isinstance(cell, str):
        try:
            cell = json.loads(cell)
        except ValueError:
            return _with_calls(_snippets(cell))
    if isinstance(cell, Mapping) and {"inputs", "outputs"} <= cell.keys():
        cell = [{"input": text, "output": out} for text, out in zip_longest(cell["inputs"], cell["outputs"])]
    if cell is None:
        return None
    if isinstance(cell, Sequence) and cell:
        if all(isinstance(test, str) for test in cell):
            return _with_calls(list(cell)) if all(_snippets(test) for test in cell) else None
        if all(isinstance(test, Mapping) for test in cell):
            pairs = [(test.get("input"), test.get("output")) for test in cell]
            texts = all(isinstance(text, str | int | float) for pair in pairs for text in pair)
            if texts:  # not lists, the arguments of a call
                return [(str(text), str(output)) for text, output in pairs]
    raise RewardError(
        f"tests={str(cell)[:80]!r}: must be test code, a list of it, or pairs of input and output. "
        'Write ["assert add(1, 2) == 3"] or [{"input": "1 2", "output": "3"}].'
    )


def _snippets(source: str) -> list[str] | None:
    """Groups of top-level statements, each ending with an `assert`; None if empty or not valid Python."""
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError):
        return None
    groups: list[list[ast.stmt]] = [[]]
    for statement in statements:
        groups[-1].append(statement)
        defines = isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        if not defines and any(isinstance(node, ast.Assert) for node in ast.walk(statement)):
            groups.append([])
    rest = groups.pop()
    if groups and rest:
        groups[-1] += rest
    elif rest:
        groups.append(rest)
    return [ast.unparse(ast.Module(group, [])) for group in groups] or None


def _with_calls(tests: list[str] | None) -> list[str] | None:
    """The tests. Raises a RewardError if a function or class contains a check but is never used."""
    tree = ast.parse("\n".join(tests or ()))
    used = {None, *(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))}
    for unused in (statement for statement in tree.body if getattr(statement, "name", None) not in used):
        if any(isinstance(n, ast.Assert) or getattr(n, "attr", "").startswith("assert") for n in ast.walk(unused)):
            raise RewardError(
                f"tests={ast.unparse(unused)[:80]!r}: never called, so its checks would never run. Add a call, such "
                "as `test_add()` or `check(add)`."
            )
    return tests
