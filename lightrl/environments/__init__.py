"""Environments: what answers the policy over many turns, and the record of the tokens that are trained."""

from lightrl.environments.base import Environment, EnvironmentFailedError, Reply, Step, ToolCall
from lightrl.environments.canary import LedgerMismatch, check_trajectories
from lightrl.environments.endpoint import AgentProgram
from lightrl.environments.episode import Attempts
from lightrl.environments.ledger import Ledger
from lightrl.environments.remote import MCPEnvironment, OpenEnvironment
from lightrl.environments.tools import ToolEnvironment

__all__ = [
    "AgentProgram",
    "Attempts",
    "Environment",
    "EnvironmentFailedError",
    "Ledger",
    "LedgerMismatch",
    "MCPEnvironment",
    "OpenEnvironment",
    "Reply",
    "Step",
    "ToolCall",
    "ToolEnvironment",
    "check_trajectories",
]
