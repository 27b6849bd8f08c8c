"""One line for what jsonargparse 4.53 says in many; it offers its findings only as text.

Where the text is of another form, it is shown as it is, so a change in jsonargparse makes messages longer, not wrong.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

__all__ = ["parameters", "short_message", "wrong_arguments"]

BOILERPLATE = re.compile(
    r"^(Subtypes: |Errors:$|Given value|Does not validate against any|Not a valid subclass of |Subclass types"
    r"|a class path \(str\)|a dict with|Expected a <class 'NoneType'>$|Expected a path but|$)"
)
WHERE = re.compile(r'^Parser key "([^"]+)":?')
NO_SUBCLASS = re.compile(r"^Import path (?:(\S+) )?does not correspond to a subclass of (\w+)")
CALLABLE = re.compile(r"^Type typing\.Callable.* expects a function or a callable class: ")
OF_CALLABLE = re.compile(r"^Option '([^']+)' is not accepted\. Got value: Namespace\(class_path='([^']+)'")
WHOLE = re.compile(r"\. Got value: Namespace\(class_path=.*")
PLAIN = {"float", "int", "bool"}
"""Types that say enough, where an object named by an import path would do as well."""
UNKNOWN = re.compile(r"^unrecognized arguments: --([^\s=]+)")
SUBCLASS = re.compile(r"^Not a valid subclass of (\w+)(?:\. Got value: (.*))?")
CLASS = re.compile(r"^Problem with given class_path '([^']+)'")
LINES = 10
"""A text of more is cut to its first findings."""
FEW = 12
"""So many names are listed where none is like the misspelt one."""
TYPE = re.compile(r"^Expected an? (.+?)\.?(?: Got value: (.*))?$")
ABSTRACT = re.compile(r"^Expected an instantiatable class, but (\S+) is abstract")


def short_message(text: str, known: Iterable[str] = ()) -> str:
    """The argument, the value and what was expected, in one line.

    Args:
        text: of a `jsonargparse.ArgumentError`, or of the `ValueError` that a class's constructor ends in.
        known: names that a misspelt argument or class is compared with.
    """
    where: list[str] = []
    classes: list[str] = []
    types: list[str] = []
    given: str | None = None
    base: str | None = None
    findings: list[str] = []
    for line in (re.sub(r"^(?:- )+", "", line.strip()) for line in text.splitlines()):
        if found := WHERE.match(line):
            if not findings:
                where.append(found[1])
            line = line[found.end() :].strip()
        if (bare := CALLABLE.sub("", line)) != line:
            line = bare
            if found := WHERE.match(line):  # an argument of what the callable is
                where.append(found[1])
                line = line[found.end() :].strip()
        if line.startswith(("Given value: ", "Expected a")):
            line = WHOLE.sub("", line)
        if (found := OF_CALLABLE.match(line)) and found[2].startswith("typing."):
            continue  # what the callable returns, taken for a class: an alternative that nobody meant
        if found := CLASS.match(line):
            if not findings:
                classes.append(found[1])
        elif line.startswith("Given value: ") and given is None:
            given = line.removeprefix("Given value: ")
        elif found := SUBCLASS.match(line):
            base, given = base or found[1], given if found[2] is None else given or found[2]
        elif BOILERPLATE.match(line):
            if "NoneType" in line and types and given is None:
                types.append("null")
        elif found := ABSTRACT.match(line):
            findings.append(f"'{found[1]}' is abstract: name a class that is derived from it")
        elif found := TYPE.match(line):
            types.append(re.sub(r"<class '(?:\w+\.)*(\w+)'>|typing\.", lambda m: m[1] or "", found[1]))
            given = found[2] if found[2] is not None and given is None else given
        else:
            findings.append(line)
    place = f"{'.'.join(where)}: " if where else ""
    if found := UNKNOWN.match(text.strip()):
        return f"{text.strip()}.{_suggestion(found[1], known)}"
    if not findings:
        if where and base and not types:
            return f"{'.'.join(where)}={_cut(given)}: expected class_path, the name of a {base}, and its init_args."
        if not (where and types):
            return text
        names = [name for name in types if not name.startswith("dot import path")]
        if names != types and not PLAIN.intersection(names):
            name = next(name for name in types if name not in names).rpartition(": ")[2]
            return f"{place}'{name}' is no known class and no import path.{_suggestion(name, known)}"
        return f"{'.'.join(where)}={given and _cut(given)!r}: expected {' or '.join(dict.fromkeys(names))}."
    # An alternative whose class has other arguments is not the one that was meant.
    findings = [finding for finding in findings if " got an unexpected keyword argument " not in finding] or findings
    first = findings[0]
    if found := OF_CALLABLE.match(first):
        first, classes = f"Option '{found[1]}' is not accepted", [found[2]]
    if (found := UNKNOWN.match(first)) and classes:  # on the command line, below a class
        group, _, name = found[1].rpartition(".")
        inner = parameters(classes[-1:], group) if group else []
        first = f"Option '{name if inner else found[1].split('.')[0]}' is not accepted"
        if inner:
            return f"{place}{first} by {group}.{_suggestion(name, inner)}"
    if found := re.match(r"Option '([^']+)' is not accepted", first):
        names = parameters(classes[-1:]) or list(known)
        return f"{place}{first.rstrip('.')} by {_short(classes)}.{_suggestion(found[1], names)}"
    if found := re.match(r"Group '([^']+)' does not accept option '([^']+)'", first):
        return f"{place}{first.rstrip('.')}.{_suggestion(found[2], parameters(classes[-1:], found[1]))}"
    if found := re.match(r"Subcommand '\w+' does not accept option '([^']+)'", first):
        return f"'{found[1]}' is not accepted.{_suggestion(found[1], known)}"
    others = [found for found in map(NO_SUBCLASS.match, findings) if found is not None]
    if len(others) == len(findings) > 1 and others[0][1]:
        return f"{place}'{others[0][1]}' is no {' or '.join(dict.fromkeys(found[2] for found in others))}."
    short = len(findings) < 4 or text.count("\n") > LINES
    return " ".join([place + first, *findings[1:3]]) if short else text


def _cut(value: str | None) -> str:
    return "" if value is None else value if len(value) <= 200 else f"{value[:200]}..."


def _short(classes: list[str]) -> str:
    return classes[-1].rpartition(".")[2] if classes else "it"


def _suggestion(name: str, names: Iterable[str]) -> str:
    others = [each for each in names if each != name]
    close = difflib.get_close_matches(name, others, n=1, cutoff=0.6)
    if not close and 0 < len(others) <= FEW:
        return f" There are: {', '.join(others)}."
    return f" Did you mean '{close[0]}'?" if close else ""


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return None


def parameters(classes: Iterable[str], group: str | None = None) -> list[str]:
    """Names of the constructors' arguments, those of parent classes included; of the dataclass argument `group`."""
    names: list[str] = []
    for path in classes:
        hints = _hints(_imported(path))
        if group is not None:
            hints = {k: v for each in _members(hints.get(group)) for k, v in _hints(each).items()}
        names += hints
    return names


