"""Configuration files: those that come with LightRL, and files that build on others."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import yaml

from lightrl.arguments import user_path
from lightrl.redaction import remember_arguments, remember_secrets

__all__ = ["SHIPPED", "expand_configs", "load_yaml", "read_yaml", "recipes", "shipped_configs"]

PREFIX = "lightrl:"
MOST_VALUES = 100_000
"""Of one file, references (`*name`) counted as often as they stand there."""
_PACKAGE = Path(__file__).parent
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


class _Loader(yaml.SafeLoader):
    """Refuses what the safe loader takes silently, or without saying where: ValueErrors with the line.

    Dates stay text, as they do where the command line's parser reads them.
    """

    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {
        first: [(tag, pattern) for tag, pattern in found if tag != "tag:yaml.org,2002:timestamp"]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def get_single_node(self) -> Any:
        """The document, looked through before values are made of it."""
        node = super().get_single_node()
        sizes: dict[int, int] = {}
        if node is not None and _size(node, sizes) > max(MOST_VALUES, 10 * len(sizes)):
            raise ValueError(f"its references (*name) stand for more than {MOST_VALUES:,} values.")
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """A value."""
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            if not isinstance(node, yaml.ScalarNode):
                raise
            shown = node.value if len(node.value) <= 40 else f"{node.value[:40]}..."
            why = "too long for a number" if "digits" in str(error) else str(error)
            raise ValueError(f"line {_line(node)}: {shown}: {why}; put text in quotes.") from error


def _line(node: Any) -> int:
    return int(node.start_mark.line) + 1


def _size(node: Any, sizes: dict[int, int]) -> int:
    """How many values a node stands for; refuses keys that stand in a mapping twice, and nodes within themselves."""
    if id(node) in sizes:
        if not sizes[id(node)]:
            raise ValueError(f"line {_line(node)}: what stands here refers to itself (*name).")
        return sizes[id(node)]
    sizes[id(node)], size = 0, 1
    if isinstance(node, yaml.MappingNode):
        lines: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if (key.tag, key.value) in lines:
                    raise ValueError(
                        f"line {_line(key)}: {key.value!r} is given a second time and would replace what stands in "
                        f"line {lines[key.tag, key.value]}: put both together."
                    )
                lines[key.tag, key.value] = _line(key)
            size += _size(key, sizes) + _size(value, sizes)
    elif isinstance(node, yaml.SequenceNode):
        size += sum(_size(value, sizes) for value in node.value)
    sizes[id(node)] = size
    return size


def read_yaml(path: Path, name: str = "") -> Any:
    """As `load_yaml`; the secrets in it are remembered for messages."""
    content = load_yaml(path, name)
    remember_secrets(content)
    return content


def load_yaml(path: Path, name: str = "") -> Any:
    """What stands in a YAML file. References (`*name`) are the same object: look at types before text is made of it.

    Args:
        path: the file.
        name: the argument that names it, for messages.

    Raises:
        ValueError: it cannot be read or is no YAML, a key stands in a mapping twice, or its references stand for more
            than a configuration can mean.
    """
    place = f"{name}={path}" if name else str(path)
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ValueError(f"{place} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{place} cannot be read as YAML: {error}") from error
    except RecursionError:
        raise ValueError(f"{place} cannot be read as YAML: its lists and mappings are nested too deeply.") from None
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def expand_configs(args: Sequence[str]) -> list[str]:
    """Command-line arguments in which every `--config` names an existing file, those it builds on before it.

    A file may name others that it builds on: `base: ../tasks/sums.yaml`, or a list, relative to itself or as
    `lightrl:NAME`. They are read first, so that its own values win. `lightrl:NAME` is a file that comes with LightRL.

    Args:
        args: arguments of a `lightrl` command.

    Raises:
        ValueError: a file that is not there, is no YAML mapping, or builds on itself; `--base`.
    """
    remember_arguments(args)
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


def _wrong_parts(value: Any, place: str = "") -> Iterator[str]:
    """What the command line's parser refuses without saying why: classes whose arguments stand in a wrong place."""
    if isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _wrong_parts(inner, f"{place}.{number}")
    if not isinstance(value, dict):
        return
    for key, inner in value.items():
        yield from _wrong_parts(inner, f"{place}.{key}" if place else str(key))
    if "class_path" not in value:
        return
    if not isinstance(name := value["class_path"], str):
        yield f"{place}.class_path={_shown(name)}: must be the name of a class."
    if not isinstance(arguments := value.get("init_args", {}), dict):
        yield f"{place}.init_args={_shown(arguments)}: must be a mapping of {name}'s arguments; leave it out for none."
    if others := [key for key in value if key not in ("class_path", "init_args", "dict_kwargs")]:
        yield f"{place}: {', '.join(map(str, others))} beside class_path: a class takes its arguments below init_args."


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)[:80]


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
    path = folder / user_path(asked_by, name)
    try:
        there = path.is_file()
    except OSError as error:  # a name that is too long
        raise ValueError(f"{asked_by}={name[:80]}...: no file can be called that: {error.strerror}.") from error
    if not there:
        where = "" if Path(name).is_absolute() else f" (looked in {folder})"
        what = "does not exist" if not path.exists() else "is a folder" if path.is_dir() else "is a pipe or a device"
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
    for wrong in _wrong_parts(content):
        raise ValueError(f"{path}: {wrong}")
    bases = content.get("base")
    if bases is None:
        return [path]
    names = [bases] if isinstance(bases, str) else bases
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{path}: base={bases!r}: must be a path, or a list of paths.")
    above = (*above, path.resolve())
    before = [p for name in names for p in _chain(_located(name, path.parent, f"{path}: base"), above)]
    return [*before, path]
