"""The house's rules: imports go one way, and `import lightrl` is light."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# layer -> layers it may import. A folder's or file's name under lightrl/ is its layer.
BELOW = {
    "ops": set(),
    "types": {"ops"},
    "models": {"ops", "types"},
    "engines": {"ops", "types", "models"},
    "rewards": {"ops", "types", "models"},
    "data": {"ops", "types", "models", "engines", "rewards"},
    # A module never imports an engine, a reward function or the data module, although they stand to its left.
    "modules": {"ops", "types", "models"},
    "callbacks": {"ops", "types", "models", "engines", "rewards", "data", "modules"},
}
# The top: the package's face and the programs may import anything.
TOP = {"__init__", "__main__", "cli", "export", "plan", "report"}


def layer_of(path: Path, root: Path) -> str:
    return path.relative_to(root / "lightrl").parts[0].removesuffix(".py")


def imported_layers(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, layer) of each import of lightrl, function-level ones included; imports for types only do not count."""
    tree = ast.parse(source)
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], base]).rstrip(".")
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "lightrl" and len(parts) > 1:
                yield node.lineno, parts[1]


def violations(path: Path, source: str, root: Path) -> list[str]:
    layer = layer_of(path, root)
    if layer in TOP:
        return []
    if layer not in BELOW:
        return [f"{path}: {layer} is no layer; name it in tests/test_layering.py"]
    package = ".".join(path.relative_to(root).parent.parts)
    allowed = BELOW[layer] | {layer}
    return [
        f"{path}:{line}: {layer} imports {target}"
        for line, target in imported_layers(source, package)
        if target not in allowed
    ]


def test_imports_go_one_way(root: Path) -> None:
    files = sorted((root / "lightrl").rglob("*.py"))
    assert len(files) > 5
    assert [fault for path in files for fault in violations(path, path.read_text(), root)] == []


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("ops/x.py", "import lightrl.types"),
        ("models/x.py", "from lightrl.engines.base import Engine"),
        ("modules/x.py", "def f():\n    from lightrl import data\n"),
        ("modules/x.py", "def f():\n    from ..engines import vllm\n"),
        ("data/x.py", "from lightrl.modules.ppo import PPOLightningModule"),
        ("extras/x.py", ""),
    ],
)
def test_the_check_finds_a_violation(file: str, source: str, root: Path) -> None:
    assert violations(root / "lightrl" / file, source, root)


def test_the_check_lets_through_what_is_allowed(root: Path) -> None:
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from lightrl.data.prompts import PromptSource\n"
    assert violations(root / "lightrl/models/x.py", source, root) == []
    assert violations(root / "lightrl/data/x.py", "from lightrl.engines.base import Engine\nimport torch", root) == []


def imported_by(statement: str, root: Path) -> tuple[set[str], bool]:
    """Top-level packages in `sys.modules` after `statement` in a new process, and whether CUDA was initialised."""
    code = (
        f"import sys, json\n{statement}\n"
        "cuda = 'torch' in sys.modules and sys.modules['torch'].cuda.is_initialized()\n"
        "print(json.dumps([sorted({m.split('.')[0] for m in sys.modules}), bool(cuda)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    modules, cuda = json.loads(done.stdout.splitlines()[-1])
    return set(modules), cuda


@pytest.mark.parametrize(
    "statement",
    ["import lightrl", "import lightrl.engines, lightrl.rewards, lightrl.data, lightrl.modules, lightrl.callbacks"],
)
def test_importing_lightrl_is_light(statement: str, root: Path) -> None:
    modules, cuda = imported_by(statement, root)
    assert "lightrl" in modules
    assert modules.isdisjoint({"vllm", "deepspeed", "wandb", "peft"})
    assert not cuda
