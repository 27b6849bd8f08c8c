"""The engine's memory on a CPU follows from the run's rows and limits, so that real models start with all defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from lightrl.algorithms import GRPOLightningModule
from lightrl.data.prompts import PromptMixture, PromptSource
from lightrl.engines import EngineContext, VLLMEngine
from lightrl.engines.vllm import conversion
from lightrl.models.spec import ModelSpec
from lightrl.records import SamplingParams
from lightrl.rollout import Evaluation
from tests.toys import QUICKSTART_MODEL, quickstart_model, quiet_trainer, sums_data

TOKEN = 2 * 24 * 2 * 64 * 4
"""Bytes that a token of the model below leaves in a float32 cache: keys and values, layers, heads, width."""


@pytest.fixture
def qwen(tmp_path: Path) -> str:
    """The configuration of Qwen2.5-0.5B, whose context is 32k."""
    config = {"model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14}
    config |= {"num_key_value_heads": 2, "max_position_embeddings": 32768, "vocab_size": 151936}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def sized(model: str, free: int, monkeypatch: pytest.MonkeyPatch, **context: Any) -> tuple[int, int]:
    """(max_model_len, tokens that the cache holds) of an engine with all defaults."""
    monkeypatch.setattr(conversion, "_free_memory", lambda: free)
    arguments = conversion.arguments(VLLMEngine(), EngineContext(model, max_new_tokens=64, **context), cuda=False)
    return arguments["max_model_len"], arguments["kv_cache_memory_bytes"] // TOKEN


def test_the_cache_holds_the_runs_sequences(qwen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    length, tokens = sized(qwen, 64 << 30, monkeypatch, max_prompt_tokens=100, max_sequences=64)
    assert length == 164 and tokens == 64 * 192 + 32  # six blocks of 32 for each, and the one that vLLM keeps
    length, tokens = sized(qwen, 2 << 30, monkeypatch, max_prompt_tokens=100, max_sequences=64)
    assert length == 164 and 256 < tokens <= (512 << 20) // TOKEN  # a quarter of the free memory
    length, tokens = sized(qwen, 16 << 30, monkeypatch, max_prompt_tokens=32000, max_sequences=64)
    assert length == 32064 and tokens >= 32064


def test_a_length_that_is_not_known_is_what_the_memory_holds(qwen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    length, tokens = sized(qwen, 64 << 30, monkeypatch)
    assert length == -1 and tokens >= 32768
    length, tokens = sized(qwen, 1 << 30, monkeypatch)
    assert length == -1 and 1024 < tokens <= (256 << 20) // TOKEN


@pytest.mark.vllm
def test_vllm_shortens_sequences_of_unknown_length_to_its_cache(tied_folder: Path) -> None:
    pytest.importorskip("vllm")
    engine = VLLMEngine(engine_args={"kv_cache_memory_bytes": 4 * 32 * 2 * 2 * 32 * 4, "max_model_len": -1})
    engine.start(EngineContext(str(tied_folder)))
    try:
        assert 32 <= engine.max_model_len <= 128
    finally:
        engine.close()


def test_the_longest_prompt_is_that_of_the_rows() -> None:
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART_MODEL)
    tokenizer.chat_template = "{% for m in messages %}00{{ m.content }}{% endfor %}="
    rows = [{"prompt": "1" * (3 + i % 7)} for i in range(40)]

    def longest(rows: list[dict[str, Any]], **settings: Any) -> int | None:
        return PromptSource(rows=rows, **settings).load(tokenizer).max_prompt_tokens

    exact = max(map(len, PromptSource(rows=rows).load(tokenizer).rows(range(40)).token_ids))
    assert longest(rows) == exact and longest(rows, max_prompt_tokens=5, overlong="truncate_left") == 5
    many = [*rows, *({"prompt": "12+34="} for _ in range(600))]
    bound = longest(many)
    assert bound is not None and exact <= bound <= exact + 100, "the bytes of rows that were not tokenized"
    chat = [{"prompt": [{"role": "user", "content": "1" * 30}]}]
    assert longest(chat) == len(PromptSource(rows=chat).load(tokenizer).rows([0]).token_ids[0])
    mixture = PromptMixture([PromptSource(rows=rows), PromptSource(rows=chat)]).load(tokenizer)
    assert mixture.max_prompt_tokens == longest(chat)


def test_a_run_sizes_its_engine_by_all_of_its_prompts(tmp_path: Path) -> None:
    short = PromptSource(rows=[{"prompt": "1+2=", "answer": "3"}], max_prompt_tokens=8)
    data = sums_data(
        prompts=short,
        evaluation=Evaluation(
            [{"prompt": "1" * 40, "answer": "3"}],  # longer, and without a limit
            SamplingParams(max_new_tokens=9),
            group_size=4,
            batch_size=5,
        ),
        group_size=2,
        prompts_per_rollout=3,
    )
    module = GRPOLightningModule(ModelSpec(quickstart_model(tmp_path)))
    trainer = quiet_trainer()
    trainer.strategy.connect(module)
    module.trainer = trainer
    data.trainer = trainer
    data.setup("fit")
    context = data.host.context()
    assert context.max_prompt_tokens is not None and 40 <= context.max_prompt_tokens <= 42
    assert (context.max_new_tokens, context.max_sequences) == (9, 20)