def _hints(cls: Any) -> dict[str, Any]:
    """Argument -> type, of a constructor and, where it passes keyword arguments on, its parents'."""
    hints: dict[str, Any] = {}
    for each in inspect.getmro(cls) if inspect.isclass(cls) else ():
        own = each.__dict__.get("__init__")
        if not inspect.isfunction(own):
            continue
        try:
            types = typing.get_type_hints(own)
        except (NameError, TypeError):  # names that are imported for types only
            types = {}
        given = inspect.signature(own).parameters.values()
        hints = {p.name: types.get(p.name) for p in given if p.name != "self" and p.kind not in (2, 4)} | hints
        if not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in given):
            break
    return hints


def _members(hint: Any) -> list[Any]:
    return [hint] if inspect.isclass(hint) else [each for each in typing.get_args(hint) if inspect.isclass(each)]


def wrong_arguments(value: Any, hint: Any = None, path: str = "") -> Iterator[tuple[str, str]]:
    """Arguments of classes that jsonargparse lets through and that are refused later, without their name.

    That is null for a number, text, true/false, a list or a part of ours, anything but a mapping for a record of
    ours, and rows that come from nowhere: (path, what is wrong).

    Args:
        value: a parsed configuration as plain data. hint: the type of what it is for. path: where it stands.
    """
    if isinstance(value, list):
        for number, each in enumerate(value):
            yield from wrong_arguments(each, None, f"{path}.{number}")
    if not isinstance(value, Mapping):
        return
    if isinstance(value.get("class_path"), str):
        owner = _imported(value["class_path"])
        arguments = value.get("init_args") or {}
        path = path if _has_rows(owner) else f"{path}.init_args"  # a source is mostly given without its class
    else:
        fitting = (each for each in _members(hint) if dataclasses.is_dataclass(each))
        owner = next((each for each in fitting if value.keys() <= _hints(each).keys()), None)
        arguments = value
    if _has_rows(owner) and {"path", "rows"} <= arguments.keys():
        if (arguments["path"] is None) == (arguments["rows"] is None):
            yield path, f"{_cut(str({k: arguments[k] for k in ('path', 'rows')}))}: give exactly one of the two"
        elif arguments["rows"] == []:
            yield path, "{'rows': []}: it has no rows"
    hints, ours = _hints(owner), getattr(owner, "__module__", "").startswith("lightrl.")
    for name, inner in arguments.items():
        where = f"{path}.{name}" if path else str(name)
        hint = hints.get(name)
        kind = typing.get_origin(hint) if ours and typing.get_origin(hint) in (dict, list, tuple) else hint
        own = inspect.isclass(hint) and hint.__module__.startswith("lightrl.")
        records: list[Any] = [each for each in _members(hint) if dataclasses.is_dataclass(each)]
        single = bool(records) and typing.get_origin(hint) is not list
        alone = single and {*records, type(None)} >= {*_members(hint), *typing.get_args(hint)}
        if inner is None and (own or kind in (int, float, bool, str, dict, list, tuple)):
            yield where, f"null: expected {kind.__name__}; leave it out for the default"
        elif inner is not None and not isinstance(inner, Mapping) and alone:
            yield where, f"{_cut(str(inner))}: expected {records[0].__name__}, a mapping of its arguments"
        elif inner == [] and any(map(_has_rows, records)):
            yield where, "[]: it has no rows"
        else:
            yield from wrong_arguments(inner, hint, where)


def _has_rows(cls: Any) -> bool:
    return dataclasses.is_dataclass(cls) and {"path", "rows"} <= {field.name for field in dataclasses.fields(cls)}
