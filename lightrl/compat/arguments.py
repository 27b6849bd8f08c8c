"""Argument validation, import paths, and optional packages."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

DISTRIBUTION = "lightrl-llm"
"""Name of the package on PyPI. The name `lightrl` belongs to another project there."""
MAX_REWARD = 1e16
"""Maximum magnitude of a reward. The sum of squares of a batch, as in a standard deviation, still fits in float32."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

T = TypeVar("T")


def at_least(name: str, value: T, low: float, note: str = "", *, or_none: str | None = None) -> T:
    """Returns the value if it is finite and at least `low`.

    Args:
        name: Argument name in the message, such as `CompletionLogger.num_samples`.
        value: Number to check.
        low: Minimum value.
        note: End of the message.
        or_none: Meaning of None, such as "for no limit". Defaults to rejecting None.

    Raises:
        ValueError: The value is not allowed. The message has the argument, its value, and the allowed values.
    """
    return _checked(name, value, lambda x: x >= low, f"at least {low:g}{note}", or_none)


def above(name: str, value: T, low: float = 0, note: str = "", *, or_none: str | None = None) -> T:
    """Returns the value if it is finite and above `low`. See `at_least`."""
    return _checked(name, value, lambda x: x > low, f"above {low:g}{note}", or_none)


def fraction(name: str, value: T, bounds: str = "[0, 1]", note: str = "", *, or_none: str | None = None) -> T:
    """Returns the value if it is from 0 to 1, with the ends as in the brackets of `bounds`. See `at_least`."""

    def inside(x: float) -> bool:
        return (x >= 0 if bounds[0] == "[" else x > 0) and (x <= 1 if bounds[-1] == "]" else x < 1)

    return _checked(name, value, inside, f"in {bounds}{note}", or_none)


def one_of(name: str, value: T, *choices: T) -> T:
    """Returns the value if it is one of the choices. See `at_least`."""
    return _checked(name, value, lambda x: x in choices, f"one of {', '.join(map(repr, choices))}", None)


def _checked(name: str, value: T, ok: Callable[[Any], bool], allowed: str, or_none: str | None) -> T:
    if value is None and or_none is not None:
        return value
    try:
        fine = ok(value) and not (isinstance(value, float) and math.isinf(value))
    except TypeError:  # the type doesn't support comparison
        fine = False
    if not fine:
        raise ValueError(f"{name}={value!r}: must be {allowed}{'' if or_none is None else f', or None {or_none}'}.")
    return value


def install_command(extra: str) -> str:
    """Returns the command that installs an extra, such as `vllm`."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def require_packages(owner: str, extra: str, *packages: str) -> None:
    """Raises a ValueError with the install command if a package, by import name, is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{owner}: needs {' and '.join(missing)}, not installed. Run {install_command(extra)}.")


def bearer_token(name: str, token: str | None) -> str | None:
    """Returns the token, or None if empty. Raises a ValueError without it if an HTTP header can't hold it."""
    if token and not re.fullmatch(r"[!-~]+", token):
        raise ValueError(f"{name}: has a space, a line break, or a non-ASCII character. Export it without.")
    return token or None


def require_model_folder(path: str) -> None:
    """Rejects a path that is neither a model directory nor a model ID, before any heavy work.

    Raises:
        ValueError: The path is a file, a directory without a config.json, or looks like a missing directory.
    """
    folder = Path(path).expanduser()
    if folder.is_dir() and path:
        if not (folder / "config.json").is_file():
            raise ValueError(f"Model directory {path!r} has no config.json. Use one written by `save_pretrained`.")
    elif folder.exists() or not HUB_NAME.fullmatch(path) or ("/" in path and os.path.isdir(folder.parent)):
        raise ValueError(
            f"Model directory {path!r} does not exist. Use an existing directory, or a model ID (organization/name)."
        )


def imported(what: str, path: str) -> Any:
    """Imports the object at an import path.

    Args:
        what: Argument name in the message, such as `reward function`.
        path: `package.module:name`, `package.module.name`, or `path/to/file.py:name`. A file is run once.

    Raises:
        ValueError: The object doesn't exist. The message has the part that failed.
    """
    place, colon, name = path.rpartition(":")
    if not colon:
        place, _, name = path.rpartition(".")
    if not place or not name or name == "py":
        raise ValueError(f"{what} {path!r}: is not package.module:name or path/to/file.py:name.")
    try:
        module = _run_file(Path(place).expanduser()) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:  # user code may raise any error
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
    sys.modules[name] = module  # dataclasses and pickle look up modules by name
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
