"""`python -m tests.notebooks`: runs the notebooks of docs/notebooks and keeps what their cells put out."""

from __future__ import annotations

import json
import os
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
    client = NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(folder)}}, record_timing=False)
    done: dict[str, Any] = json.loads(nbformat.writes(client.execute()))
    for cell in done["cells"]:
        if "outputs" in cell:
            cell["outputs"] = [output for output in cell["outputs"] if output.get("name") != "stderr"]
        for output in cell.get("outputs", ()):
            output.get("data", {}).pop("text/html", None)
    return done


if __name__ == "__main__":
    for notebook_path in sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as scratch:
            ran = execute(notebook_path, Path(scratch))
        notebook_path.write_text(json.dumps(ran, indent=1, ensure_ascii=False) + "\n")
        print(notebook_path)
