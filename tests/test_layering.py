"""The rooms import in one direction, and `import lightrl` is light.

All are read from the source, never from running code: what is imported inside a function or for types only counts too.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

# Rooms in import order: a room imports only from rooms above it.
ROOMS = [
    *("ops", "records", "compat"),
    *("checkpoints", "distributed"),
    *("models", "objectives", "engines", "rewards", "data", "environments", "rollout", "algorithms", "callbacks"),
]
BELOW = {room: set(ROOMS[:i]) for i, room in enumerate(ROOMS)}
# The top: the package's face and the programs may import anything.
TOP = {"__init__", "__main__", "cli"}


Files = Mapping[str, str]
"""Path from the repository's root -> source."""


@pytest.fixture(scope="module")
def files(root: Path) -> Files:
    found = {path.relative_to(root).as_posix(): path.read_text() for path in sorted((root / "lightrl").rglob("*.py"))}
    assert len(found) > 50
    return found


def room_of(path: str) -> str:
    return path.split("/")[1].removesuffix(".py")


def imports_of(path: str, tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """(line, module, name) of each import; the name is "" for `import module`."""
    package = path.split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, module, alias.name) for alias in node.names)


# ---- rooms and circles -------------------------------------------------------------------------------------------


def wrong_way(files: Files) -> list[str]:
    """Imports from a room below, and files in no room."""
    faults = []
    for path, source in files.items():
        room = room_of(path)
        if room in TOP:
            continue
        if room not in BELOW:
            faults.append(f"{path}: {room} is no room; name it in tests/test_layering.py")
            continue
        for line, module, name in imports_of(path, ast.parse(source)):
            parts = [*module.split("."), name]
            if parts[0] == "lightrl" and parts[1] not in BELOW[room] | {room, ""}:
                faults.append(f"{path}:{line}: {room} imports {parts[1]}")
    return faults


def circles(files: Files) -> list[str]:
    """Files that import each other, directly or through others: the strongly connected parts of the import graph."""
    by_module = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in files}
    targets = {
        path: {
            target
            for _, module, name in imports_of(path, ast.parse(source))
            if (target := by_module.get(f"{module}.{name}") or by_module.get(module)) and target != path
        }
        for path, source in files.items()
    }
    reached = {path: _reachable(path, targets) for path in files}
    rings = {tuple(sorted({path} | {p for p in reached[path] if path in reached[p]})) for path in files}
    return [" <-> ".join(ring) for ring in sorted(rings) if len(ring) > 1]


def _reachable(start: str, targets: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    front = [start]
    while front:
        new = targets[front.pop()] - seen
        seen |= new
        front += new
    return seen


def test_a_room_imports_only_from_rooms_above_it(files: Files) -> None:
    assert wrong_way(files) == []


def test_no_files_import_each_other_in_a_circle(files: Files) -> None:
    assert circles(files) == []


# ---- a light import ----------------------------------------------------------------------------------------------


def test_importing_lightrl_is_light(root: Path) -> None:
    """Neither optional packages nor CUDA are there after the import of what most programs use, in a new process."""
    code = (
        "import lightrl.engines, lightrl.rewards, lightrl.data, lightrl.algorithms, lightrl.callbacks, torch\n"
        "import sys; print(*{m.split('.')[0] for m in sys.modules}, torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    *modules, cuda = done.stdout.splitlines()[-1].split()
    assert "lightrl" in modules and {*modules}.isdisjoint({"vllm", "deepspeed", "wandb", "peft"})
    assert cuda == "False"
