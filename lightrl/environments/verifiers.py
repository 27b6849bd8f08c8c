"""Task sets and harnesses of the package verifiers."""

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
    """Has each attempt made by a harness of verifiers at a task of one of its task sets.

    Rows come from `VerifiersRows`. The task set scores the attempt. Its reward is the trajectory's, and its rewards and
    metrics are logged by their names. An error of the harness, the runtime, or the scoring is a failure. verifiers
    runs in a separate interpreter, because its versions of mcp and openai exclude others. On the runtime "subprocess"
    a harness needs no uv if that interpreter has its packages.

    Args:
        taskset: Name of an installed task set, or of a module in the working folder, or its settings with an `id`.
        harness: Name of the harness, or its settings with an `id`. None uses the task set's, otherwise "bash".
        runtime: Type of the place where the harness runs, or its settings with a `type`. With "subprocess" and a
            harness that runs code, the policy's commands run as your user. Use "docker" for those.
        environment: Other settings of verifiers' `[env]` block, such as `id` or `agent: {max_turns: 8}`. An attempt
            that verifiers ends at a limit of its own is scored by the task set.
        python: Interpreter that has verifiers; None for the variable `LIGHTRL_VERIFIERS_PYTHON`.
        env: Additional environment variables of it.
        limits: Other arguments of `AgentProgram`.

    Raises:
        ValueError: The interpreter is missing, or an argument of `AgentProgram` is out of its range.

    Source: https://github.com/PrimeIntellect-ai/verifiers
    """

    def __init__(
        self,
        taskset: str | dict[str, Any],
        harness: str | dict[str, Any] | None = "null",
        *,
        runtime: str | dict[str, Any] = "subprocess",
        environment: dict[str, Any] | None = None,
        python: str | None = None,
        env: Mapping[str, str] | None = None,
        **limits: Any,
    ) -> None:
        agent: dict[str, Any] = {"runtime": {"type": runtime} if isinstance(runtime, str) else runtime}
        if harness is not None:
            agent["harness"] = _named(harness)
        settings = _settings(taskset, environment, agent=agent)
        super().__init__(
            f"{CHILD}:main", process=True, python=_python(python), env={**(env or {}), **settings}, **limits
        )


class VerifiersRows:
    """Rows of a task set of verifiers, for `rows` of a `PromptSource`.

    Columns: `prompt` (the task's text, otherwise its name), `name`, and `task` (JSON that `VerifiersProgram` plays).

    Args:
        taskset: As in `VerifiersProgram`.
        select: Tasks to use, as verifiers' `[select]` block: `limit`, `skip`, `shuffle`, `seed`, `include`, `exclude`.
        environment: As in `VerifiersProgram`.
        python: Interpreter that has verifiers; None for the variable `LIGHTRL_VERIFIERS_PYTHON`.

    Raises:
        ValueError: The interpreter is missing, or when called, the task set can't be read.
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
        """Reads the task set."""
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
                raise ValueError(f"taskset={self.taskset!r}: can't be read.\n{read.stderr[-2000:].strip()}")
            return Dataset.from_list([json.loads(line) for line in place.read_text().splitlines()])


def _named(settings: str | dict[str, Any]) -> dict[str, Any]:
    return {"id": settings} if isinstance(settings, str) else settings


def _settings(taskset: str | dict[str, Any], environment: dict[str, Any] | None, **others: Any) -> dict[str, str]:
    """The variable that the child reads."""
    settings = {"taskset": _named(taskset), "environment": environment or {}, "select": {}, **others}
    return {"LIGHTRL_VERIFIERS": json.dumps(settings)}


def _python(python: str | None) -> str:
    """The interpreter that has verifiers."""
    python = python or os.environ.get(PYTHON, "")
    if not shutil.which(python):
        raise ValueError(
            f"python={python!r}: is not an interpreter. Run `python3.11 -m venv verifiers` and `verifiers/bin/pip "
            f"install 'verifiers>=0.4,<0.5'`, and pass verifiers/bin/python or set {PYTHON}."
        )
    return python
