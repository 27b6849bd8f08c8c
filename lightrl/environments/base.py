"""The contract of an environment: what answers the policy, turn by turn."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

Message = dict[str, Any]
"""A message as chat templates take it: role, content, and by role `tool_calls`, `name`, `tool_call_id`."""
Tools = Sequence[dict[str, Any]]
"""JSON schemas of tools, as chat templates take them."""


class EnvironmentFailedError(RuntimeError):
    """Something failed that the policy did not cause. The trajectory is then in no loss and no baseline."""


@dataclass
class ToolCall:
    """A call of a tool that the policy wrote.

    Attributes:
        name: of the tool.
        arguments: name -> value, from the JSON that was sampled.
        id: that tool messages refer to.
    """

    name: str
    arguments: dict[str, Any]
    id: str


@dataclass
class Reply:
    """What the policy answered in one turn, parsed.

    Attributes:
        content: text without reasoning and tool calls.
        reasoning: the thoughts before it; None where there are none or nothing parses them.
        tool_calls: those that could be read.
        errors: what could not be read, in words for the policy; empty for a well-formed reply.
        text: the whole as decoded, special tokens included.
        truncated: whether a limit cut it.
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
    """What the environment answers to a reply.

    Attributes:
        messages: what the policy sees next; not empty unless `done`. None of them is the assistant's.
        reward: of this turn, a finite number; added to the trajectory's. Anything else ends the run.
        done: whether the trajectory ends here.
        failure: what failed that the policy did not cause; None where nothing did. The trajectory ends, and it is
            in no loss and no baseline, whatever `reward` says.
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    failure: str | None = None


class Environment(ABC):
    """One conversation partner of the policy: `reset`, then `step` after each reply, `finish`, and always `close`.

    Each attempt has an environment of its own. All attempts of a group are reset with the same row and seed and must
    give the same first messages; otherwise their rewards cannot be compared, and the run stops.

    Methods that wait should await. All environments of a process share one event loop for that. Write a method that
    blocks as a plain `def`; it then runs in a thread. One that blocks in spite of its `async def` is moved to a thread
    once that is noticed. An exception out of any method is a failure that the policy did not cause.
    """

    tools: Tools = ()
    """JSON schemas of the tools, as chat templates take them; may be set by `reset`."""

    @abstractmethod
    async def reset(self, row: Mapping[str, Any], *, seed: int) -> list[Message]:
        """Begins a task.

        Args:
            row: a row of the data set.
            seed: for everything random in the task; equal for the members of a group.

        Returns:
            the first messages: a conversation that ends before the assistant's first turn.
        """

    @abstractmethod
    async def step(self, reply: Reply) -> Step:
        """Answers a reply."""

    async def finish(self, stop_reason: str) -> float:
        """A last reward, asked for once when the trajectory has ended for a reason that is not a failure.

        Args:
            stop_reason: "stop", or the limit that ended it: "length", "turns", "tokens" or "time".
        """
        return 0.0

    def state_key(self, messages: Sequence[Message]) -> str:
        """Names the state that the environment is in when the policy reads these messages.

        Turns of a group that began in equal states are compared with one another by estimators such as GiGPO. What the
        messages say and show, unless overridden; pictures and arrays are compared by their contents.

        Raises:
            TypeError: a message holds an object that shows nothing of its contents.
        """
        return json.dumps(list(messages), sort_keys=True, default=_contents)

    @property
    def metrics(self) -> Mapping[str, float]:
        """Numbers to log of this trajectory."""
        return {}

    async def close(self) -> None:  # noqa: B027 - most environments hold nothing
        """Frees the environment's resources. Called once, whatever happened before."""


def _contents(value: Any) -> str:
    """What stands for a value that JSON does not have: the same for equal contents, in every process."""
    from PIL import Image

    kind = type(value).__name__
    if isinstance(value, Image.Image):
        palette = bytes(value.getpalette() or ())
        return f"image {value.mode} {value.size} {_digest(palette + value.tobytes())}"
    if isinstance(value, bytes | bytearray | memoryview):
        return f"bytes {_digest(bytes(value))}"
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and value.dtype != object:
        return f"array {value.dtype} {value.shape} {_digest(np.ascontiguousarray(value).tobytes())}"
    own = {name for one in type(value).__mro__[:-1] for name in vars(one)}  # all but what `object` has
    if not own & {"__repr__", "__str__"}:
        raise TypeError(
            f"a message holds a {kind}, which shows nothing of its contents, so that states cannot be told apart: "
            "override `Environment.state_key`, or give the class a __repr__."
        )
    return str(value)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
