"""Tokenizers and chat templates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lightrl.data.templates import load_tokenizer


def changed_folder(model_dir: Path, folder: Path, **changes: Any) -> str:
    shutil.copytree(model_dir, folder, dirs_exist_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= changes
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_missing_pad_token_is_replaced_aloud(model_dir: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="no pad token. Padding with '<unk>'"):
        assert load_tokenizer(changed_folder(model_dir, tmp_path, pad_token=None)).pad_token == "<unk>"
    with pytest.warns(UserWarning, match="no pad token. Padding with '<eos>'"):
        path = changed_folder(model_dir, tmp_path, pad_token=None, unk_token=None)
        assert load_tokenizer(path).pad_token == "<eos>"
