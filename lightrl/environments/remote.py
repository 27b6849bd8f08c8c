"""Environments on servers: the tools of an MCP server, and environments of OpenEnv."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lightrl.compat import openenv
from lightrl.compat.arguments import above, require_packages
from lightrl.environments.base import Environment, EnvironmentFailedError, Message, Reply, Step
from lightrl.environments.tool_arguments import check_by_schema, place
from lightrl.environments.tools import ToolEnvironment, first_messages

INVALID_PARAMS = -32602  # of JSON-RPC: the call does not fit the tool, which is the policy's doing


class MCPEnvironment(ToolEnvironment):
    """Lets the policy call the tools of an MCP server, which the server describes itself.

    Each attempt has a session of its own, and a server that is given as a command a process of its own, ended with the
    attempt. What a tool reports as an error is told to the policy; a server that is not there, dies or breaks the
    protocol is a failure of the infrastructure. Texts and images of results are shown, other content is named only.

    Args:
        server: URL of the server (streamable HTTP), or the command that starts one which speaks over its standard
            streams, as a list.
        factory: as in `ToolEnvironment`: a class with `reset`, `get_reward` and further tools; None leaves rewards to
            the reward functions.
        options: the others of `ToolEnvironment`.

    Raises:
        ValueError: the package is missing, or a tool of the class has the name of one of the server's.

    Source: https://modelcontextprotocol.io, by the package `mcp`.
    """

    def __init__(self, server: str | list[str], factory: Callable[[], Any] | str | None = None, **options: Any) -> None:
        super().__init__(_Nothing if factory is None else factory, **options)
        require_packages("MCPEnvironment", "mcp", "mcp")
        if not server:
            raise ValueError(f"server={server!r}: give a URL, or a command as a list.")
        self.server = server
        self._end: asyncio.Event | None = None
        self._session: asyncio.Task[None] | None = None

    async def reset(self, row: Mapping[str, Any], *, seed: int) -> list[Message]:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[tuple[Any, list[Any]]] = loop.create_future()
        self._end = asyncio.Event()
        self._session = loop.create_task(self._hold(ready, self._end))
        client, tools = await ready
        for tool in tools:
            if tool.name in self._tools:
                raise ValueError(f"factory: the server has a tool {tool.name!r}, too; rename the method.")
            function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            schema = {"type": "function", "function": function}
            self._add_tool(schema, self._tool(client, tool.name), check_by_schema(tool.input_schema), True)
        return await super().reset(row, seed=seed)

    async def _hold(self, ready: asyncio.Future[tuple[Any, list[Any]]], end: asyncio.Event) -> None:
        """Keeps the session open: what opens one must close it in the same task."""
        from mcp import Client, StdioServerParameters

        server: Any = self.server
        if not isinstance(server, str):
            server = StdioServerParameters(command=server[0], args=list(server[1:]))
        try:
            async with Client(server) as client:
                tools, cursor = [], None
                while True:
                    page = await client.list_tools(cursor=cursor)
                    tools += page.tools
                    cursor = page.next_cursor
                    if cursor is None:
                        break
                ready.set_result((client, tools))
                await end.wait()
        except Exception as error:  # groups of errors too
            if not ready.done():
                ready.set_exception(EnvironmentFailedError(f"MCP server {self.server}: {_said(error)}"))

    def _tool(self, client: Any, name: str) -> Callable[[dict[str, Any]], Awaitable[Any]]:
        async def call(arguments: dict[str, Any]) -> Any:
            from mcp import MCPError

            try:
                result = await client.call_tool(name, arguments)
            except MCPError as error:
                if error.code == INVALID_PARAMS:
                    return self._wrong(name, error.message)
                raise EnvironmentFailedError(f"MCP server {self.server}: {error.message}") from error
            except Exception as error:
                raise EnvironmentFailedError(f"MCP server {self.server}: {_said(error)}") from error
            content = [_block(part) for part in result.content]
            if any(part["type"] != "text" for part in content) and not result.is_error:
                return content
            text = "\n".join(part.get("text", "[an image]") for part in content)
            return self._wrong(name, text) if result.is_error else text

        return call

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            if self._session is not None and self._end is not None:
                self._end.set()
                try:
                    await asyncio.wait([self._session])
                finally:
                    self._session.cancel()  # closing took too long


class _Nothing:
    """An object without tools or rewards."""

    def reset(self, **row: Any) -> None: ...


def _block(part: Any) -> dict[str, Any]:
    """A part of a tool's result as a content block."""
    if part.type == "text":
        return {"type": "text", "text": part.text}
    if part.type == "image":
        return {"type": "image", "image": f"data:{part.mime_type};base64,{part.data}"}
    text = getattr(getattr(part, "resource", None), "text", None)
    return {"type": "text", "text": text if text is not None else f"[{part.type}]"}


