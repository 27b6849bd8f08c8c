"""The interface of environments, which respond to the policy turn by turn."""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lightrl.environments.episodes import EnvironmentFailedError as EnvironmentFailedError

Message = dict[str, Any]
"""A message in the format of chat templates: `role`, `content`, and optionally `tool_calls`, `name`, `tool_call_id`."""
Tools = Sequence[dict[str, Any]]
"""JSON schemas of tools in the format of chat templates."""


def call_message(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A tool call of an assistant message."""
    return {"type": "function", "id": call_id, "function": {"name": name, "arguments": arguments}}


@dataclass
class ToolCall:
    """A tool call by the policy. Tool messages refer to `id`."""

    name: str
    arguments: dict[str, Any]
    id: str


@dataclass
class Reply:
    """A parsed turn of the policy.

    Attributes:
        content: Text without reasoning and tool calls.
        reasoning: Reasoning text. None if there is none, or no parser for it.
        tool_calls: Valid tool calls.
        errors: Parse errors, as messages for the policy.
        text: Entire decoded turn, including special tokens.
        truncated: Whether a token limit truncated the turn.
    """

    content: str
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    text: str = ""
    truncated: bool = False

    def message(self) -> Message:
        """The turn as an assistant message."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call_message(call.id, call.name, call.arguments) for call in self.tool_calls]
        return message


@dataclass
class Step:
    """The environment's response to a reply.

    Attributes:
        messages: Next messages for the policy, without assistant messages. Must not be empty unless `done`.
        reward: Reward of this turn (finite), added to the trajectory's reward.
        done: Whether the trajectory ends.
        failure: Description of a failure that the policy did not cause. The trajectory then ends and is excluded from
            losses and baselines.
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    failure: str | None = None


class Environment(ABC):
    """Base class of environments. Methods are called in the order `reset`, `step` after each reply, `finish`, `close`.

    Each trajectory has its own environment. All trajectories of a group are reset with the same example and seed and
    must return the same first messages. Otherwise their rewards are not comparable, and the run stops with an error.

    Await slow operations. All async methods of a process share one event loop, so they can share clients and locks. A
    method without `await` may block, because it runs in the environment's own thread. An exception in any method counts
    as a failure that the policy did not cause.
    """

    tools: Tools = ()
    """JSON schemas of the tools in the format of chat templates. `reset` may set them."""

    @abstractmethod
    async def reset(self, row: Mapping[str, Any], *, seed: int) -> list[Message]:
        """Starts a task.

        Args:
            row: Example of the dataset (column -> value).
            seed: Seed for all randomness in the task. Equal for all trajectories of a group.

        Returns:
            First messages of the conversation, before the first assistant message.
        """

    @abstractmethod
    async def step(self, reply: Reply) -> Step:
        """Responds to the policy's reply."""

    async def finish(self, stop_reason: str) -> float | None:
        """Returns the final reward. Called once unless the trajectory failed.

        None, if no turn had a reward either, leaves scoring to the reward functions.

        Args:
            stop_reason: "stop", or the limit that ended the trajectory: "length", "turns", "tokens", or "time".
        """
        return 0.0

    def state_key(self, messages: Sequence[Message]) -> str:
        """Returns an identifier of the environment's state when the policy reads these messages.

        Estimators such as GiGPO compare turns of a group that started in equal states. Defaults to the content of the
        messages, including the values of images and arrays.

        Raises:
            TypeError: A message contains an object whose content can't be determined.
        """
        return json.dumps(list(messages), sort_keys=True, default=_content)

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of this trajectory to log."""
        return {}

    async def close(self) -> None:  # noqa: B027 - most environments have no resources
        """Releases the environment's resources. Always called exactly once."""


def _content(value: Any) -> str:
    """Text that identifies an image or array, the same for equal content in all processes."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    array = np.asarray(value)
    if array.dtype == object:
        raise TypeError(f"messages: a {type(value).__name__} can't be compared. Override `Environment.state_key`.")
    return f"{array.dtype} {array.shape} {hashlib.blake2b(array.tobytes(), digest_size=16).hexdigest()}"
