"""Tokenizers and chat templates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from lightrl.data.templates import load_tokenizer, render_prompt

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'][0] }}>{{ m['content'] }}"
    "{% if not loop.last or add_generation_prompt %}/{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a>{{ suffix or '' }}{% endif %}"
)


def test_a_plain_prompt_stays_as_it_is(tokenizer: Any) -> None:
    assert render_prompt(tokenizer, "1+2=") == ("1+2=", False)
    assert render_prompt(tokenizer, "1+2=", chat_template=False) == ("1+2=", False)


def test_auto_uses_the_template_where_there_is_one(tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATE
    assert render_prompt(tokenizer, "1+2=") == ("<u>1+2=/<a>", True)
    assert render_prompt(tokenizer, "1+2=", chat_template=False) == ("1+2=", False)
    assert render_prompt(tokenizer, "1+2=", system_prompt="9")[0] == "<s>9/<u>1+2=/<a>"
    assert render_prompt(tokenizer, "1+2=", template_kwargs={"suffix": "?"})[0] == "<u>1+2=/<a>?"


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
