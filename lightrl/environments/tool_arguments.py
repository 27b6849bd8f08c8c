"""Schemas of tools, and validation of a call's arguments with error messages for the policy."""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias, get_type_hints

Check: TypeAlias = Callable[[Mapping[str, Any]], tuple[dict[str, Any], list[str]]]
"""Function from a call's arguments to the tool's arguments and a list of errors."""


def tool_schema(tool: Callable[..., Any]) -> dict[str, Any]:
    """JSON schema of a Python function, from its type hints and its Google-style docstring."""
    from transformers.utils import get_json_schema

    schema = dict(get_json_schema(tool))
    parameters = schema["function"]["parameters"]
    hints = get_type_hints(tool, include_extras=True)
    for parameter, shown in parameters["properties"].items():
        if (rich := _rich_schema(hints[parameter])) is not None:
            kept = {key: value for key, value in shown.items() if key in ("description", "enum")}
            parameters["properties"][parameter] = rich | kept
    return schema


def check_by_hints(tool: Callable[..., Any], schema: Mapping[str, Any]) -> Check:
    """Validates arguments with a Python function's type hints, and choices in its docstring (in `schema`).

    Values are validated as JSON in pydantic's strict mode: "1" is not an integer, a list is a valid tuple, and texts
    and objects are converted to enum members and dataclasses. Dataclasses and typed dictionaries allow no additional
    fields.
    """
    import typing_extensions as extended
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    hints = get_type_hints(tool, include_extras=True)
    shown = schema["function"]["parameters"]["properties"]
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(tool).parameters.items():
        hint = hints.get(name, Any)
        choices = shown.get(name, {}).get("enum")
        if choices and hint in (str, int, float):
            hint = Literal[tuple(choices)]
        hint = typing.Optional[hint] if parameter.default is None else hint  # noqa: UP045
        required = parameter.default is inspect.Parameter.empty
        fields[name] = extended.Required[hint] if required else extended.NotRequired[hint]
    # A list, because only a type without its own configuration passes one on to nested dataclasses.
    whole: Any = types.GenericAlias(list, (extended.TypedDict("Arguments", fields),))  # type: ignore[operator]
    adapter: Any = TypeAdapter(whole, config=ConfigDict(extra="forbid"))

    def check(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        try:
            return adapter.validate_json(json.dumps([arguments], default=str), strict=True)[0], []
        except ValidationError as error:
            return {}, [
                _wrong(one["loc"][1:], one["msg"], one["type"], one["input"], fields)
                for one in error.errors(include_url=False, include_context=False)
            ]

    return check


def _wrong(path: Any, message: str, kind: str, value: Any, known: Iterable[str]) -> str:
    if kind == "missing":
        return f"{place(path)}: {message} (missing)."
    if kind == "extra_forbidden" and len(path) == 1:
        return f"{place(path)}: Unexpected argument. There are: {', '.join(known) or 'none'}."
    text = json.dumps(value, ensure_ascii=False, default=str)
    return f"{place(path)}: {message}, not {text if len(text) <= 80 else f'{text[:77]}...'}."


def _rich_schema(hint: Any) -> dict[str, Any] | None:
    """JSON schema of a hint with enums, dates, or classes, for which transformers returns only "object"."""
    from pydantic import TypeAdapter

    schema = TypeAdapter(hint).json_schema()
    text = json.dumps(schema)
    if '"properties"' not in text and '"format"' not in text and ('"enum"' not in text or '"title"' not in text):
        return None  # only built-in types and literals
    return schema


def place(path: Iterable[Any]) -> str:
    """Formats a path, such as `points[0].x`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".") or "arguments"
