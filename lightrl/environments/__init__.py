"""Multi-turn environments, tools, and agent programs, and the records of their sampled tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightrl.compat.arguments import lazy_names

if TYPE_CHECKING:
    from lightrl.environments.base import Environment, Reply, Step, ToolCall
    from lightrl.environments.code_tools import BashTool, PythonTool
    from lightrl.environments.endpoint.program import AgentProgram
    from lightrl.environments.episodes import EnvironmentFailedError, Episode, SingleTurn, Task
    from lightrl.environments.gym import GymnasiumEnvironment
    from lightrl.environments.ledger import Ledger
    from lightrl.environments.playing import EnvironmentEpisode
    from lightrl.environments.remote import MCPEnvironment, OpenEnvironment
    from lightrl.environments.textarena import TextArenaEnvironment
    from lightrl.environments.tools import ToolEnvironment
    from lightrl.environments.verifiers import VerifiersProgram, VerifiersRows

__all__ = [
    "AgentProgram",
    "BashTool",
    "Environment",
    "EnvironmentEpisode",
    "EnvironmentFailedError",
    "Episode",
    "GymnasiumEnvironment",
    "Ledger",
    "MCPEnvironment",
    "OpenEnvironment",
    "PythonTool",
    "Reply",
    "SingleTurn",
    "Step",
    "Task",
    "TextArenaEnvironment",
    "ToolCall",
    "ToolEnvironment",
    "VerifiersProgram",
    "VerifiersRows",
]

_MODULES = (
    *("episodes", "base", "ledger", "tools", "gym", "playing", "remote", "code_tools"),
    *("endpoint.program", "textarena", "verifiers"),
)
__getattr__ = lazy_names(__name__, _MODULES, __all__)
