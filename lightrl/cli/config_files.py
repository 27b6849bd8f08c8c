"""Configuration files: the ones that ship with LightRL, and base files."""

from __future__ import annotations

import os
import sys
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
    try:
        print("".join(f"lightrl:{name:45s} {title}\n" for name, title in shipped_configs().items()), end="", flush=True)
    except BrokenPipeError:  # `lightrl recipes | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def read_yaml(path: Path) -> Any:
    """The content of a YAML file. Raises a ValueError if it can't be read or parsed."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path}: not a YAML file: {error}") from error
    for _, secret in plain_secrets(content):
        remember_secret(secret)  # the parser's messages quote values
    return content


def expand_configs(args: Sequence[str]) -> list[str]:
    """Resolves each `--config` of a `lightrl` command to a file, preceded by its base files.

    A file may have bases: `base: ../tasks/sums.yaml`, or a list, with paths relative to itself or as `lightrl:NAME`.
    Bases are read first, so the file overrides them. `lightrl:NAME` is a file that ships with LightRL. Raises a
    ValueError if a file is missing or is not YAML, or if it has renamed keys, classes, or values, all of which are
    listed.
    """
    out: list[str] = []
    contents: list[Any] = []
    rest = iter(args)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name in ("-c", "--config") and (equals or (value := next(rest, ""))):
            for path, content in _chain(_located(value, Path.cwd(), "--config")):
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
        folder, name = SHIPPED, f"{name.removeprefix(PREFIX).removesuffix('.yaml')}.yaml"
    path = folder / os.path.expanduser(name)
    if not path.is_file():
        raise ValueError(
            f"{asked_by}={name}: no such file (in {folder}). Fix the path, or pick one from `lightrl recipes`."
        )
    return path


def _chain(path: Path, above: tuple[Path, ...] = ()) -> Iterator[tuple[Path, Any]]:
    """A file and its content, preceded by its bases. `above` are the files that it is a base of."""
    if path.resolve() in above:
        raise ValueError(f"{path}: base files form a cycle. Remove a base.")
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path}: has no settings. Add a line such as `run_dir: outputs/run`.")
    names = content.get("base") or []
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path}: base={names}: must be a file or a list of files.")
    for name in names:
        yield from _chain(_located(name, path.parent, f"{path}: base"), (*above, path.resolve()))
    yield path, content
