"""Task sets and harnesses of the verifiers package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightrl.environments.endpoint.program import AgentProgram

if TYPE_CHECKING:
    from datasets import Dataset

CHILD = Path(__file__).parent / "endpoint" / "verifiers_child.py"
PYTHON = "LIGHTRL_VERIFIERS_PYTHON"


class VerifiersProgram(AgentProgram):
    """Runs each trajectory with a verifiers harness on a task of a verifiers task set.

    Load the data with `VerifiersRows`. The task set computes the reward of a trajectory; its rewards and metrics are
    logged by name. Errors of the harness, the runtime, or the scoring are failures. verifiers runs in a separate Python
    interpreter, because its versions of mcp and openai conflict with others. With the runtime "subprocess", a harness
    doesn't need uv if that interpreter has its packages.

    Args:
        taskset: Name of an installed task set or of a module in the working directory, or its settings with an `id`.
        harness: Name of the harness, or its settings with an `id`. None uses verifiers' harness "null", without tools.
            "taskset" uses the task set's harness, otherwise "bash".
        runtime: Type of the runtime of the harness, or its settings with a `type`. With "subprocess", commands of the
            policy run with your user's privileges. Use "docker" for harnesses that run code.
        environment: Other settings of verifiers' `[env]` block, such as `id` or `agent: {max_turns: 8}`. The task set
            also scores trajectories that verifiers ends at one of its limits.
        python: Python interpreter with verifiers. Defaults to the environment variable `LIGHTRL_VERIFIERS_PYTHON`.
        env: Additional environment variables of the interpreter.
        limits: Other arguments of `AgentProgram`.

    Raises:
        ValueError: The interpreter doesn't exist, or an argument of `AgentProgram` is out of range.

    Source: https://github.com/PrimeIntellect-ai/verifiers
    """

    def __init__(
        self,
        taskset: str | dict[str, Any],
        harness: str | dict[str, Any] | None = None,
        *,
        runtime: str | dict[str, Any] = "subprocess",
        environment: dict[str, Any] | None = None,
        python: str | None = None,
        env: Mapping[str, str] | None = None,
        **limits: Any,
    ) -> None:
        agent: dict[str, Any] = {"runtime": {"type": runtime} if isinstance(runtime, str) else runtime}
        if harness != "taskset":
            agent["harness"] = _named(harness or "null")  # YAML reads the name as null, also in quotes
        settings = _settings(taskset, environment, agent=agent)
        super().__init__(
            f"{CHILD}:main", process=True, python=_python(python), env={**(env or {}), **settings}, **limits
        )


class VerifiersRows:
    """Loads a verifiers task set, for `rows` of a `PromptSource`.

    Columns: `prompt` (text of the task, or its name if it has no text), `name`, and `task` (JSON for
    `VerifiersProgram`).

    Args:
        taskset: Task set, as in `VerifiersProgram`.
        select: Tasks to use, in the format of verifiers' `[select]` block: `limit`, `skip`, `shuffle`, `seed`,
            `include`, and `exclude`.
        environment: Settings of the environment, as in `VerifiersProgram`.
        python: Python interpreter with verifiers. Defaults to the environment variable `LIGHTRL_VERIFIERS_PYTHON`.

    Raises:
        ValueError: The interpreter doesn't exist, or when called, if the task set can't be loaded.
    """

    def __init__(
        self,
        taskset: str | dict[str, Any],
        select: dict[str, Any] | None = None,
        environment: dict[str, Any] | None = None,
        python: str | None = None,
    ) -> None:
        self.taskset = taskset
        self.python = _python(python)
        self._settings = _settings(taskset, environment, agent={}, select=select or {})

    def __call__(self) -> Dataset:
        """Loads the task set."""
        from datasets import Dataset

        with tempfile.TemporaryDirectory(prefix="verifiers-") as folder:
            place = Path(folder) / "rows.jsonl"
            read = subprocess.run(
                [self.python, str(CHILD), str(place)],
                env={**os.environ, **self._settings},
                capture_output=True,
                text=True,
            )
            if read.returncode:
                raise ValueError(
                    f"taskset={self.taskset!r}: can't be loaded. Fix the error below.\n{read.stderr[-2000:].strip()}"
                )
            return Dataset.from_list([json.loads(line) for line in place.read_text().splitlines()])


def _named(settings: str | dict[str, Any]) -> dict[str, Any]:
    return {"id": settings} if isinstance(settings, str) else settings


def _settings(taskset: str | dict[str, Any], environment: dict[str, Any] | None, **others: Any) -> dict[str, str]:
    settings = {"taskset": _named(taskset), "environment": environment or {}, "select": {}, **others}
    return {"LIGHTRL_VERIFIERS": json.dumps(settings)}


def _python(python: str | None) -> str:
    python = python or os.environ.get(PYTHON, "")
    if not shutil.which(python):
        raise ValueError(
            f"python={python!r}: not a Python interpreter. Run `python3.11 -m venv verifiers` and "
            f"`verifiers/bin/pip install 'verifiers>=0.4,<0.5'`, then pass verifiers/bin/python or set {PYTHON}."
        )
    return python
