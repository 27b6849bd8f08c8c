"""Private parts of jsonargparse 4.53 that LightRL relies on; see tests/compat/test_jsonargparse.py."""

from __future__ import annotations

from typing import Any


def start_from_own_defaults(*classes: type) -> None:
    """An object of one of these classes whose class is changed on the command line starts from its own defaults.

    Where a class replaces another, jsonargparse hands it the other's arguments wherever the names match: `loss: GSPO`
    would get PPO's `eps_low=0.2` in place of its 3e-4. It has no public switch for it: its function is wrapped,
    once for all parsers of the process.
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
    """A list or dictionary that stands where a function may is written as it was read.

    Of `Callable[..., Any] | list[...]` jsonargparse tries the first alone, and writes "Unable to serialize instance" in
    the list's place: a saved configuration that cannot be run. Its function is wrapped, once for all parsers of the
    process, to refuse what is no function; the next member of the union is tried then.
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
    """A short name of classes of both LightRL and a dependency is LightRL's, such as `ThroughputMonitor`.

    jsonargparse rejects it, and has no public list of names. Its walk over subclasses is wrapped, once for all parsers.
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
