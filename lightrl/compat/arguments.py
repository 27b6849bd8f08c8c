"""Checks of arguments that would otherwise train wrongly in silence; import paths; optional packages."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

DISTRIBUTION = "lightrl-llm"
"""Name of the package on an index. The name `lightrl` there belongs to another project."""
MAX_REWARD = 1e16
"""Largest size of a reward: the squares of a batch of them, which a standard deviation sums, still fit in float32."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

T = TypeVar("T")


def at_least(name: str, value: T, low: float, note: str = "", *, or_none: str | None = None) -> T:
    """The value if it is `low` or more, and finite.

    Args:
        name: The argument in the message, such as `CompletionLogger.num_samples`.
        value: A number.
        low: Smallest allowed value.
        note: End of the message.
        or_none: What None is for, such as "for no limit". None is rejected without it.

    Raises:
        ValueError: Names the argument, its value, and what is allowed.
    """
    return _checked(name, value, lambda x: x >= low, f"at least {low:g}{note}", or_none)


def above(name: str, value: T, low: float = 0, note: str = "", *, or_none: str | None = None) -> T:
    """The value if it is above `low`; otherwise as `at_least`."""
    return _checked(name, value, lambda x: x > low, f"above {low:g}{note}", or_none)


def fraction(name: str, value: T, bounds: str = "[0, 1]", note: str = "", *, or_none: str | None = None) -> T:
    """The value if it is from 0 to 1, with or without the ends as the brackets in `bounds`; otherwise as `at_least`."""

    def inside(x: float) -> bool:
        return (x >= 0 if bounds[0] == "[" else x > 0) and (x <= 1 if bounds[-1] == "]" else x < 1)

    return _checked(name, value, inside, f"in {bounds}{note}", or_none)


def one_of(name: str, value: T, *choices: T) -> T:
    """The value if it is one of the choices; otherwise as `at_least`."""
    return _checked(name, value, lambda x: x in choices, f"one of {', '.join(map(repr, choices))}", None)


def _checked(name: str, value: T, ok: Callable[[Any], bool], allowed: str, or_none: str | None) -> T:
    if value is None and or_none is not None:
        return value
    try:
        fine = ok(value) and not (isinstance(value, float) and math.isinf(value))
    except TypeError:  # of a type that cannot be compared
        fine = False
    if not fine:
        raise ValueError(f"{name}={value!r}: must be {allowed}{'' if or_none is None else f', or None {or_none}'}.")
    return value


def install_command(extra: str) -> str:
    """The command that installs an extra, such as `vllm`."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def require_packages(owner: str, extra: str, *packages: str) -> None:
    """Raises a ValueError with the command to run if one of the packages, by import name, is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{owner} needs {' and '.join(missing)}: {install_command(extra)}.")


def bearer_token(name: str, token: str | None) -> str | None:
    """The token, None if it is empty. Raises a ValueError that does not show it if an HTTP header can't hold it."""
    if token and not re.fullmatch(r"[!-~]+", token):
        raise ValueError(f"{name}: has a blank, a line break, or a character that is not ASCII. Export it without.")
    return token or None


def require_model_folder(path: str) -> None:
    """Rejects a path that can be neither a model folder nor a hub name, before something heavy starts.

    Raises:
        ValueError: It is a folder without a config.json, a file, or looks like a folder that does not exist.
    """
    folder = Path(path).expanduser()
    if folder.is_dir() and path:
        if not (folder / "config.json").is_file():
            raise ValueError(f"Model folder {path!r} has no config.json. Name one that `save_pretrained` wrote.")
    elif folder.exists() or not HUB_NAME.fullmatch(path) or ("/" in path and os.path.isdir(folder.parent)):
        raise ValueError(f"Model folder {path!r} does not exist. Name a folder, or a hub name (organization/name).")


def imported(what: str, path: str, known: Sequence[str] = ()) -> Any:
    """The object that an import path names.

    Args:
        what: The argument in the message, such as `reward function`.
        path: `package.module:name`, `package.module.name`, or `path/to/file.py:name`. A file is run once.
        known: Names that may have been meant.

    Raises:
        ValueError: There is no such object; the message says which part failed.
    """
    place, colon, name = path.rpartition(":")
    if not colon:
        place, _, name = path.rpartition(".")
    if not place or not name or name == "py":
        close = difflib.get_close_matches(path, known, 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{what} {path!r}: is not package.module:name or path/to/file.py:name.{hint}")
    try:
        module = _run_file(Path(place).expanduser()) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:  # whatever the user's code raises
        raise ValueError(f"{what} {path!r}: importing {place} failed (from {Path.cwd()}): {error!r}.") from error
    if not hasattr(module, name):
        offered = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise ValueError(f"{what} {path!r}: {place} has no {name!r}. It has: {', '.join(offered) or 'none'}.")
    return getattr(module, name)


def _run_file(file: Path) -> ModuleType:
    name = f"lightrl_file_{file.stem}_{abs(hash(file.resolve()))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # the suffix is .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a module up by its name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