def _said(error: BaseException) -> str:
    """The innermost error of groups."""
    while isinstance(inner := getattr(error, "exceptions", None), tuple) and inner:
        error = inner[0]
    return f"{type(error).__name__}: {error}"


class OpenEnvironment(Environment):
    """Plays an environment of an OpenEnv server, over a WebSocket per attempt.

    The policy's reply is the action, and the observation the next user message; a reward and an end are the server's.
    The server's `reset` gets the row's columns and the group's seed, and takes those that it has arguments for. The
    first observation follows the row's prompt. An action that does not fit the server's model is told to the policy.
    Override `action` and `text` for servers that want more than a text.

    Args:
        url: of the server.
        action_field: name of the action's field that gets the reply's text.
        observation_field: name of the observation's field that the policy reads; None shows all of it as JSON.
        timeout: seconds that connecting and each answer may take; longer is a failure of the infrastructure, as are a
            server that is not there, and one that answers with another error.

    Raises:
        ValueError: the package is missing.

    Source: https://github.com/meta-pytorch/OpenEnv, by the package `openenv-core`.
    """

    def __init__(
        self, url: str, action_field: str = "message", observation_field: str | None = None, timeout: float = 60.0
    ) -> None:
        require_packages("OpenEnvironment", "openenv", "openenv")
        above("timeout", timeout, note=" seconds")
        self.action_field = action_field
        self.observation_field = observation_field
        self._client = openenv.make_client(url, timeout)
        self._invalid = 0

    def action(self, reply: Reply) -> dict[str, Any]:
        """The action that a reply stands for, as the server takes it."""
        return {self.action_field: reply.content}

    def text(self, observation: Mapping[str, Any]) -> str:
        """What the policy reads of an observation; "" for nothing."""
        if self.observation_field is None:
            return json.dumps(observation, ensure_ascii=False)
        if self.observation_field not in observation:
            names = ", ".join(observation) or "none"
            raise ValueError(f"observation_field={self.observation_field!r}: the observation's fields are {names}.")
        return str(observation[self.observation_field])

    async def reset(self, row: Mapping[str, Any], *, seed: int) -> list[Message]:
        arguments = {name: value for name, value in row.items() if _is_json(value)}
        if left := sorted(set(row) - set(arguments)):
            rank_zero_warn(f"OpenEnvironment: JSON can't hold the columns {', '.join(left)}, so `reset` goes without.")
        arguments.setdefault("seed", seed % 2**31)  # servers keep seeds in 32 bits
        await self._client.connect()
        result = await self._client.reset(**arguments)
        return first_messages(row, self.text(result.observation) or None)

    async def step(self, reply: Reply) -> Step:
        try:
            result = await self._client.step(self.action(reply))
        except openenv.ServerError as error:
            if error.code != "VALIDATION_ERROR":
                raise
            self._invalid += 1
            wrong = [f"{place(one.get('loc', ()))}: {one.get('msg', '')}" for one in error.errors] or [str(error)]
            return Step([{"role": "user", "content": f"Error: {'. '.join(wrong)}."}])
        reward = float(result.reward or 0.0)
        if result.done:
            return Step(reward=reward, done=True)
        return Step([{"role": "user", "content": self.text(result.observation)}], reward=reward)

    @property
    def metrics(self) -> Mapping[str, float]:
        """Number of actions that did not fit the server's model of one."""
        return {"invalid_actions": float(self._invalid)}

    async def close(self) -> None:
        await self._client.close()


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
