"""Argument validation, import paths, lazy namespaces, and optional packages."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

DISTRIBUTION = "lightrl-llm"
"""Name of the package on PyPI. The name `lightrl` belongs to another project there."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
MAX_REWARD = 1e16
"""Maximum magnitude of a reward. The sum of squares of a batch, as in a standard deviation, still fits in float32."""

T = TypeVar("T")
_RUNNING = threading.RLock()  # environments are made in threads


def one_of(name: str, value: T, *choices: T) -> T:
    """Returns the value if it is one of the choices, else raises a ValueError with `name`, such as `GiGPO.scale`."""
    if value not in choices:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(map(repr, choices))}.")
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
    """Returns the token, or None if empty. Raises a ValueError, which omits it, if no HTTP header can contain it."""
    if token and not re.fullmatch(r"[!-~]+", token):
        raise ValueError(f"{name}: contains a space, a line break, or a non-ASCII character. Remove it.")
    return token or None


def require_model_folder(path: str) -> None:
    """Raises a ValueError if a path is neither a model directory nor a model ID, before any heavy work."""
    folder = Path(path).expanduser()
    if folder.is_dir() and path:
        if not (folder / "config.json").is_file():
            raise ValueError(f"Model directory {path!r} has no config.json. Use one written by `save_pretrained`.")
    elif folder.exists() or not HUB_NAME.fullmatch(path) or ("/" in path and os.path.isdir(folder.parent)):
        raise ValueError(f"Model directory {path!r} does not exist. Use another, or a model ID (organization/name).")


def imported(what: str, path: str) -> Any:
    """Imports the object at an import path. Raises a ValueError with the part that failed.

    The path is `package.module:name`, `package.module.name`, or `path/to/file.py:name`. A file is run once. `what` is
    the argument's name in the message, such as `reward function`.
    """
    place, colon, name = path.rpartition(":")
    if not colon:
        place, _, name = path.rpartition(".")
    if not place or not name or name == "py":
        raise ValueError(f"{what} {path!r}: not package.module:name or path/to/file.py:name.")
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
    with _RUNNING:
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


def lazy_names(package: str, modules: Sequence[str], names: Sequence[str]) -> Callable[[str], Any]:
    """Creates a package's `__getattr__` (PEP 562), which imports a module when one of its public `names` is first used.

    `modules` are searched in order, those with the fewest imports first. A leading dot starts a sibling package.
    """

    def getattribute(name: str) -> Any:
        for module in modules if name in names else ():
            found = getattr(importlib.import_module(f".{module}", package), name, None)
            if found is not None:
                return found
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return getattribute
