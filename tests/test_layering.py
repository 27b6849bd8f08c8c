"""The house's rules, each with a planted violation that it must find; and `import lightrl` is light.

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

# Documented: those of named tuples, `os` and `sys`.
PUBLIC_DESPITE_UNDERSCORE = {"_asdict", "_current_frames", "_exit", "_fields", "_make", "_replace"}
# Parts of dependencies that are not documented although their names look public: DeepSpeed's, peft's, jsonargparse's,
# Lightning's, and modules below which nothing is.
UNDOCUMENTED = {
    *("all_grad_tensors", "averaged_gradients", "bit16_groups", "fp16_groups", "fp32_partitioned_groups_flat"),
    *(
        "ds_id",
        "ds_tensor",
        "grad_position",
        "reset_cpu_buffers",
        "micro_step_id",
        "clear_backward_seen_flag",
        "single_partition_of_fp32_groups",
    ),
    *("get_hp_fragment_address", "lp_fragment_address", "lora_A", "lora_B", "lazy_get_init_args", "PL_GLOBAL_SEED"),
}
PACKAGES = {"deepspeed", "lightning", "peft", "torch", "transformers", "vllm"}
UNDOCUMENTED_MODULES = (
    *("deepspeed.runtime", "peft.utils.integrations", "vllm.distributed", "vllm.model_executor", "vllm.v1"),
)

Files = Mapping[str, str]
"""Path from the repository's root -> source."""


@pytest.fixture(scope="module")
def files(root: Path) -> Files:
    """The whole package."""
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


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("lightrl/ops/x.py", "import lightrl.records"),
        ("lightrl/objectives/x.py", "def f():\n    from ..engines import vllm\n"),
        ("lightrl/engines/vllm/x.py", "from ...data import prompts"),
        ("lightrl/models/x.py", "if TYPE_CHECKING:\n    from lightrl.data.prompts import PromptSource\n"),
        ("lightrl/extras/x.py", ""),
    ],
)
def test_an_import_in_the_wrong_direction_is_found(path: str, source: str) -> None:
    assert len(wrong_way({path: source})) == 1


# ---- what belongs to others --------------------------------------------------------------------------------------


def _names_in(annotation: ast.expr | None) -> set[str]:
    """Names in an annotation, those in its strings included; what a `Literal` lists are values."""
    names: set[str] = set()
    rest: list[ast.AST] = [annotation] if annotation else []
    while rest:
        node = rest.pop()
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            rest.append(ast.parse(node.value, mode="eval").body)
        if not (isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Literal")):
            rest += ast.iter_child_nodes(node)
    return names


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_" and name not in PUBLIC_DESPITE_UNDERSCORE


def attributes_of(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr, str]]:
    """(node, object, name) of each attribute that is read, set or asked for by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node, node.value, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
            name = node.args[1]
            by_name = node.func.id in ("getattr", "setattr", "hasattr", "delattr")
            if by_name and isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node, node.args[0], name.value


def others_private_attributes(files: Files) -> list[str]:
    """Uses of `x._name`, where x is none of: self, cls, super(), a class of this file, a parameter annotated as one."""
    faults = []
    for path, source in files.items():
        if room_of(path) == "compat":
            continue
        tree = ast.parse(source)
        own = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        ours = _names_by_function(tree, own)
        for node, owner, name in attributes_of(tree):
            own_super = isinstance(owner, ast.Call) and ast.unparse(owner.func) == "super"
            known = isinstance(owner, ast.Name) and owner.id in own | {"self", "cls"} | ours.get(id(node), set())
            if private(name) and not (known or own_super):
                faults.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    return faults


def _names_by_function(tree: ast.AST, classes: set[str]) -> dict[int, set[str]]:
    """Node -> parameters in reach that are annotated as one of these classes, or made by calling one."""
    names: dict[int, set[str]] = {}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            found = {
                a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg) and _names_in(a.annotation) & classes
            }
            for inner in ast.walk(function):
                names.setdefault(id(inner), set()).update(found)
    return names


def inherited_private_parts(files: Files) -> list[str]:
    """Uses of `self._name`, `cls._name` or `super()._name` where nothing in the package defines `_name`.

    It then belongs to a class of a dependency.
    """
    trees = {path: ast.parse(source) for path, source in files.items() if room_of(path) != "compat"}
    defined: set[str] = set()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                defined.add(node.name)
            elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return [
        f"{path}:{node.lineno}: {ast.unparse(node)}"
        for path, tree in trees.items()
        for node, owner, name in attributes_of(tree)
        if private(name) and name not in defined and ast.unparse(owner).split("(")[0] in ("self", "cls", "super")
    ]


def dependencies_private_parts(files: Files) -> list[str]:
    """Private or undocumented parts of packages, outside of compat: imported, called by keyword, or as attributes."""
    faults = []
    for path, source in files.items():
        if room_of(path) == "compat":
            continue
        tree = ast.parse(source)
        for line, module, name in imports_of(path, tree):
            parts = [*module.split("."), name]
            if parts[0] != "__future__" and any(map(private, parts)):
                faults.append(f"{path}:{line}: imports {module}.{name}")
            elif module.startswith(UNDOCUMENTED_MODULES):
                faults.append(f"{path}:{line}: imports {module}")
        for node, owner, name in attributes_of(tree):
            if name in UNDOCUMENTED or (private(name) and ast.unparse(owner).split(".")[0] in PACKAGES):
                faults.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                faults += [f"{path}:{node.lineno}: {k.arg}=" for k in node.keywords if k.arg and private(k.arg)]
            elif isinstance(node, ast.Constant) and node.value in UNDOCUMENTED and node.value.isupper():
                faults.append(f"{path}:{node.lineno}: {node.value}")
    return faults


def test_nothing_reads_or_sets_another_classes_private_attributes(files: Files) -> None:
    assert others_private_attributes(files) == []


def test_private_parts_of_dependencies_are_used_in_compat_only(files: Files) -> None:
    assert dependencies_private_parts(files) == []
    assert inherited_private_parts(files) == []


@pytest.mark.parametrize(
    "source",
    [
        "def f(x): return x._seeds",
        "def f(x): x._seeds = 1",
        "def f(x): return getattr(x, '_seeds', None)",
        "def f(x): setattr(x, '_seeds', 1)",
        "class C:\n    def f(self): return self.data._seeds",
        "class C: ...\ndef f(x: D): return x._seeds",
    ],
)
def test_anothers_private_attribute_is_found(source: str) -> None:
    assert len(others_private_attributes({"lightrl/data/x.py": source})) == 1


@pytest.mark.parametrize(
    "source",
    [
        "from jsonargparse import _typehints",
        "from lightrl.data.rows import _checked",
        "def f():\n    from vllm.v1.engine import core",
        "from deepspeed.runtime.zero.partition_parameters import Init",
        "torch.ops.aten._softmax(x)",
        "create_block_mask(f, None, _compile=True)",
        "optimizer.averaged_gradients.clear()",
        "getattr(parameter, 'ds_id')",
        "os.environ['PL_GLOBAL_SEED']",
    ],
)
def test_a_private_part_of_a_dependency_is_found(source: str) -> None:
    assert len(dependencies_private_parts({"lightrl/models/x.py": source})) == 1
    assert dependencies_private_parts({"lightrl/compat/x.py": source}) == []


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
