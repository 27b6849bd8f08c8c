"""Samples show what the engine was asked: tools, system prompts, and a program's own first request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from lightrl.callbacks import CompletionLogger, RolloutWriter
from lightrl.callbacks.rollout_writer import load_rollouts
from lightrl.engines.transformers.engine import TransformersEngine
from tests.rollout.tasks import Letters, asked, chat_model, fit

TOOL = {"type": "function", "function": {"name": "look_up", "description": "Looks up.", "parameters": {}}}


class WithTools(Letters):
    """The same with a tool that the policy is told about."""

    tools = (TOOL,)


def program(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """Asks something else than its row says."""
    system = {"role": "system", "content": "be brief"}
    return len(asked([system, {"role": "user", "content": f"count {row['word']}"}], base_url, api_key)) / 10


class Remembers(TransformersEngine):
    """Keeps every prompt that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[list[int]] = []

    def check_request(self, request: Any) -> None:
        self.prompts.append(list(request.token_ids))
        super().check_request(request)


@pytest.mark.parametrize(
    ("how", "words"), [({"environment": WithTools}, ["look_up"]), ({"program": program}, ["be brief", "count "])]
)
def test_samples_show_what_the_engine_was_asked(how: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    path, engine = chat_model(tmp_path / "model"), Remembers()
    save = RolloutWriter(1, dirpath=str(tmp_path / "rollouts"), evaluate=False)
    log = CompletionLogger(every_n_rollouts=1, num_samples=4, terminal=False)
    fit(path, [log, save], trainer={"default_root_dir": str(tmp_path)}, engine=engine, canary=False, **how)
    tokenizer = AutoTokenizer.from_pretrained(path)
    seen = {tokenizer.decode(ids) for ids in engine.prompts}
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    _, saved = load_rollouts(tmp_path / "rollouts" / "rollout=000001")
    assert len(samples) == 8 and len(saved) == 16
    for record in (*samples, *saved):
        assert record["prompt"] in seen
        assert all(word in record["prompt"] for word in words), record["prompt"]
