"""Schemas of tools, and the check of the arguments that a policy wrote against them."""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, get_type_hints

from lightrl.compat.arguments import require_packages

Check: TypeAlias = Callable[[Mapping[str, Any]], tuple[dict[str, Any], list[str]]]
"""From a call's arguments to those that the tool takes, and what is wrong with them in words for the policy."""

_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_ELSEWHERE = {
    *("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"),
    *("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"),
}
"""Keys of a schema that say something about arguments that are not among its properties."""


def tool_schema(name: str, tool: Callable[..., Any]) -> dict[str, Any]:
    """JSON schema of a Python function, from its type hints and its Google docstring.

    Raises:
        ValueError: A hint or a description is missing.
    """
    from transformers.utils import get_json_schema

    try:
        schema = dict(get_json_schema(tool))
    except Exception as error:
        raise ValueError(
            f"factory: the tool {name!r} needs a type hint for each argument and a Google docstring that describes "
            f"them, or a name that begins with an underscore if it is no tool: {error}"
        ) from error
    parameters = schema["function"]["parameters"]
    hints = get_type_hints(tool, include_extras=True)
    for parameter in inspect.signature(tool).parameters.values():
        shown = parameters["properties"].get(parameter.name, {})
        if parameter.kind in _VARIABLE:
            parameters["properties"].pop(parameter.name, None)
            if parameter.name in parameters.get("required", ()):
                parameters["required"].remove(parameter.name)
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                parameters["additionalProperties"] = shown or True
        elif (told := _told(hints[parameter.name])) is not None:
            kept = {key: value for key, value in shown.items() if key in ("description", "enum")}
            parameters["properties"][parameter.name] = told | kept
    return schema


def check_by_hints(tool: Callable[..., Any], schema: Mapping[str, Any]) -> Check:
    """The check of a Python function's arguments by its type hints.

    Values are read as JSON in pydantic's strict mode: "1" is not an integer, a list fits a tuple, and a text or an
    object becomes the enum member or the dataclass of the hint. Dataclasses and typed dictionaries take no other
    fields, as in Python. Hints that pydantic does not know are not checked.

    Args:
        tool: The function, each argument with a hint.
        schema: Its schema, whose `enum`s are checked too (the docstring may have choices).
    """
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    forbid = ConfigDict(extra="forbid")
    hints = get_type_hints(tool, include_extras=True)
    parameters = inspect.signature(tool).parameters
    more = next((p for p in parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD), None)
    named = {name: p for name, p in parameters.items() if p.kind not in _VARIABLE}
    shown = schema["function"]["parameters"]["properties"]
    adapters: dict[str, Any] = {}
    for name in [*named, *([more.name] if more is not None else [])]:
        try:
            hint: Any = types.GenericAlias(list, (_readable(hints.get(name, Any)),))
            adapters[name] = TypeAdapter(hint, config=forbid)  # a list, because classes take no configuration
        except Exception:  # such as a PIL image, or any class of the user's
            adapters[name] = TypeAdapter(list[Any])

    def check(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        read: dict[str, Any] = {}
        wrong = _missing(name for name, p in named.items() if p.default is p.empty and name not in arguments)
        for name, value in arguments.items():
            parameter = named.get(name, more)
            if parameter is None:
                wrong.append(_unknown(name, named))
            elif value is None and parameter.default is None:
                read[name] = None
            elif value is not None and value not in (choices := shown.get(name, {}).get("enum", [value])):
                wrong.append(f"{name}: Input should be one of {json.dumps(choices)}, not {_written(value)}.")
            else:
                try:
                    text = json.dumps([value], default=str)
                    (read[name],) = adapters[parameter.name].validate_json(text, strict=True)
                except ValidationError as error:
                    wrong += [
                        f"{place([name, *one['loc'][1:]])}: {one['msg']}, not {_written(one['input'])}."
                        for one in error.errors(include_url=False, include_context=False)
                    ]
        return read, wrong

    return check


def check_by_schema(schema: Mapping[str, Any]) -> Check:
    """The check of arguments by a JSON schema, as servers describe their tools with.

    An argument that the schema does not mention is wrong, unless the schema says that others are allowed.
    A schema that cannot be used checks nothing: the server does.

    Args:
        schema: Schema of the object that the arguments make.
    """
    require_packages("a tool with a JSON schema", "mcp", "jsonschema", "referencing")
    from jsonschema.validators import Draft202012Validator, validator_for  # type: ignore[import-untyped]
    from referencing import Registry

    validator = validator_for(schema, default=Draft202012Validator)(
        schema, registry=Registry()
    )  # which fetches nothing
    properties = schema.get("properties") or {}
    closed = _ELSEWHERE.isdisjoint(schema) and "properties" in schema

    def check(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        try:
            errors = list(validator.iter_errors(arguments))
        except Exception:  # such as an unknown type or reference in it
            return dict(arguments), []
        wrong = [_unknown(name, properties) for name in arguments if closed and name not in properties]
        for error in errors:
            path = [*error.absolute_path]
            if error.validator == "required":
                wrong += _missing(place([*path, name]) for name in error.validator_value if name not in error.instance)
            elif error.validator == "type":
                kinds = error.validator_value
                wanted = kinds if isinstance(kinds, str) else " or ".join(kinds)
                wrong.append(f"{place(path)}: Input should be a valid {wanted}, not {_written(error.instance)}.")
            else:
                wrong.append(f"{place(path)}: {error.message}." if path else f"{error.message}.")
        return dict(arguments), list(dict.fromkeys(wrong))

    return check


def _told(hint: Any) -> dict[str, Any] | None:
    """JSON schema of a hint with enums, dates, or classes with fields, which transformers shows as bare objects."""
    from pydantic import TypeAdapter

    try:
        schema = TypeAdapter(_readable(hint)).json_schema()
    except Exception:  # such as a PIL image, or any class of the user's
        return None
    text = json.dumps(schema)
    if '"properties"' not in text and '"format"' not in text and ('"enum"' not in text or '"title"' not in text):
        return None  # of builtins and literals alone
    return schema


def _readable(hint: Any) -> Any:
    """The hint with each `typing.TypedDict` as one of `typing_extensions`: pydantic needs it before Python 3.12."""
    import typing_extensions as extended

    if typing.is_typeddict(hint):
        fields = {
            name: (extended.Required if name in hint.__required_keys__ else extended.NotRequired)[_readable(inner)]
            for name, inner in get_type_hints(hint).items()
        }
        return extended.TypedDict(hint.__name__, fields)  # type: ignore[operator]
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (list, tuple, dict, set):
        return origin[tuple(map(_readable, inner))]
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(map(_readable, inner))]  # noqa: UP007 - of a tuple
    return hint


def _missing(names: Iterable[str]) -> list[str]:
    return [f"{name}: Field required (missing)." for name in names]


def _unknown(name: str, known: Iterable[str]) -> str:
    return f"{name}: Unexpected argument. There are: {', '.join(known) or 'none'}."


def place(path: Iterable[Any]) -> str:
    """Where something is, such as `points[0].x`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".") or "arguments"


def _written(value: Any) -> str:
    """A value as JSON, cut where it is long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."
