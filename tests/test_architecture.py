"""docs/architecture.md says what is so: its tables, its files, and the files that a GRPO run enters."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import seed_everything

from lightrl.algorithms import GRPOLightningModule
from lightrl.engines.transformers.engine import TransformersEngine
from lightrl.models.spec import ModelSpec
from tests.reading import CORE, NOT_READ, PAGE, PATH, ROOT, lines, written
from tests.toys import quickstart_model, quiet_trainer, sums_data


def test_the_tables_are_those_of_the_script() -> None:
    assert PAGE.read_text() == written(PAGE.read_text()), "run `python -m tests.reading`"


def test_every_file_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`((?:lightrl|tests|docs|configs|benchmarks)/[\w/.-]+\.\w+)", PAGE.read_text()))
    assert len(named) > 5
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_blank_lines_comments_and_docstrings_are_no_code() -> None:
    head, body = (
        '"""What it is\n\n   for."""\n\nx = 1  # one\n# two\n\n',
        'def f():\n    """Says\n    so."""\n    return (\n        x\n    )\n',
    )
    assert lines(head + body) == (13, 5)


def test_a_run_enters_no_file_that_is_not_listed(tmp_path: Path) -> None:
    package, entered = str(ROOT / "lightrl") + "/", set[str]()

    def enter(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package) and frame.f_code.co_name != "<module>":
            entered.add(frame.f_code.co_filename.removeprefix(package))

    seed_everything(0, verbose=False)
    path = quickstart_model(tmp_path, num_hidden_layers=2, hidden_size=64, intermediate_size=64)
    module = GRPOLightningModule(ModelSpec(path, cpu_kernels=False))
    data = sums_data(engine=TransformersEngine(cpu_kernels=False))
    threading.setprofile(enter)
    sys.setprofile(enter)
    try:
        quiet_trainer(max_steps=2).fit(module, data)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert len(entered) > 40
    listed = {*PATH, *CORE}
    assert sorted(name for name in entered - listed if not name.startswith(NOT_READ)) == []
