"""Configuration files: those that come with LightRL, and files that build on others."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
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
        name = path.relative_to(SHIPPED).with_suffix("").as_posix()
        lines = path.read_text().splitlines()
        found[name] = lines[0].removeprefix("#").strip() if lines and lines[0].startswith("#") else ""
    return found


def recipes() -> None:
    """Lists the configurations that come with LightRL; run one with `lightrl fit --config lightrl:NAME`."""
    for name, title in shipped_configs().items():
        print(f"lightrl:{name:45s} {title}")


def read_yaml(path: Path, name: str = "") -> Any:
    """The content of a YAML file.

    Args:
        path: The file.
        name: The argument that names it, for messages.

    Raises:
        ValueError: The file cannot be read, or is not YAML.
    """
    place = f"{name}={path}" if name else str(path)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{place} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{place} cannot be read as YAML: {error}") from error
    for _, secret in plain_secrets(content):
        remember_secret(secret)  # the parser quotes values in its messages
    return content


def expand_configs(args: Sequence[str]) -> list[str]:
    """Command-line arguments in which every `--config` names an existing file, those it builds on before it.

    A file may name others that it builds on: `base: ../tasks/sums.yaml`, or a list, relative to itself or as
    `lightrl:NAME`. They are read first, so that its own values win. `lightrl:NAME` is a file that comes with LightRL.

    Args:
        args: arguments of a `lightrl` command.

    Raises:
        ValueError: a file that is not there, is no YAML mapping, or builds on itself; `--base`.
    """
    out: list[str] = []
    rest = iter(args)
    for argument in rest:
        if argument in ("-c", "--config"):
            value = next(rest, None)
            if value is None:
                out.append(argument)
                continue
        elif argument.startswith("--config="):
            value = argument.removeprefix("--config=")
        elif argument.partition("=")[0] == "--base":
            raise ValueError(f"{argument}: `base` stands in configuration files; give that file as --config first.")
        else:
            out.append(argument)
            continue
        out += [f"--config={path}" for path in _chain(_located(value, Path.cwd(), "--config"), ())]
    return out


def _located(name: str, folder: Path, asked_by: str) -> Path:
    """The file that a name stands for.

    Args:
        name: a path, or `lightrl:NAME`.
        folder: what relative paths start from.
        asked_by: who named it, for the message.
    """
    if name.startswith(PREFIX):
        path = SHIPPED / f"{name.removeprefix(PREFIX).removesuffix('.yaml')}.yaml"
        if SHIPPED.resolve() not in path.resolve().parents or not path.is_file():
            known = [PREFIX + each for each in shipped_configs()]
            # A name may lack its folder: compared with the last part, too.
            tails = {each.rpartition("/")[2]: each for each in known}
            close = difflib.get_close_matches(name, known, 1) or [
                tails[each] for each in difflib.get_close_matches(name.removeprefix(PREFIX), tails, 1)
            ]
            hint = f" Did you mean {close[0]}?" if close else ""
            raise ValueError(
                f"{asked_by}={name}: no such configuration comes with LightRL; `lightrl recipes` lists them.{hint}"
            )
        return path
    if name.lstrip().startswith("{") or "\n" in name:  # may hold secrets, and is not shown
        raise ValueError(f"{asked_by}: settings themselves are given; write them to a file and give its path.")
    path = folder / os.path.expanduser(name)
    if not path.is_file():
        where = "" if Path(name).is_absolute() else f" (looked in {folder})"
        what = "is not a file" if path.exists() else "does not exist"
        raise ValueError(f"{asked_by}={name} {what}{where}. `lightrl recipes` lists those that come with LightRL.")
    return path


def _chain(path: Path, above: tuple[Path, ...]) -> list[Path]:
    """A file after those that it builds on."""
    if path.resolve() in above:
        raise ValueError(f"{path}: base: the file builds on itself, by way of {' -> '.join(map(str, above))}.")
    content = read_yaml(path)
    if not isinstance(content, dict):
        found = "nothing" if content is None else f"a {type(content).__name__}"
        raise ValueError(f"{path}: expected settings by name (trainer, model, data), found {found}.")
    require_new_names(content)
    bases = content.get("base")
    if bases is None:
        return [path]
    names = [bases] if isinstance(bases, str) else bases
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path}: base={bases!r}: must be a path, or a list of paths.")
    above = (*above, path.resolve())
    before = [p for name in names for p in _chain(_located(name, path.parent, f"{path}: base"), above)]
    return [*before, path]
