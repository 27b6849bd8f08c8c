"""The contract of an environment, which answers the policy turn by turn."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from lightrl.environments.episodes import EnvironmentFailedError as EnvironmentFailedError

Message = dict[str, Any]
"""A message as chat templates take it: role, content, and by role `tool_calls`, `name`, `tool_call_id`."""
Tools = Sequence[dict[str, Any]]
"""JSON schemas of tools, as chat templates take them."""


@dataclass
class ToolCall:
    """A call of a tool that the policy wrote, with its arguments by name. Tool messages refer to `id`."""

    name: str
    arguments: dict[str, Any]
    id: str


@dataclass
class Reply:
    """The policy's turn, parsed.

    Attributes:
        content: Text without reasoning and tool calls.
        reasoning: Thoughts; None without any, or without a parser for them.
        tool_calls: Calls that could be read.
        errors: What could not be read, in words for the policy.
        text: The whole turn as decoded, with special tokens.
        truncated: Whether a limit cut it.
    """

    content: str
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    text: str = ""
    truncated: bool = False

    def message(self) -> Message:
        """The assistant's message of a conversation."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


@dataclass
class Step:
    """The environment's answer to a reply.

    Attributes:
        messages: Next messages for the policy, none of them the assistant's; not empty unless `done`.
        reward: Finite reward of this turn, added to the trajectory's.
        done: Whether the trajectory ends.
        failure: What failed that the policy did not cause. The trajectory then ends and is in no loss and no baseline.
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    failure: str | None = None


class Environment(ABC):
    """One conversation partner of the policy: `reset`, `step` after each reply, `finish`, and always `close`.

    Each attempt has a separate environment. All attempts of a group are reset with the same row and seed and must
    return the same first messages. Otherwise their rewards can't be compared, and the run stops.

    Await what takes long. All async methods of a process share one event loop, and with it clients and locks. A method
    without `await` may block: it runs in the environment's own thread. An exception in any method is a failure that the
    policy did not cause.
    """

    tools: Tools = ()
    """JSON schemas of the tools, as chat templates take them. `reset` may set it."""

    @abstractmethod
    async def reset(self, row: Mapping[str, Any], *, seed: int) -> list[Message]:
        """Begins a task.

        Args:
            row: Row of the dataset.
            seed: Seed for everything random in the task, the same for all members of a group.

        Returns:
            First messages of a conversation, before the assistant's first turn.
        """

    @abstractmethod
    async def step(self, reply: Reply) -> Step:
        """Answers a reply."""

    async def finish(self, stop_reason: str) -> float:
        """Last reward, asked for once if the trajectory did not fail.

        Args:
            stop_reason: "stop", or the limit that ended it: "length", "turns", "tokens", or "time".
        """
        return 0.0

    def state_key(self, messages: Sequence[Message]) -> str:
        """Names the state that the environment is in when the policy reads these messages.

        Estimators such as GiGPO compare turns of a group that began in equal states. By default the messages' content,
        with images and arrays by their values.

        Raises:
            TypeError: A message has an object that shows nothing of its content.
        """
        return json.dumps(list(messages), sort_keys=True, default=_content)

    @property
    def metrics(self) -> Mapping[str, float]:
        """Numbers to log of this trajectory."""
        return {}

    async def close(self) -> None:  # noqa: B027 - most environments hold nothing
        """Frees the environment's resources. Called once, whatever happened before."""


def _content(value: Any) -> str:
    """A text for a value that JSON does not have: the same for equal content, in every process."""
    from PIL import Image

    if isinstance(value, Image.Image):
        palette = bytes(value.getpalette() or ())
        return f"image {value.mode} {value.size} {_digest(palette + value.tobytes())}"
    if isinstance(value, bytes | bytearray | memoryview):
        return f"bytes {_digest(bytes(value))}"
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and value.dtype != object:
        return f"array {value.dtype} {value.shape} {_digest(np.ascontiguousarray(value).tobytes())}"
    if all(getattr(type(value), name) is getattr(object, name) for name in ("__repr__", "__str__")):
        raise TypeError(
            f"a message has a {type(value).__name__}, which shows nothing of its content, so states can't be told "
            "apart. Override `Environment.state_key`, or give the class a __repr__."
        )
    return str(value)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
