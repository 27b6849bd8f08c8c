"""A mixture of experts on vLLM: transformers holds its experts fused, and they arrive as vLLM reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from lightrl.callbacks import WeightSync
from lightrl.engines import VLLMEngine
from lightrl.models.spec import ModelSpec
from tests.engines.test_weight_sync import Gaps, ppo
from tests.models.test_routing import moe
from tests.toys import quiet_trainer, sums_data

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("kind", "in_process"), [("Qwen3Moe", True), pytest.param("Mixtral", False, marks=pytest.mark.long)]
)
def test_engine_and_trainer_agree_after_every_update_of_experts(
    kind: str, in_process: bool, tied_folder: Path, tmp_path: Path
) -> None:
    AutoTokenizer.from_pretrained(tied_folder).save_pretrained(tmp_path)
    of_vllm = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    moe(kind, vocab_size=50, eos_token_id=1, bos_token_id=2, **of_vllm).save_pretrained(tmp_path)
    engine, gaps = VLLMEngine(in_process=in_process, engine_args={"kv_cache_memory_bytes": 32 << 20}), Gaps()
    module = ppo(ModelSpec(str(tmp_path)))
    quiet_trainer(callbacks=[WeightSync(), gaps]).fit(module, sums_data(engine=engine))
    assert module.policy_version == 8
    assert max(gaps.gaps) <= 1e-4 and max(gaps.canaries) <= 1e-4
