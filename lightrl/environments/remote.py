"""Environments on servers: the tools of an MCP server, and environments of OpenEnv."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lightrl.compat import openenv
from lightrl.compat.arguments import above, require_packages
from lightrl.environments.base import Environment, EnvironmentFailedError, Message, Reply, Step
from lightrl.environments.calling import LateError, Outcome
from lightrl.environments.tool_arguments import check_by_schema, place
from lightrl.environments.tools import Tool, ToolEnvironment, first_messages

INVALID_PARAMS = -32602  # of JSON-RPC: the call does not fit the tool, which is the policy's doing


class MCPEnvironment(ToolEnvironment):
    """Lets the policy call the tools of an MCP server, which the server describes itself.

    Each attempt has a separate session, and a server that is given as a command a separate process, ended with the
    attempt. The policy reads what a tool reports as an error. A server that is absent, dies, or breaks the protocol is
    an infrastructure failure. Texts and images of results are shown; other content is only named.

    Args:
        server: URL of the server (streamable HTTP), or the command, as a list, that starts one which uses its standard
            streams.
        factory: Class with `reset`, `get_reward`, and further tools, as in `ToolEnvironment`. None leaves rewards to
            the reward functions.
        options: Other arguments of `ToolEnvironment`.

    Raises:
        ValueError: The package is missing, or a tool of the class has the name of one of the server's.

    Source: https://modelcontextprotocol.io
    """

    def __init__(self, server: str | list[str], factory: Callable[[], Any] | str | None = None, **options: Any) -> None:
        super().__init__(_Nothing if factory is None else factory, **options)
        require_packages("MCPEnvironment", "mcp", "mcp")
        if not server:
            raise ValueError(f"server={server!r}: is empty. Pass a URL, or a command as a list.")
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
                raise ValueError(f"factory: the server also has a tool {tool.name!r}. Rename the method.")
            function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
            schema = {"type": "function", "function": function}
            self.add_tool(
                Tool(schema, partial(self._ask, client, tool.name), check_by_schema(tool.input_schema), waits=True)
            )
        return await super().reset(row, seed=seed)

    async def _hold(self, ready: asyncio.Future[tuple[Any, list[Any]]], end: asyncio.Event) -> None:
        """Keeps the session open. The task that opens it must close it."""
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
        except Exception as error:  # groups of errors as well
            if not ready.done():
                ready.set_exception(EnvironmentFailedError(f"MCP server {self.server}: {_innermost(error)}"))

    async def _ask(self, client: Any, name: str, arguments: dict[str, Any], limit: float | None) -> Outcome:
        from mcp import MCPError

        result, error = await self._code.call(partial(client.call_tool, name, arguments), limit, here=True)
        if isinstance(error, MCPError) and error.code == INVALID_PARAMS:
            return self.wrong(name, error.message), None
        if error is not None:
            failed = isinstance(error, Exception) and not isinstance(error, LateError)
            return None, EnvironmentFailedError(f"MCP server {self.server}: {_innermost(error)}") if failed else error
        content = [_block(part) for part in result.content]
        if any(part["type"] != "text" for part in content) and not result.is_error:
            return content, None
        text = "\n".join(part.get("text", "[an image]") for part in content)
        return self.wrong(name, text) if result.is_error else text, None

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


def _innermost(error: BaseException) -> str:
    """The innermost error of groups."""
    while isinstance(inner := getattr(error, "exceptions", None), tuple) and inner:
        error = inner[0]
    return f"{type(error).__name__}: {error}"


class OpenEnvironment(Environment):
    """Plays an environment of an OpenEnv server, over one WebSocket per attempt.

    The policy's reply is the action, as the server's model of actions wants it: the value of its only required field,
    otherwise a JSON object. The observation is the next user message. The server decides on rewards and the end. Its
    `reset` gets the row's columns and the group's seed, and takes those that it has arguments for. The first
    observation follows the row's prompt. The policy reads why an action does not fit. Override `action` and `text` for
    anything else.

    Args:
        url: URL of the server.
        action_field: Field of the action that gets the reply. None uses the only required one.
        observation_field: Field of the observation that the policy reads; None shows all of it as JSON.
        timeout: Seconds that connecting and each answer may take. More is an infrastructure failure, as is a server
            that is absent or answers with another error.

    Raises:
        ValueError: The package is missing.

    Source: https://github.com/meta-pytorch/OpenEnv
    """

    def __init__(
        self, url: str, action_field: str | None = None, observation_field: str | None = None, timeout: float = 60.0
    ) -> None:
        require_packages("OpenEnvironment", "openenv", "openenv")
        self.url = url
        self.timeout = above("timeout", timeout)
        self.action_field = action_field
        self.observation_field = observation_field
        self._client = openenv.make_client(url, self.timeout)
        self._fields: dict[str, Any] = {}
        self._invalid = 0

    def action(self, reply: Reply) -> dict[str, Any]:
        """The action for a reply, as the server takes it.

        Raises:
            ValueError: The reply is not an action. The policy reads the message.
        """
        text = reply.content.strip()
        if text.startswith("```") and text.endswith("```"):
            text = text.strip("`").partition("\n")[2].strip()
        if self.action_field is None:
            fields = ", ".join(self._fields) or "none"
            try:
                action = json.loads(text)
            except ValueError as error:
                raise ValueError(f"Answer with a JSON object with the fields {fields} ({error})") from None
            if not isinstance(action, dict):
                raise ValueError(f"Answer with a JSON object with the fields {fields}")
            return action
        field = self._fields.get(self.action_field, {"type": "string"})
        if "string" not in (field.get("type"), *(one.get("type") for one in field.get("anyOf", ()))):
            with suppress(ValueError):  # the server says what it wants
                return {self.action_field: json.loads(text)}
        return {self.action_field: reply.content}

    def text(self, observation: Mapping[str, Any]) -> str:
        """Text of an observation; "" shows nothing."""
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
        except openenv.ServerError as error:
            if error.code == "SESSION_ERROR" and "ValueError" in str(error):
                self._invalid += 1  # a validator of the model raised, which ends the session of a server of 0.10
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
