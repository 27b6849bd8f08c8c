"""`python -m tests.notebooks`: runs the notebooks of docs/notebooks and keeps what their cells put out."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "notebooks"


def execute(path: Path, folder: Path) -> dict[str, Any]:
    """Runs a notebook in a kernel of its own, in an empty folder, and returns it with its outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
    """
    import nbformat
    from nbclient import NotebookClient

    root = str(FOLDER.parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=550, resources={"metadata": {"path": str(folder)}}, record_timing=False)
    done: dict[str, Any] = json.loads(nbformat.writes(client.execute()))
    for cell in done["cells"]:
        if "outputs" in cell:
            cell["outputs"] = [output for output in cell["outputs"] if not _is_noise(output)]
        for output in cell.get("outputs", ()):
            output.get("data", {}).pop("text/html", None)
    return done


def _is_noise(output: dict[str, Any]) -> bool:
    """Whether it is progress, a warning, or a log line of a package that happens to be installed."""
    return output.get("name") == "stderr" or bool(re.match(r"\[\d{4}-", "".join(output.get("text", ""))))


if __name__ == "__main__":
    for notebook_path in sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as scratch:
            ran = execute(notebook_path, Path(scratch))
        notebook_path.write_text(json.dumps(ran, indent=1, ensure_ascii=False) + "\n")
        print(notebook_path)
