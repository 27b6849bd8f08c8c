"""Arguments as they are given: ranges, choices, import paths, packages; one wording for all that is refused."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import json
import math
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar
from urllib.parse import urlsplit

DISTRIBUTION = "lightrl-llm"
"""Name of the package on an index. The name `lightrl` there belongs to another project."""

T = TypeVar("T")

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
MAX_REWARD = 1e16
"""Largest size of a reward: the squares of a batch of them, which a standard deviation sums, still fit in float32."""


def at_least(name: str, value: T, low: float, note: str = "", *, or_none: str | None = None) -> T:
    """The value if it is `low` or more.

    Args:
        name: what the message calls the argument, such as `CompletionLogger.num_samples`.
        value: a number; NaN and the infinities are refused.
        low: the smallest that is allowed.
        note: end of the message, behind what is allowed.
        or_none: what None stands for, such as "for no limit"; without it None is refused.

    Raises:
        ValueError: with the name, the value and what is allowed.
    """
    return _checked(name, value, lambda x: x >= low, f"at least {low:g}{note}", or_none)


def above(name: str, value: T, low: float = 0, note: str = "", *, or_none: str | None = None) -> T:
    """The value if it is above `low`; otherwise as `at_least`."""
    return _checked(name, value, lambda x: x > low, f"above {low:g}{note}", or_none)


def reward_value(name: str, value: T, *, or_none: str | None = None) -> T:
    """The value if it can be a reward: finite, and at most `MAX_REWARD` in size; otherwise as `at_least`."""
    allowed = f"from {-MAX_REWARD:g} to {MAX_REWARD:g}, as rewards are"
    return _checked(name, value, lambda x: abs(x) <= MAX_REWARD, allowed, or_none)


def fraction(name: str, value: T, bounds: str = "[0, 1]", note: str = "", *, or_none: str | None = None) -> T:
    """The value if it is in the interval from 0 to 1 whose brackets say which ends belong to it, such as `(0, 1]`."""

    def inside(x: float) -> bool:
        return (x >= 0 if bounds[0] == "[" else x > 0) and (x <= 1 if bounds[-1] == "]" else x < 1)

    return _checked(name, value, inside, f"in {bounds}{note}", or_none)


def one_of(name: str, value: T, *choices: T) -> T:
    """The value if it is one of the choices; otherwise as `at_least`."""
    *most, last = map(repr, choices)
    return _checked(name, value, lambda x: x in choices, f"{', '.join(most)} or {last}", None)


def whole_number(name: str, value: T, low: int = 0, *, or_none: str | None = None) -> T:
    """The value if it is an integer of `low` or more; otherwise as `at_least`."""

    def ok(x: Any) -> bool:
        return isinstance(x, int) and not isinstance(x, bool) and x >= low

    return _checked(name, value, ok, f"at least {low}, a whole number", or_none)


def instance_of(name: str, value: T, *kinds: type, or_none: str | None = None) -> T:
    """The value if it is an object of one of the classes or of a subclass; otherwise as `at_least`.

    A class in place of an object is refused with its own words, since it needs parentheses only.
    """
    *most, last = (kind.__name__ for kind in kinds)
    wanted = f"{', '.join(most)} or {last}" if most else last
    if (value is None and or_none is not None) or isinstance(value, kinds):
        return value
    if isinstance(value, type):
        raise ValueError(f"{name}={value.__name__} is a class: give an object, such as {value.__name__}().")
    allowed = f"an object of {wanted}, or of a class derived from it" + (
        "" if or_none is None else f", or None {or_none}"
    )
    raise ValueError(f"{name}={repr(value)[:60]} ({type(value).__name__}): give {allowed}.")


def _checked(name: str, value: T, ok: Callable[[Any], bool], allowed: str, or_none: str | None) -> T:
    if isinstance(value, float) and math.isinf(value):
        raise ValueError(f"{name}={value!r}: must be finite{'' if or_none is None else f', or None {or_none}'}.")
    try:
        fine = or_none is not None if value is None else ok(value)
    except TypeError:  # it is not of a kind that can be compared
        fine = False
    if not fine:
        raise ValueError(f"{name}={value!r}: must be {allowed}{'' if or_none is None else f', or None {or_none}'}.")
    return value


def install_command(extra: str) -> str:
    """The command that installs an extra, such as `vllm`. From a clone or a wheel, pip reads the installed metadata."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def require_packages(owner: str, extra: str, *packages: str) -> None:
    """Raises a ValueError that says what to install if one of the packages, by its import name, is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"{owner} needs {' and '.join(missing)}: {install_command(extra)}.")


def bearer_token(name: str, token: str | None) -> str | None:
    """The token if an HTTP header can carry it; None and an empty one are none.

    Raises:
        ValueError: it cannot; the message does not show the token.
    """
    if token and not re.fullmatch(r"[!-~]([ -~]*[!-~])?", token):
        raise ValueError(
            f"{name} cannot be sent in a header: it has blanks at its ends, a line break, or a character that is not "
            "ASCII. Write it again without."
        )
    return token


def http_url(name: str, url: str) -> str:
    """The URL if something can be asked there.

    Raises:
        ValueError: it does not start with http:// or https://, has no host, a blank, or a port that is none.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port, or of an IPv6 address
        usable = False
    if not usable or re.search(r"[\s\x00-\x1f\x7f]", url):
        raise ValueError(f"{name}={url!r}: write it as http://HOST:PORT/PATH or https://HOST/PATH, without blanks.")
    return url


