"""Private parts of jsonargparse 4.53; tests/compat/test_jsonargparse.py fails if they change."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


def _replace(name: str, function: Callable[..., Any]) -> None:
    """Calls `function(original, *args)` in place of a private function, once per process."""
    from jsonargparse import _typehints

    original = getattr(_typehints, name)
    original = getattr(original, "wrapped", original)
    wrapper: Any = partial(function, original)
    wrapper.wrapped = original
    setattr(_typehints, name, wrapper)


def start_from_own_defaults(*classes: type) -> None:
    """Makes objects whose class is changed on the command line start from their own defaults.

    When a class replaces another, jsonargparse passes on the other's arguments with matching names: `loss: GSPO` would
    get PPO's `eps_low=0.2` instead of its default 3e-4. It has no public option for this.
    """
    from jsonargparse import Namespace
    from jsonargparse._typehints import import_object

    def discard(original: Any, parser: Any, previous: Any, value: Any) -> None:
        if previous and "init_args" in previous and previous.get("class_path") and value.get("class_path"):
            old, new = (import_object(spec["class_path"]) for spec in (previous, value))
            if old is not new and isinstance(old, type) and issubclass(old, classes):
                previous["init_args"] = Namespace()
        original(parser, previous, value)

    _replace("discard_init_args_on_class_path_change", discard)


def keep_lists() -> None:
    """Makes lists and dictionaries in place of a function serialize as they were read.

    For `Callable[..., Any] | list[...]`, jsonargparse tries only the first type and writes "Unable to serialize
    instance" instead of the list, so the saved config can't be run. Its function now rejects anything but functions, so
    that jsonargparse tries the next type of the union.
    """

    def serialize(original: Any, value: Any) -> Any:
        if isinstance(value, list | dict):
            raise ValueError(f"{type(value).__name__} has no import path")
        return original(value)

    _replace("serialize_as_import_path", serialize)


def prefer_own_names() -> None:
    """Resolves short class names that both LightRL and a dependency use, such as `ThroughputMonitor`, to LightRL's.

    jsonargparse rejects ambiguous names and has no public list of names.
    """

    def paths(original: Any, *args: Any, **kwargs: Any) -> list[str]:
        found: list[str] = original(*args, **kwargs)
        own = {path.rpartition(".")[2] for path in found if path.startswith("lightrl.")}
        return [path for path in found if path.startswith("lightrl.") or path.rpartition(".")[2] not in own]

    _replace("get_all_subclass_paths", paths)


def copy_tried_dictionaries() -> None:
    """Copies dictionaries before jsonargparse tries the next type of a union, such as `evaluation.prompts` by name.

    jsonargparse copies only namespaces. In a dictionary of dataclasses, a failed try turns empty dictionaries into
    namespaces, which the right type then rejects.
    """
    from jsonargparse import Namespace

    def copied(original: Any, value: Any) -> Any:
        return Namespace(value=value).clone().value if isinstance(value, dict) else original(value)

    _replace("pristine_value", copied)
