"""Tools for `ToolEnvironment` that run the policy's code in a sandbox."""

from __future__ import annotations

from typing import Any

from lightrl.rewards.sandbox import Sandbox


class PythonTool:
    """Tool class with one tool, `python`. Each call starts in an empty scratch directory.

    Args:
        sandbox: Sandbox for the code. Defaults to `Sandbox()`.
    """

    def __init__(self, sandbox: Sandbox | None = None) -> None:
        self._sandbox = sandbox or Sandbox()

    def reset(self, **row: Any) -> None:
        """Does nothing, because calls share no state."""

    def python(self, code: str) -> str:
        """Runs a Python program and returns what it prints.

        Args:
            code: The program.
        """
        return self._sandbox.run_python(code).text()


class BashTool:
    """Tool class with one tool, `bash`. Each call starts in an empty scratch directory.

    Args:
        sandbox: Sandbox for the scripts. Defaults to `Sandbox()`.
    """

    def __init__(self, sandbox: Sandbox | None = None) -> None:
        self._sandbox = sandbox or Sandbox()

    def reset(self, **row: Any) -> None:
        """Does nothing, because calls share no state."""

    def bash(self, script: str) -> str:
        """Runs a bash script and returns what it prints.

        Args:
            script: The script.
        """
        return self._sandbox.run_bash(script).text()
