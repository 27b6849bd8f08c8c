"""Arguments of tool calls are checked against hints and schemas, and the policy reads what is wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import enum
from typing import Any, Literal

import pytest

from lightrl.environments import Reply, ToolCall, ToolEnvironment


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.0


class Tools:
    def reset(self, **row: Any) -> None: ...

    def add(self, a: int, b: int = 0) -> int:
        """Adds.

        Args:
            a: one
            b: two
        """
        return a + b

    async def half(self, x: float) -> float:
        """Halves.

        Args:
            x: number
        """
        return x / 2

    def take(
        self,
        numbers: list[int] = [],  # noqa: B006
        mode: Literal["fast", "slow"] = "fast",
        pair: tuple[int, str] = (0, ""),
        color: Color = Color.RED,
        point: Point | None = None,
        drink: str = "tea",
        points: list[Point] = [],  # noqa: B006
        day: datetime.date | None = None,
    ) -> str:
        """Takes.

        Args:
            numbers: -
            mode: -
            pair: -
            color: -
            point: -
            drink: what to drink (choices: ["tea", "coffee"])
            points: -
            day: -
        """
        given = [numbers, mode, pair, color, point, drink, points, day]
        return repr([value for value, default in zip(given, self.take.__defaults__, strict=True) if value != default])

    async def run(self, function: str, name: str) -> str:
        """Runs.

        Args:
            function: what
            name: whose
        """
        return f"{name} {function}"


def called(name: str, arguments: dict[str, Any]) -> str:
    reply = Reply("", None, [ToolCall(name, arguments, "call00000")])
    step = asyncio.run(ToolEnvironment(Tools).step(reply))
    return str(step.messages[0]["content"])


@pytest.mark.parametrize(
    ("name", "arguments", "place"),
    [
        ("add", {"a": "1", "b": "2"}, "a"),
        ("add", {"a": True}, "a"),
        ("add", {}, "a"),
        ("add", {"a": 1, "c": 2}, "c"),
        ("take", {"numbers": [1, "2"]}, "numbers[1]"),
        ("take", {"color": "green"}, "color"),
        ("take", {"point": {"x": "1"}}, "point.x"),
        ("take", {"drink": "milk"}, "drink"),
        ("take", {"points": [{"x": 1}, {"x": 1, "z": 2}]}, "points[1].z"),
        ("take", {"day": "May"}, "day"),
    ],
)
def test_wrong_arguments_are_told_and_the_tool_is_not_called(name: str, arguments: dict[str, Any], place: str) -> None:
    told = called(name, arguments)
    assert told.startswith(f"Error: {name}: ") and place in told.removeprefix(f"Error: {name}: ")


@pytest.mark.parametrize(
    ("name", "arguments", "result"),
    [
        ("add", {"a": 1, "b": 2}, "3"),
        ("half", {"x": 3}, "1.5"),
        ("take", {"pair": [1, "b"]}, "[(1, 'b')]"),
        ("take", {"color": "blue"}, "[<Color.BLUE: 'blue'>]"),
        ("take", {"point": {"x": 1}}, "[Point(x=1, y=0.0)]"),
        ("take", {"day": "2024-05-01"}, "[datetime.date(2024, 5, 1)]"),
        ("run", {"function": "f", "name": "n"}, "n f"),
    ],
)
def test_right_arguments_reach_the_tool_as_hinted(name: str, arguments: dict[str, Any], result: str) -> None:
    assert called(name, arguments) == result


def test_the_schema_shows_what_is_checked() -> None:
    shown = {tool["function"]["name"]: tool["function"]["parameters"] for tool in ToolEnvironment(Tools).tools}
    assert shown["take"]["properties"]["color"]["enum"] == ["red", "blue"]
    assert shown["take"]["properties"]["day"]["anyOf"][0] == {"type": "string", "format": "date"}
    assert shown["add"]["properties"]["a"] == {"type": "integer", "description": "one"}
