"""`benchmarks/work.py` counts what a layout computes, and `benchmarks/memory.py` what a plan expects."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.test_plan import GEMMA3, SMOLLM2

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
LENGTHS = {"shared": 8, "prompts": [20, 32, 27], "completions": [[8, 20, 31, 16], [5, 9, 12, 3], [14, 14, 2, 30]]}
LAYERS, HEADS, WIDTH = 3, 4, 256


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("work")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=1024, hidden_size=WIDTH, intermediate_size=1024, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=256,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def test_the_ideal_is_what_a_walk_over_all_tokens_counts(work: Any, model: str) -> None:
    """Every stretch of tokens that rows share once, a key per ancestor and token before, and a logit per target."""
    prefixes = {()}
    ids, attention, response, _ = work.rows_of(LENGTHS, 1024)
    for row, mask in zip(ids.tolist(), attention.sum(1).tolist(), strict=True):
        prefixes |= {tuple(row[:i]) for i in range(1, mask)}  # the last token is a target only
    prefixes.remove(())
    lm = LlamaForCausalLM.from_pretrained(model)
    found = work.ideal(LENGTHS, lm)
    assert found["tokens"] == len(prefixes) and found["trained"] == int(response.sum())
    assert found["attention"] == 12 * WIDTH * LAYERS * sum(map(len, prefixes))
    block = 2 * WIDTH * WIDTH + 2 * WIDTH * 128 + 3 * WIDTH * 1024
    assert found["linear"] == 6 * LAYERS * block * len(prefixes)
    assert found["head"] == 6 * 1024 * WIDTH * int(response.sum())


def test_layouts_compute_little_more_than_the_ideal(work: Any, model: str) -> None:
    table: dict[str, Any] = {}
    for layout in work.LAYOUTS:
        table |= work.measure(model, LENGTHS, layout, 16384)
    to_ideal = {layout: row["to_ideal"] for layout, row in work.ratios(LENGTHS, table).items()}
    assert 1 <= to_ideal["shared_prefix"] <= 1.05 < to_ideal["packed"] < to_ideal["padded"]
    assert table["shared_prefix"]["tokens"] == table["ideal"]["tokens"]
    assert not any(table[layout]["host_reads"] for layout in work.LAYOUTS)
    # Attention is seen: two products forward and five backward over the whole rectangle.
    rows, width = work.rows_of(LENGTHS, 1024)[0].shape
    assert table["padded"]["attention_kernels"] == 14 * WIDTH * LAYERS * rows * width**2


def test_two_blocks_tell_what_all_of_them_take(work: Any, model: str) -> None:
    some, whole = (work.measure(model, LENGTHS, "shared_prefix", 16384, each)["shared_prefix"] for each in (0, 1))
    assert some["peak_bytes"] == pytest.approx(whole["peak_bytes"], rel=0.02)
    assert {**some, "peak_bytes": 0} == {**whole, "peak_bytes": 0}


def test_host_reads_and_live_bytes_are_counted(work: Any) -> None:
    given, known = torch.ones(1000), torch.ones(3)

    def reads() -> None:
        doubled = given * 2
        doubled[0].item()
        doubled[:3].tolist()
        bool(doubled.sum() > 1)
        doubled.nonzero()
        known.tolist()
        known.sum().item()
        del doubled
        given + 1

    found = work.count(reads, [given])
    assert sum(found["host_reads"].values()) == 4
    assert 8000 <= found["peak_bytes"] < 17000  # of the two large results one lives at a time


def test_the_committed_work_meets_its_bars_and_is_shown(work: Any) -> None:
    result, lengths = (json.loads((RESULTS / name).read_text()) for name in ("work.json", "lengths.json"))
    assert work.markdown(result) in (ROOT / "benchmarks" / "README.md").read_text()
    for task, found in result["tasks"].items():
        assert found["ratios"] == work.ratios(lengths[task], found["table"])
        assert found["ratios"]["shared_prefix"]["to_ideal"] <= 1.05
        assert found["ratios"]["shared_prefix"]["reads_per_micro_batch"] == 0


def test_plans_are_within_half_of_the_committed_peaks_of_real_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Full, LoRA, and checkpointing: a factor of 1.5 at most, either way."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    memory: Any = importlib.import_module("memory")
    rows = json.loads((RESULTS / "memory.json").read_text())["rows"]
    assert memory.table(rows) in (ROOT / "benchmarks" / "README.md").read_text()
    assert {row["model"] for row in rows} == set(memory.MODELS)
    for name, config in (("smollm2", SMOLLM2), ("gemma3", GEMMA3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    for row in rows:
        assert 1 / 1.5 <= memory.planned(str(tmp_path / row["model"]), row) / row["peak_gb"] <= 1.5, row
