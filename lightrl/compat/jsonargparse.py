"""Private parts of jsonargparse 4.53 that LightRL relies on; see tests/compat/test_jsonargparse.py."""

from __future__ import annotations

from typing import Any, TypeVar

__all__ = ["realized", "start_from_own_defaults"]

T = TypeVar("T")


def realized(value: T) -> T:
    """The object that a lazy default of a constructor stands for; any other object as it is.

    Signatures show defaults such as `lazy_instance(GAE)` so that the command line can print them. A stand-in sets
    itself up when its first method is called, so attributes read before that would be missing.
    """
    if not hasattr(value, "lazy_get_init_args"):
        return value
    return type(value).__mro__[2](**value.lazy_get_init_args().as_dict())  # type: ignore[no-any-return]


def start_from_own_defaults(*classes: type) -> None:
    """An object of one of these classes whose class is named anew on the command line starts from its own defaults.

    Where a class replaces another, jsonargparse hands it the other's arguments wherever the names match: `loss: GSPO`
    would get PPO's `eps_low=0.2` in the place of its 3e-4. It has no public switch for it: its function is wrapped,
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
