"""An environment whose tools are the public methods of a class."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from lightrl.compat.arguments import imported
from lightrl.engines.background import all_of
from lightrl.environments.base import Environment, EnvironmentFailedError, Message, Reply, Step, ToolCall
from lightrl.environments.calling import LateError, LoopBlockedError, Outcome, UserCode, may_await
from lightrl.environments.tool_arguments import Check, check_by_hints, tool_schema


@dataclass
class Tool:
    """A tool that the policy can call."""

    schema: dict[str, Any]  # in the format of chat templates
    function: Callable[[dict[str, Any], float | None], Awaitable[Outcome]]  # of arguments and a time limit in seconds
    check: Check
    waits: bool  # calls of one reply run concurrently


class ToolEnvironment(Environment):
    """Lets the policy call the public methods of a class as tools.

    The class must have a method `reset(**row) -> str | None`. A returned string is appended to the last message of the
    prompt. A parameter `seed` receives the group's seed. Optional methods are `get_reward() -> float`, called once at
    the end, and `close()`. Without `get_reward`, or if it returns None, only reward functions score the trajectory.
    All other public methods are tools. Their schemas come from type hints and Google-style docstrings. All methods may
    be sync or async. A reply without a tool call ends the trajectory.

    Sync methods run in one thread per trajectory. Within one reply, async calls run concurrently and sync calls
    sequentially. The policy receives an error message for calls that are invalid, take too long, or raise.
    `EnvironmentFailedError` and `ConnectionError` are failures of the trajectory instead. If the policy chooses the
    address, catch `ConnectionError` in the tool.

    Args:
        factory: Tool class, function that returns an instance, or the import path of either.
        tool_timeout: Time limit per call in seconds. None means no limit. Sync calls can't be stopped: their thread is
            abandoned and counted in `tools/left_behind`.
        result_role: Role of messages with results. Use "user" for chat templates without tool messages. Results of one
            reply are then joined to one message.

    Source: TRL's `environment_factory` (https://huggingface.co/docs/trl/openenv). TRL's classes work unchanged, but
        LightRL creates a separate instance for each trajectory.
    """

    def __init__(
        self,
        factory: str | Callable[[], Any],
        *,
        tool_timeout: float | None = 60.0,
        result_role: Literal["tool", "user"] = "tool",
    ) -> None:
        self.tool_timeout = tool_timeout
        self.result_role = result_role
        self._object = (imported("factory:", factory) if isinstance(factory, str) else factory)()
        self._code = UserCode(type(self._object).__qualname__)
        self._tools: dict[str, Tool] = {}
        for name in tool_names(type(self._object)):
            method = getattr(self._object, name)
            schema = tool_schema(method)
            self.add_tool(Tool(schema, partial(self._call, method), check_by_hints(method, schema), may_await(method)))
        self._counts = {"tools/calls": 0.0, "tools/errors": 0.0, "tools/timeouts": 0.0, "tools/left_behind": 0.0}

    def add_tool(self, tool: Tool) -> None:
        """Adds a tool. Call it before or in `reset`."""
        self.tools = [*self.tools, tool.schema]
        self._tools[tool.schema["function"]["name"]] = tool

    @property
    def metrics(self) -> Mapping[str, float]:
        """Number of calls, errors, timeouts, and abandoned threads."""
        return self._counts

    async def reset(self, row: Mapping[str, Any], *, seed: int) -> list[Message]:
        arguments = dict(row)
        named = inspect.signature(self._object.reset).parameters.get("seed")
        if named is not None and named.kind is not inspect.Parameter.VAR_KEYWORD:
            arguments.setdefault("seed", seed)
        return first_messages(row, await self._code.result(partial(self._object.reset, **arguments)))

    async def step(self, reply: Reply) -> Step:
        if not reply.tool_calls:
            return Step(done=True)
        results = await self._results(reply.tool_calls)
        if self.result_role == "user":
            content = results[0]
            for result in results[1:]:
                content = _joined(_joined(content, "\n"), result)
            return Step([{"role": "user", "content": content}])
        return Step(
            [
                {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": result}
                for call, result in zip(reply.tool_calls, results, strict=True)
            ]
        )

    async def _results(self, calls: Sequence[ToolCall]) -> list[Any]:
        """Contents of the messages with the results of a reply's calls."""
        results: list[Any] = [None] * len(calls)

        async def run(numbers: Sequence[int]) -> None:
            for number in numbers:
                results[number] = await self._told(calls[number])

        waits = [call.name in self._tools and self._tools[call.name].waits for call in calls]
        in_turn = [number for number, wait in enumerate(waits) if not wait]
        # On a failure or cancellation, cancels all calls of the turn.
        await all_of([run(in_turn), *(run([number]) for number, wait in enumerate(waits) if wait)])
        return results

    async def _told(self, call: ToolCall) -> Any:
        """Content of the message with the result of a call."""
        self._counts["tools/calls"] += 1
        tool = self._tools.get(call.name)
        if tool is None:
            known = ", ".join(self._tools) or "none"
            return self.wrong(f"unknown tool {call.name!r}. Available tools: {known}.")
        arguments, wrong = tool.check(call.arguments)
        if wrong:
            return self.wrong(f"{call.name}: {' '.join(wrong)}")
        result, error = await tool.function(arguments, self.tool_timeout)
        if isinstance(error, LateError):
            self._counts["tools/timeouts"] += 1
            self._counts["tools/left_behind"] += not tool.waits
            return f"Error: {call.name} took longer than {self.tool_timeout:g} seconds."
        if isinstance(error, EnvironmentFailedError | ConnectionError | LoopBlockedError | asyncio.CancelledError):
            raise error
        if error is not None:
            return self.wrong(f"{type(error).__name__}: {error}")
        blocks = isinstance(result, list) and result and all(isinstance(x, Mapping) and "type" in x for x in result)
        return result if blocks else str(result)

    async def _call(self, function: Callable[..., Any], arguments: Mapping[str, Any], limit: float | None) -> Outcome:
        return await self._code.call(partial(function, **arguments), limit)

    def wrong(self, error: str) -> str:
        """Counts a failed call and returns the error message for the policy."""
        self._counts["tools/errors"] += 1
        return f"Error: {error}"

    async def finish(self, stop_reason: str) -> float | None:
        if not callable(getattr(self._object, "get_reward", None)):  # a subclass may give rewards in `step`
            return None if type(self).step is ToolEnvironment.step else 0.0
        reward = await self._code.result(partial(self._object.get_reward))
        return None if reward is None else float(reward)

    async def close(self) -> None:
        await self._code.end(self._object)


def tool_names(kind: type) -> list[str]:
    """Names of the tools of a class."""
    methods = inspect.getmembers(kind, predicate=inspect.isfunction)
    return [name for name, _ in methods if name[0] != "_" and name not in ("reset", "get_reward", "close")]


def first_messages(row: Mapping[str, Any], said: Any) -> list[Message]:
    """The example's prompt as messages, with `said` (text, content blocks, or None) appended."""
    prompt = row.get("prompt", "")
    messages = (
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(message) for message in prompt]
    )
    if said is not None:
        messages[-1]["content"] = _joined(messages[-1]["content"], said)
    return messages


def _joined(content: Any, said: Any) -> Any:
    """Appends to a message's content. Text and content blocks may be mixed."""
    if isinstance(content, str) and isinstance(said, str):
        return content + said
    return [
        part
        for side in (content, said)
        for part in ([{"type": "text", "text": side}] if isinstance(side, str) else side)
    ]
