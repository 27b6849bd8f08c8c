"""Environments on servers: tools of MCP servers, and OpenEnv environments."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from lightrl.compat import openenv
from lightrl.compat.arguments import require_packages
from lightrl.environments.base import Environment, EnvironmentFailedError, Message, Reply, Step
from lightrl.environments.calling import LateError, Outcome
from lightrl.environments.tool_arguments import place
from lightrl.environments.tools import Tool, ToolEnvironment, first_messages

INVALID_PARAMS = -32602  # JSON-RPC error code for invalid arguments, which the policy caused


class MCPEnvironment(ToolEnvironment):
    """Lets the policy call the tools of an MCP server.

    Each trajectory has its own session. If `server` is a command, each trajectory also has its own server process,
    which ends with the trajectory. Errors reported by tools are shown to the policy. If the server is unreachable,
    dies, or violates the protocol, the trajectory fails. Results may contain text and images; other content is shown as
    its type.

    Args:
        server: URL of the server (streamable HTTP), or command as a list that starts a server on stdin and stdout.
        factory: Class with `reset`, `get_reward`, and additional tools, as in `ToolEnvironment`. Defaults to none;
            rewards then come from reward functions.
        options: Other arguments of `ToolEnvironment`.

    Raises:
        ValueError: The package is not installed.

    Source: https://modelcontextprotocol.io
    """

    def __init__(self, server: str | list[str], factory: Callable[[], Any] | str | None = None, **options: Any) -> None:
        super().__init__(_Nothing if factory is None else factory, **options)
        require_packages("MCPEnvironment", "mcp", "mcp")
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
            function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            schema = {"type": "function", "function": function}
            # The server checks arguments.
            ask = partial(self._ask, client, tool.name)
            self.add_tool(Tool(schema, ask, lambda arguments: (dict(arguments), []), waits=True))
        return await super().reset(row, seed=seed)

    async def _hold(self, ready: asyncio.Future[tuple[Any, list[Any]]], end: asyncio.Event) -> None:
        """Keeps the session open. Must be closed by the same task that opened it."""
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
        except Exception as error:  # including exception groups
            if not ready.done():
                ready.set_exception(EnvironmentFailedError(f"MCP server {self.server}: {_innermost(error)}"))

    async def _ask(self, client: Any, name: str, arguments: dict[str, Any], limit: float | None) -> Outcome:
        from mcp import MCPError

        result, error = await self._code.call(partial(client.call_tool, name, arguments), limit, here=True)
        if isinstance(error, MCPError) and error.code == INVALID_PARAMS:
            return self.wrong(error.message), None
        if error is not None:
            failed = isinstance(error, Exception) and not isinstance(error, LateError)
            return None, EnvironmentFailedError(f"MCP server {self.server}: {_innermost(error)}") if failed else error
        content = [_block(part) for part in result.content]
        if any(part["type"] != "text" for part in content) and not result.is_error:
            return content, None
        text = "\n".join(part.get("text", "[an image]") for part in content)
        return self.wrong(text) if result.is_error else text, None

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            if self._session is not None and self._end is not None:
                self._end.set()
                try:
                    await asyncio.wait([self._session])
                finally:
                    self._session.cancel()  # in case closing timed out


class _Nothing:
    """A tool class without tools and rewards."""

    def reset(self, **row: Any) -> None: ...


def _block(part: Any) -> dict[str, Any]:
    if part.type == "text":
        return {"type": "text", "text": part.text}
    if part.type == "image":
        return {"type": "image", "image": f"data:{part.mime_type};base64,{part.data}"}
    text = getattr(getattr(part, "resource", None), "text", None)
    return {"type": "text", "text": text if text is not None else f"[{part.type}]"}


def _innermost(error: BaseException) -> str:
    """Text of the innermost error of exception groups."""
    while isinstance(inner := getattr(error, "exceptions", None), tuple) and inner:
        error = inner[0]
    return f"{type(error).__name__}: {error}"


class OpenEnvironment(Environment):
    """Runs an environment on an OpenEnv server, with one WebSocket per trajectory.

    The policy's reply is the action in the server's format: the value of the only required field, otherwise a JSON
    object. Observations are user messages; the first one is appended to the prompt. The server determines rewards and
    the end. Its `reset` receives the example's columns and the group's seed if it accepts them. If an action is
    invalid, the policy receives the reason. To change the formats, override `action` and `text`.

    Args:
        url: URL of the server.
        action_field: Field of the action that contains the reply. Defaults to the only required field.
        observation_field: Field of the observation to show to the policy. Defaults to the whole observation as JSON.
        timeout: Time limit for connecting and for each response in seconds. If it expires, or if the server is
            unreachable or returns another error, the trajectory fails.

    Raises:
        ValueError: The package is not installed.

    Source: https://github.com/meta-pytorch/OpenEnv
    """

    def __init__(
        self, url: str, action_field: str | None = None, observation_field: str | None = None, timeout: float = 60.0
    ) -> None:
        require_packages("OpenEnvironment", "openenv", "openenv")
        self.url = url
        self.timeout = timeout
        self.action_field = action_field
        self.observation_field = observation_field
        self._client = openenv.make_client(url, self.timeout)
        self._fields: dict[str, Any] = {}
        self._invalid = 0

    def action(self, reply: Reply) -> dict[str, Any]:
        """Converts a reply to an action in the server's format.

        Raises:
            ValueError: The reply is not a valid action. The message is shown to the policy.
        """
        text = reply.content.strip()
        if self.action_field is None:
            fields = ", ".join(self._fields) or "none"
            try:
                return dict(json.loads(text))
            except (TypeError, ValueError) as error:
                raise ValueError(f"Answer with a JSON object with the fields {fields} ({error})") from None
        field = self._fields.get(self.action_field, {"type": "string"})
        if "string" not in (field.get("type"), *(one.get("type") for one in field.get("anyOf", ()))):
            with suppress(ValueError):  # the server reports invalid values
                return {self.action_field: json.loads(text)}
        return {self.action_field: reply.content}

    def text(self, observation: Mapping[str, Any]) -> str:
        """Converts an observation to text. "" shows nothing."""
        if self.observation_field is None:
            return json.dumps(observation, ensure_ascii=False)
        return str(observation[self.observation_field])

    async def reset(self, row: Mapping[str, Any], *, seed: int) -> list[Message]:
        arguments = dict(row)
        arguments.setdefault("seed", seed % 2**31)  # servers keep seeds in 32 bits
        schema = await openenv.action_schema(self.url, self.timeout)
        self._fields = {name: one for name, one in schema.get("properties", {}).items() if name != "metadata"}
        if self.action_field is None and len(required := schema.get("required", [])) == 1:
            self.action_field = required[0]
        await self._client.connect()
        result = await self._client.reset(**arguments)
        return first_messages(row, self.text(result.observation) or None)

    async def step(self, reply: Reply) -> Step:
        try:
            result = await self._client.step(self.action(reply))
        except ValueError as error:
            return self._told(str(error))
        except openenv.OpenEnvError as error:
            if error.code == "SESSION_ERROR" and "ValueError" in str(error):
                self._invalid += 1  # an action validator raised, which ends the session in OpenEnv 0.10
                return Step(done=True)
            if error.code != "VALIDATION_ERROR":
                raise
            wrong = [f"{place(one.get('loc', ()))}: {one.get('msg', '')}" for one in error.errors] or [str(error)]
            return self._told(". ".join(wrong))
        reward = float(result.reward or 0.0)
        if result.done:
            return Step(reward=reward, done=True)
        return Step([{"role": "user", "content": self.text(result.observation)}], reward=reward)

    def _told(self, error: str) -> Step:
        self._invalid += 1
        return Step([{"role": "user", "content": f"Error: {error}."}])

    @property
    def metrics(self) -> Mapping[str, float]:
        """Number of invalid actions."""
        return {"invalid_actions": float(self._invalid)}

    async def close(self) -> None:
        await self._client.close()
