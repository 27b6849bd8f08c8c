"""Private parts of jsonargparse 4.53; tests/compat/test_jsonargparse.py fails if they change."""

from __future__ import annotations

from typing import Any


def start_from_own_defaults(*classes: type) -> None:
    """Makes objects whose class is changed on the command line start from their own defaults.

    When a class replaces another, jsonargparse passes on the other's arguments with matching names: `loss: GSPO` would
    get PPO's `eps_low=0.2` instead of its default 3e-4. It has no public option for this, so its function is wrapped
    once per process.
    """
    from jsonargparse import Namespace, _typehints

    original: Any = _typehints.discard_init_args_on_class_path_change
    original = getattr(original, "wrapped", original)

    def discard(parser: Any, previous: Any, value: Any) -> None:
        if previous and "init_args" in previous and previous.get("class_path") and value.get("class_path"):
            old, new = (_typehints.import_object(spec["class_path"]) for spec in (previous, value))
            if old is not new and isinstance(old, type) and issubclass(old, classes):
                previous["init_args"] = Namespace()
        original(parser, previous, value)

    discard.wrapped = original  # type: ignore[attr-defined]
    _typehints.discard_init_args_on_class_path_change = discard


def keep_lists() -> None:
    """Makes lists and dictionaries in place of a function serialize as they were read.

    For `Callable[..., Any] | list[...]`, jsonargparse tries only the first type and writes "Unable to serialize
    instance" instead of the list, so the saved config can't be run. This wraps its function once per process to reject
    anything but functions; jsonargparse then tries the next type of the union.
    """
    from jsonargparse import _typehints

    original: Any = _typehints.serialize_as_import_path
    original = getattr(original, "wrapped", original)

    def serialize(value: Any) -> Any:
        if isinstance(value, list | dict):
            raise ValueError(f"{type(value).__name__} has no import path")
        return original(value)

    serialize.wrapped = original  # type: ignore[attr-defined]
    _typehints.serialize_as_import_path = serialize


def prefer_own_names() -> None:
    """Resolves short class names that both LightRL and a dependency use, such as `ThroughputMonitor`, to LightRL's.

    jsonargparse rejects ambiguous names and has no public list of names. This wraps its search for subclasses once per
    process.
    """
    from jsonargparse import _typehints

    original: Any = _typehints.get_all_subclass_paths
    original = getattr(original, "wrapped", original)

    def paths(*args: Any, **kwargs: Any) -> list[str]:
        found: list[str] = original(*args, **kwargs)
        own = {path.rpartition(".")[2] for path in found if path.startswith("lightrl.")}
        return [path for path in found if path.startswith("lightrl.") or path.rpartition(".")[2] not in own]

    paths.wrapped = original  # type: ignore[attr-defined]
    _typehints.get_all_subclass_paths = paths


def copy_tried_dictionaries() -> None:
    """Copies dictionaries before jsonargparse tries the next type of a union, such as `evaluation.prompts` by name.

    jsonargparse copies only namespaces. In a dictionary of dataclasses, a failed try turns empty dictionaries into
    namespaces, which the right type then rejects. This wraps its function once per process.
    """
    from jsonargparse import Namespace, _typehints

    original: Any = _typehints.pristine_value
    original = getattr(original, "wrapped", original)

    def copied(value: Any) -> Any:
        return Namespace(value=value).clone().value if isinstance(value, dict) else original(value)

    copied.wrapped = original  # type: ignore[attr-defined]
    _typehints.pristine_value = copied
