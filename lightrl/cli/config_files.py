"""Configuration files: those that come with LightRL, and files that build on others."""

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
"""The folder of the configurations that come with LightRL: inside the wheel, or `configs/` of a clone."""


def shipped_configs() -> dict[str, str]:
    """Name -> first comment line of every configuration that can be named as `lightrl:NAME`."""
    found = {}
    for path in sorted(SHIPPED.rglob("*.yaml")):
        title = path.read_text().partition("\n")[0]
        found[path.relative_to(SHIPPED).with_suffix("").as_posix()] = title.removeprefix("#").strip()
    return found


def recipes() -> None:
    """List the configurations that come with LightRL; run one with `lightrl fit --config lightrl:NAME`."""
    for name, title in shipped_configs().items():
        print(f"lightrl:{name:45s} {title}")


def read_yaml(path: Path, name: str = "") -> Any:
    """The content of a YAML file; a ValueError with the argument's `name` if it can't be read, or is not YAML."""
    place = f"{name}={path}" if name else str(path)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{place}: cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{place}: cannot be read as YAML: {error}") from error
    for _, secret in plain_secrets(content):
        remember_secret(secret)  # the parser quotes values in its messages
    return content


def expand_configs(args: Sequence[str]) -> list[str]:
    """Arguments of a `lightrl` command in which each `--config` names an existing file, after those it builds on.

    A file may name others that it builds on: `base: ../tasks/sums.yaml`, or a list, relative to itself or as
    `lightrl:NAME`. They are read first, so that its own values win. `lightrl:NAME` is a file that comes with LightRL.

    Raises:
        ValueError: A file is not there, is not a YAML mapping, or builds on itself. Or names were renamed; all of them
            are listed.
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
            raise ValueError(f"{argument}: `base` belongs in configuration files. Pass that file as --config first.")
        if equals and name.startswith("--"):
            contents.append({name.removeprefix("--"): value})
        out.append(argument)
    require_new_names(contents)
    return out


def _located(name: str, folder: Path, asked_by: str) -> Path:
    """The file that a path (relative to `folder`) or `lightrl:NAME` stands for; `asked_by` is for the message."""
    if name.startswith(PREFIX):
        path = SHIPPED / f"{name.removeprefix(PREFIX).removesuffix('.yaml')}.yaml"
        if SHIPPED.resolve() not in path.resolve().parents or not path.is_file():
            known = {PREFIX + each: PREFIX + each for each in shipped_configs()}
            known |= {PREFIX + each.rpartition("/")[2]: each for each in known}  # a name may lack its folder
            close = difflib.get_close_matches(name, known, 1)
            hint = f" Did you mean {known[close[0]]}?" if close else ""
            raise ValueError(f"{asked_by}={name}: does not come with LightRL. `lightrl recipes` lists what does.{hint}")
        return path
    if name.lstrip().startswith("{") or "\n" in name:  # may hold secrets, and is not shown
        raise ValueError(f"{asked_by}: settings instead of a path. Write them to a file and pass its path.")
    path = folder / os.path.expanduser(name)
    if not path.is_file():
        what = "is not a file" if path.exists() else "does not exist"
        raise ValueError(
            f"{asked_by}={name}: {what} (looked in {folder}). `lightrl recipes` lists what LightRL brings."
        )
    return path


def _chain(path: Path, above: tuple[Path, ...]) -> Iterator[tuple[Path, Any]]:
    """A file and its content, after those that it builds on."""
    if path.resolve() in above:
        raise ValueError(f"{path}: base: the file builds on itself through {' -> '.join(map(str, above))}.")
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
