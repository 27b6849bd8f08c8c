"""The notebooks of the documentation run, learn what they say, and are pages with what they put out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from scripts.docs_notebooks import page
from tests.notebooks import FOLDER, execute

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
GAIN = {"first_run": 0.4, "environment": 0.3}
"""How much `reward/mean` rises at least, from the first rollout to the mean of the last five."""


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_its_policy_learns(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = json.loads(path.read_text())
    question = "import json; print(json.dumps([metrics['reward/mean'] for metrics in history.metrics]))"
    asking = {"cell_type": "code", "id": "asking", "metadata": {}, "source": question, "outputs": []}
    copy = tmp_path / path.name
    copy.write_text(json.dumps({**notebook, "cells": [*notebook["cells"], {**asking, "execution_count": None}]}))
    rewards = json.loads("".join(execute(copy, tmp_path)["cells"][-1]["outputs"][0]["text"]))
    assert sum(rewards[-5:]) / 5 - rewards[0] > GAIN[path.stem], rewards


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_a_page_with_the_outputs_of_a_run(path: Path) -> None:
    notebook = json.loads(path.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))  # from top to bottom
    shown = page(notebook, path.name)
    assert shown.count("```python") == len(code) and "](data:image/png;base64," in shown
    assert re.search(rf"\[{path.name}\]\({path.name}\)", shown) and shown.startswith("# ")
    assert "Traceback" not in shown and str(Path.home()) not in shown
