"""The README's Python blocks run as they stand, on real vLLM where it is installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.toys import quickstart_model

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parent.parent / "README.md").read_text(), re.DOTALL)


@pytest.mark.vllm
def test_the_python_blocks_of_the_readme_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    monkeypatch.chdir(tmp_path)
    quickstart_model(tmp_path / "outputs" / "quickstart" / "sft" / "model")
    assert len(BLOCKS) == 2 and len(BLOCKS[0].splitlines()) <= 20
    names: dict[str, object] = {"__name__": "readme"}
    for block in BLOCKS:
        exec(block, names)
    trainer = names["trainer"]
    assert trainer.global_step == 8  # type: ignore[attr-defined]  # 4 rollouts x 2 epochs
    assert type(names["module"]).__name__ == "PositiveOnlyGRPO"
