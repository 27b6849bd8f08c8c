"""The quickstart's task and its model folder."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from lightrl.data.arithmetic import ArithmeticRows
from lightrl.data.prompts import PromptSource


def test_rows_are_right_sums_of_fixed_width() -> None:
    for row in ArithmeticRows(size=500)():
        a, b = row["prompt"].removesuffix("=").split("+")
        assert len(a) == len(b) == 2
        assert len(row["answer"]) == 3
        assert int(a) + int(b) == int(row["answer"])
        assert row["completion"] == row["answer"]


def test_training_and_evaluation_never_share_a_sum() -> None:
    train = ArithmeticRows(split="train", seed=3)()["prompt"]
    held_out = ArithmeticRows(split="eval", seed=3)()["prompt"]
    assert len(train) == 10_000 - 256
    assert len(held_out) == 256
    assert len({*train, *held_out}) == 10_000


def test_the_tokenizer_of_the_quickstart_gives_one_token_per_character(tokenizer: Any) -> None:
    prompts = PromptSource(rows=ArithmeticRows(size=3)).load(tokenizer).batch(0, 3)
    assert [len(ids) for ids in prompts.token_ids] == [6, 6, 6]
    assert prompts.columns["completion"] == prompts.columns["answer"]
    text = "12+34=046 -*/.,:;?!()<>\n#789"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer(text)["input_ids"]) == len(text)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, 2)


def test_the_model_folder_is_what_the_script_writes(root: Path, model_dir: Path, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("make_model", root / "scripts" / "make_quickstart_model.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in model_dir.iterdir()}
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        made, committed = (json.loads((folder / name).read_text()) for folder in (tmp_path, model_dir))
        made.pop("transformers_version", None), committed.pop("transformers_version", None)
        assert made == committed, name
