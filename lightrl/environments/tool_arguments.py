"""Schemas of tools, and validation of a call's arguments with error messages for the policy."""

from __future__ import annotations

import inspect
import json
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias, get_type_hints

from lightrl.compat.arguments import require_packages

Check: TypeAlias = Callable[[Mapping[str, Any]], tuple[dict[str, Any], list[str]]]
"""Function from a call's arguments to the tool's arguments and a list of errors."""

_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def tool_schema(name: str, tool: Callable[..., Any]) -> dict[str, Any]:
    """JSON schema of a Python function, from its type hints and its Google-style docstring.

    Raises:
        ValueError: A type hint or a description is missing.
    """
    from transformers.utils import get_json_schema

    try:
        schema = dict(get_json_schema(tool))
    except Exception as error:
        raise ValueError(
            f"factory: the tool {name!r} has no valid schema: {error}. Add type hints and a Google-style docstring for "
            "all arguments. If it is not a tool, prefix its name with an underscore."
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
        elif (rich := _rich_schema(hints[parameter.name])) is not None:
            kept = {key: value for key, value in shown.items() if key in ("description", "enum")}
            parameters["properties"][parameter.name] = rich | kept
    return schema


def check_by_hints(tool: Callable[..., Any], schema: Mapping[str, Any]) -> Check:
    """Validates arguments with a Python function's type hints.

    Values are validated as JSON in pydantic's strict mode: "1" is not an integer, a list is a valid tuple, and texts
    and objects are converted to enum members and dataclasses. Dataclasses and typed dictionaries allow no additional
    fields. Hints that pydantic doesn't support are not validated.

    Args:
        tool: Function with a type hint for each argument.
        schema: Schema of the function. Its `enum`s may come from choices in the docstring.
    """
    import typing_extensions as extended
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    hints = get_type_hints(tool, include_extras=True)
    shown = schema["function"]["parameters"]["properties"]
    fields: dict[str, Any] = {}
    more: Any = None
    for name, parameter in inspect.signature(tool).parameters.items():
        hint = _known(hints.get(name, Any))
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            more = TypeAdapter(list[dict[str, hint]])  # type: ignore[valid-type]
        elif parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
            choices = shown.get(name, {}).get("enum")
            if choices and hint in (str, int, float):
                hint = Literal[tuple(choices)]
            hint = typing.Optional[hint] if parameter.default is None else hint  # noqa: UP045
            required = parameter.default is inspect.Parameter.empty
            fields[name] = extended.Required[hint] if required else extended.NotRequired[hint]
    # A list, because only a type without its own configuration passes one on to nested dataclasses.
    whole: Any = types.GenericAlias(list, (extended.TypedDict("Arguments", fields),))  # type: ignore[operator]
    named: Any = TypeAdapter(whole, config=ConfigDict(extra="forbid"))

    def read(adapter: Any, arguments: list[Any]) -> tuple[dict[str, Any], list[str]]:
        try:
            return adapter.validate_json(json.dumps(arguments, default=str), strict=True)[0], []
        except ValidationError as error:
            return {}, [
                _wrong(one["loc"][1:], one["msg"], one["type"], one["input"], fields)
                for one in error.errors(include_url=False, include_context=False)
            ]

    def check(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        rest = {name: value for name, value in arguments.items() if more is not None and name not in fields}
        given, wrong = read(named, [{name: value for name, value in arguments.items() if name not in rest}])
        others, also = read(more, [rest]) if rest else ({}, [])
        return {**given, **others}, wrong + also

    return check


def _wrong(path: Any, message: str, kind: str, value: Any, known: Iterable[str]) -> str:
    if kind == "missing":
        return f"{place(path)}: {message} (missing)."
    if kind == "extra_forbidden" and len(path) == 1:
        return f"{place(path)}: Unexpected argument. There are: {', '.join(known) or 'none'}."
    return f"{place(path)}: {message}, not {_short(value)}."


def check_by_schema(schema: Mapping[str, Any]) -> Check:
    """Validates arguments with the JSON schema of a server's tool.

    Arguments that are not in the schema are errors, unless the schema allows additional ones. An invalid schema is
    ignored, because the server also validates.

    Args:
        schema: JSON schema of the arguments.
    """
    require_packages("a tool with a JSON schema", "mcp", "jsonschema", "referencing")
    from jsonschema.validators import Draft202012Validator, validator_for  # type: ignore[import-untyped]
    from referencing import Registry

    about_others = {
        *("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"),
        *("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas"),
    }
    if "properties" in schema and about_others.isdisjoint(schema):
        schema = {**schema, "additionalProperties": False}
    cls = validator_for(schema, default=Draft202012Validator)
    validator = cls(schema, registry=Registry())  # doesn't fetch remote references
    names = schema.get("properties") or {}

    def check(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        try:
            errors = list(validator.iter_errors(arguments))
        except Exception:  # such as an unknown type or reference
            return dict(arguments), []
        wrong = []
        for error in errors:
            path, value = [*error.absolute_path], error.instance
            if error.validator == "required":
                missing = [name for name in error.validator_value if name not in value]
                wrong += [_wrong([*path, name], "Field required", "missing", None, names) for name in missing]
            elif error.validator == "additionalProperties" and not path and error.validator_value is False:
                wrong += [_wrong([name], "", "extra_forbidden", None, names) for name in value if name not in names]
            elif error.validator == "type":
                kinds = error.validator_value
                wanted = kinds if isinstance(kinds, str) else " or ".join(kinds)
                wrong.append(f"{place(path)}: Input should be a valid {wanted}, not {_short(value)}.")
            else:
                wrong.append(f"{place(path)}: {error.message}.")
        return dict(arguments), list(dict.fromkeys(wrong))

    return check


def _rich_schema(hint: Any) -> dict[str, Any] | None:
    """JSON schema of a hint with enums, dates, or classes, for which transformers returns only "object"."""
    from pydantic import TypeAdapter

    try:
        schema = TypeAdapter(_readable(hint)).json_schema()
    except Exception:  # such as PIL images and custom classes
        return None
    text = json.dumps(schema)
    if '"properties"' not in text and '"format"' not in text and ('"enum"' not in text or '"title"' not in text):
        return None  # only built-in types and literals
    return schema


def _known(hint: Any) -> Any:
    """The hint if pydantic supports it, otherwise Any."""
    from pydantic import TypeAdapter

    try:
        hint = _readable(hint)
        TypeAdapter(hint)
    except Exception:  # such as a PIL image
        return Any
    return hint


def _readable(hint: Any) -> Any:
    """Replaces `typing.TypedDict` with that of `typing_extensions`, which pydantic requires before Python 3.12."""
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


def place(path: Iterable[Any]) -> str:
    """Formats a path, such as `points[0].x`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".") or "arguments"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."