def user_path(name: str, path: str) -> Path:
    """The path with `~` and `~user` replaced by that home.

    Args:
        name: what the message calls the argument.
        path: as it was given.

    Raises:
        ValueError: there is no such user.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{name}={path!r}: there is no home of that user here; write the path in full.") from error


def require_model_folder(path: str) -> None:
    """Checks cheaply that a model can be there, before anything heavy starts.

    A path that exists must hold a readable config.json; one that does not must at least look like a hub name (`name` or
    `organisation/name`), which only loading can check.

    Raises:
        ValueError: neither holds.
    """
    folder = user_path("actor.path", path)
    if not path:
        raise ValueError("actor.path='': give a folder that `save_pretrained` wrote, or a hub name.")
    if os.path.isdir(folder):
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"Model folder {path!r} has no config.json: give a folder that `save_pretrained` wrote, or a hub name."
            )
        try:
            found = json.loads((folder / "config.json").read_bytes())
        except ValueError as error:
            raise ValueError(f"Model folder {path!r}: its config.json cannot be read as JSON: {error}.") from error
        if not isinstance(found, dict):
            raise ValueError(f"Model folder {path!r}: its config.json is a {type(found).__name__}, no mapping.")
    elif os.path.exists(folder):
        raise ValueError(f"Model path {path!r} is a file: give the folder that holds its config.json.")
    elif not HUB_NAME.fullmatch(path):
        raise ValueError(f"Model folder {path!r} does not exist, and it cannot be a hub name (organisation/name).")
    elif "/" in path and os.path.isdir(Path(path).parent):
        raise ValueError(
            f"Model folder {path!r} does not exist, although {str(Path(path).parent)!r} does. Create it first, or give "
            "a hub name that does not start like a local folder."
        )


def imported(what: str, path: str, known: Sequence[str] = ()) -> Any:
    """What an import path names.

    Args:
        what: what the message calls the argument, such as `reward function`.
        path: `package.module:name`, `package.module.name` or `path/to/file.py:name`. A file is run once.
        known: names that may have been meant where the path is none.

    Raises:
        ValueError: nothing can be imported there; the message says which part failed.
    """
    place, colon, name = path.rpartition(":")
    if not colon:
        place, _, name = path.rpartition(".")
    if not place or not name or name == "py":
        close = difflib.get_close_matches(path, known, 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"{what} {path!r}: give package.module:name, package.module.name or path/to/file.py:name.{hint}"
        )
    module = _run_file(what, path, Path(place)) if place.endswith(".py") else _import_module(what, path, place)
    if not hasattr(module, name):
        offered = sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        raise ValueError(f"{what} {path!r}: {place} has no {name!r}. It has: {', '.join(offered) or 'none'}.")
    return getattr(module, name)


def _import_module(what: str, path: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(error.name + ".")):
            raise ValueError(f"{what} {path!r}: importing {name} failed: {error}.") from error
        raise ValueError(
            f"{what} {path!r}: there is no module {error.name!r} on the Python path. "
            "Install the package, set PYTHONPATH, or give the file as path/to/file.py:name."
        ) from error
    except Exception as error:
        raise ValueError(f"{what} {path!r}: importing {name} failed: {error!r}.") from error


def _run_file(what: str, path: str, file: Path) -> ModuleType:
    if not file.is_file():
        raise ValueError(f"{what} {path!r}: there is no file {file} (looked from {Path.cwd()}).")
    name = f"lightrl_file_{file.stem}_{abs(hash(file.resolve()))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # the suffix is .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a module up by its name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"{what} {path!r}: running {file} failed: {error!r}.") from error
    return module
