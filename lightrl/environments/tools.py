"""An environment of a plain class whose public methods are tools."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from lightrl.compat.arguments import above, imported, one_of
from lightrl.engines.background import all_of
from lightrl.environments.base import Environment, EnvironmentFailedError, Message, Reply, Step, ToolCall
from lightrl.environments.calling import UserCode
from lightrl.environments.tool_arguments import Check, check_by_hints, tool_schema

NOT_TOOLS = {"reset", "get_reward", "close"}


class _Ended(RuntimeError):
    """Stands for what would end more than the call, such as SystemExit; the text names it."""


@dataclass
class _Tool:
    """A tool that the policy may call.

    Attributes:
        function: Takes the arguments; gives what the policy reads.
        check: Check of the arguments.
        waits: Whether it is async, so that calls of one reply may run together.
    """

    function: Callable[[dict[str, Any]], Awaitable[Any]]
    check: Check
    waits: bool


class ToolEnvironment(Environment):
    """Lets the policy call the public methods of a plain class.

    The class has `reset(**row) -> str | None` (a string is appended to the last message of the prompt; with a
    parameter `seed`, it is given the group's), and by choice `get_reward() -> float`, asked once at the end, and
    `close()`. Every other public method is a tool, its schema made from type hints and the Google docstring; all may
    be sync or async. A reply without a tool call ends the trajectory.

    Sync methods run in a thread, so they do not hold up other environments. Calls of one reply: the async ones run
    together, the sync ones one after another.

    Args:
        factory: the class, or a function that makes an object of it; or the import path of either, as in YAML.
        tool_timeout: seconds that a call may take; None for no limit. A sync call that takes longer cannot be ended:
            it is left behind in its thread and counted (`tools/left_behind`).
        timeout_message: what the policy reads then; `{name}` and `{seconds}` are filled in.
        error_message: what the policy reads when a call raises, or cannot be made; `{name}` and `{error}` are filled
            in. `EnvironmentFailedError` and `ConnectionError` are failures of the infrastructure instead; a tool
            where the policy chooses the address should catch the latter itself.
        result_role: "tool", or "user" for chat templates without tool messages; results of one reply are then one
            message.

    Raises:
        ValueError: there is no such class, it has no `reset`, or a tool's schema cannot be made.

    Source: TRL's `environment_factory` (https://huggingface.co/docs/trl/openenv), whose classes work unchanged. We
    differ in that each attempt has an object of its own, and that errors are told in words.
    """

    def __init__(
        self,
        factory: str | Callable[[], Any],
        *,
        tool_timeout: float | None = 60.0,
        timeout_message: str = "Error: {name} took longer than {seconds:g} seconds.",
        error_message: str = "Error: {error}",
        result_role: Literal["tool", "user"] = "tool",
    ) -> None:
        self.tool_timeout = above("tool_timeout", tool_timeout, note=" seconds", or_none="for no limit")
        self.timeout_message = timeout_message
        self.error_message = error_message
        self.result_role = one_of("result_role", result_role, "tool", "user")
        self._object = (imported("factory:", factory) if isinstance(factory, str) else factory)()
        if not callable(getattr(self._object, "reset", None)):
            raise ValueError(f"factory: {type(self._object).__name__} has no method `reset`.")
        self._code = UserCode(type(self._object), "tool")
        self._tools: dict[str, _Tool] = {}
        self.tools = []
        for name, _ in inspect.getmembers(type(self._object), predicate=inspect.isfunction):
            if not name.startswith("_") and name not in NOT_TOOLS:
                method = getattr(self._object, name)
                schema = tool_schema(name, method)
                self._add_tool(
                    schema,
                    partial(self._call, method),
                    check_by_hints(method, schema),
                    inspect.iscoroutinefunction(method),
                )
        self._counts = {"tools/calls": 0.0, "tools/errors": 0.0, "tools/timeouts": 0.0, "tools/left_behind": 0.0}

    def _add_tool(
        self, schema: dict[str, Any], function: Callable[[dict[str, Any]], Awaitable[Any]], check: Check, waits: bool
    ) -> None:
        self.tools = [*self.tools, schema]
        self._tools[schema["function"]["name"]] = _Tool(function, check, waits)

    @property
    def metrics(self) -> Mapping[str, float]:
        """Calls, those among them that went wrong or took too long, and threads that were left behind."""
        return self._counts

    async def reset(self, row: Mapping[str, Any], *, seed: int) -> list[Message]:
        arguments = dict(row)
        named = inspect.signature(self._object.reset).parameters.get("seed")
        if named is not None and named.kind is not inspect.Parameter.VAR_KEYWORD:
            arguments.setdefault("seed", seed)
        return first_messages(row, await self._call(self._object.reset, arguments))

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
        """What the policy reads as the results of a reply's calls."""
        results: list[Any] = [None] * len(calls)

        async def one(number: int) -> None:
            results[number] = await self._result(calls[number])

        async def in_turn(numbers: Sequence[int]) -> None:
            for number in numbers:
                await one(number)

        waits = [call.name in self._tools and self._tools[call.name].waits for call in calls]
        alone = [number for number, wait in enumerate(waits) if not wait]
        running = [in_turn(alone), *(one(number) for number, wait in enumerate(waits) if wait)]
        await all_of(running)  # one failed, or the attempt was given up: no call outlives its turn
        return results

    async def _result(self, call: ToolCall) -> Any:
        """What the policy reads as the result of a call."""
        self._counts["tools/calls"] += 1
        tool = self._tools.get(call.name)
        if tool is None:
            known = ", ".join(self._tools) or "none"
            return self._wrong(call.name, f"there is no tool {call.name!r}; there are: {known}.")
        arguments, wrong = tool.check(call.arguments)
        if wrong:
            return self._wrong(call.name, f"{call.name}: {' '.join(wrong)}")
        task = asyncio.ensure_future(tool.function(arguments))
        try:
            await asyncio.wait([task], timeout=self.tool_timeout)
        finally:
            if not (done := task.done()):
                task.cancel()
                await asyncio.wait([task], timeout=1.0)  # one that ignores this is left behind
        if not done:
            self._counts["tools/timeouts"] += 1
            self._counts["tools/left_behind"] += not tool.waits
            return self.timeout_message.format(name=call.name, seconds=self.tool_timeout)
        try:
            result = task.result()
        except (EnvironmentFailedError, ConnectionError):
            raise
        except _Ended as error:
            return self._wrong(call.name, str(error))
        except Exception as error:
            return self._wrong(call.name, f"{type(error).__name__}: {error}")
        return result if isinstance(result, list) and _are_blocks(result) else str(result)

    async def _call(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Result of a method of the object."""
        result, error = await self._code.call(function, **arguments)
        if error is None:
            return result
        if isinstance(error, Exception) and not isinstance(error, StopIteration):  # which a coroutine cannot raise
            raise error
        raise _Ended(f"{type(error).__name__}: {error}") from error

    def _wrong(self, name: str, error: str) -> str:
        self._counts["tools/errors"] += 1
        return self.error_message.format(name=name, error=error)

    async def finish(self, stop_reason: str) -> float:
        if not callable(getattr(self._object, "get_reward", None)):
            return 0.0
        return float(await self._call(self._object.get_reward, {}))

    async def close(self) -> None:
        try:
            if callable(getattr(self._object, "close", None)):
                await self._call(self._object.close, {})
        finally:
            self._code.close()


def _are_blocks(content: Sequence[Any]) -> bool:
    return bool(content) and all(isinstance(part, Mapping) and "type" in part for part in content)


def first_messages(row: Mapping[str, Any], said: Any) -> list[Message]:
    """The row's prompt as messages, with what is `said` beside it (text, content blocks or None) at its end."""
    prompt = row.get("prompt", "")
    messages = (
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(message) for message in prompt]
    )
    if said is not None:
        messages[-1]["content"] = _joined(messages[-1]["content"], said)
    return messages


def _joined(content: Any, said: Any) -> Any:
    """A message's content with more at its end; text and content blocks may be mixed."""
    if isinstance(content, str) and isinstance(said, str):
        return content + said
    return [
        part
        for side in (content, said)
        for part in ([{"type": "text", "text": side}] if isinstance(side, str) else side)
    ]
