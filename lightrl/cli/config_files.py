"""Configuration files: the ones that ship with LightRL, and base files."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from lightrl.checkpoints.redaction import plain_secrets, remember_secret
from lightrl.cli.renamed import require_new_names

PREFIX = "lightrl:"
_PACKAGE = Path(__file__).parent.parent
SHIPPED = next(folder for folder in (_PACKAGE / "_configs", _PACKAGE.parent / "configs") if folder.is_dir())
"""Directory of the shipped configurations: inside the wheel, or `configs/` in a clone."""


def shipped_configs() -> dict[str, str]:
    """Name -> first comment line of every shipped configuration (`lightrl:NAME`)."""
    found = {}
    for path in sorted(SHIPPED.rglob("*.yaml")):
        title = path.read_text().partition("\n")[0]
        found[path.relative_to(SHIPPED).with_suffix("").as_posix()] = title.removeprefix("#").strip()
    return found


def recipes() -> None:
    """List the configurations that ship with LightRL. Run one with `lightrl fit --config lightrl:NAME`."""
    for name, title in shipped_configs().items():
        print(f"lightrl:{name:45s} {title}")


def read_yaml(path: Path, name: str = "") -> Any:
    """The content of a YAML file. Raises a ValueError with the argument's `name` if it can't be read or parsed."""
    place = f"{name}={path}" if name else str(path)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{place}: cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{place}: is not valid YAML: {error}") from error
    for _, secret in plain_secrets(content):
        remember_secret(secret)  # the parser's messages quote values
    return content


def expand_configs(args: Sequence[str]) -> list[str]:
    """Resolves each `--config` of a `lightrl` command to a file, preceded by its base files.

    A file may have bases: `base: ../tasks/sums.yaml`, or a list, with paths relative to itself or as `lightrl:NAME`.
    Bases are read first, so the file overrides them. `lightrl:NAME` is a file that ships with LightRL.

    Raises:
        ValueError: A file is missing, is not a YAML mapping, or is its own base; or it has renamed keys, classes, or
            values, all of which are listed.
    """
    out: list[str] = []
    contents: list[Any] = []
    rest = iter(args)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name in ("-c", "--config") and (equals or (value := next(rest, ""))):
            for path, content in _chain(_located(value, Path.cwd(), "--config"), ()):
                out.append(f"--config={path}")
                contents.append(content)
            continue
        if name == "--base":
            raise ValueError(
                f"{argument}: base is only valid in a configuration file. Pass the base as --config first."
            )
        if equals and name.startswith("--"):
            contents.append({name.removeprefix("--"): value})
        out.append(argument)
    require_new_names(contents)
    return out


def _located(name: str, folder: Path, asked_by: str) -> Path:
    """Resolves a path (relative to `folder`) or `lightrl:NAME`. `asked_by` is for the error message."""
    if name.startswith(PREFIX):
        path = SHIPPED / f"{name.removeprefix(PREFIX).removesuffix('.yaml')}.yaml"
        if SHIPPED.resolve() not in path.resolve().parents or not path.is_file():
            known = {PREFIX + each: PREFIX + each for each in shipped_configs()}
            known |= {PREFIX + each.rpartition("/")[2]: each for each in known}  # a name may lack its folder
            close = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {known[close[0]]}?" if close else ""
            raise ValueError(
                f"{asked_by}={name}: is not a configuration of LightRL. Run `lightrl recipes` to list them.{hint}"
            )
        return path
    if name.lstrip().startswith("{") or "\n" in name:  # may contain secrets, so it is not shown
        raise ValueError(f"{asked_by}: must be a path, got inline settings. Write them to a file and pass its path.")
    path = folder / os.path.expanduser(name)
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise ValueError(f"{asked_by}={name}: {what} (in {folder}). Fix the path, or pick one from `lightrl recipes`.")
    return path


def _chain(path: Path, above: tuple[Path, ...]) -> Iterator[tuple[Path, Any]]:
    """A file and its content, preceded by its bases."""
    if path.resolve() in above:
        raise ValueError(f"{path}: base: the file is its own base through {' -> '.join(map(str, above))}.")
    content = read_yaml(path)
    if not isinstance(content, dict):
        found = "nothing" if content is None else f"a {type(content).__name__}"
        raise ValueError(f"{path}: expected settings by name (trainer, model, data), found {found}.")
    bases = content.get("base") or []
    names = [bases] if isinstance(bases, str) else bases
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path}: base={bases!r}: must be a path, or a list of paths.")
    for name in names:
        yield from _chain(_located(name, path.parent, f"{path}: base"), (*above, path.resolve()))
    yield path, content
