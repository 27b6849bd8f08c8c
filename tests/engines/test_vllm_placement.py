"""Which devices the engine of each rank takes; nothing is started."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightrl.engines import EngineContext, VLLMEngine
from lightrl.engines.vllm import conversion


def context(rank: int) -> EngineContext:
    return EngineContext("model", rank=rank, local_rank=rank, world_size=2, device=f"cuda:{rank}")


def test_each_rank_has_a_tensor_parallel_group_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = VLLMEngine(in_process=False, tensor_parallel_size=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    groups = [conversion.environment(engine, context(rank), cuda=True)[0]["CUDA_VISIBLE_DEVICES"] for rank in range(2)]
    assert groups == ["4,5", "6,7"]
    assert conversion.arguments(engine, context(1), cuda=True)["tensor_parallel_size"] == 2


def test_an_engine_in_the_trainers_process_is_on_its_device() -> None:
    forced, _ = conversion.environment(VLLMEngine(), context(1), cuda=True)
    assert (forced["RANK"], forced["LOCAL_RANK"], forced["WORLD_SIZE"]) == ("1", "1", "2")
    assert (
        conversion.arguments(VLLMEngine(), context(1), cuda=True)["distributed_executor_backend"] == "external_launcher"
    )


def test_an_engine_takes_the_trainers_gpu_and_not_the_one_of_its_rank() -> None:
    one = EngineContext("model", device="cuda:3")  # Trainer(devices=[3]): rank 0 on GPU 3
    assert conversion.environment(VLLMEngine(), one, cuda=True)[0]["LOCAL_RANK"] == "3"


def test_devices_say_where_engines_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "8,9,10,11,12,13")
    engine = VLLMEngine(in_process=False, tensor_parallel_size=2, devices=[2, 3, 5, 4])
    groups = [conversion.environment(engine, context(rank), cuda=True)[0]["CUDA_VISIBLE_DEVICES"] for rank in range(2)]
    assert groups == ["10,11", "13,12"]


def test_what_pushes_would_miss_is_refused_before_a_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(config: dict[str, Any], lora: int = 0, **engine_args: Any) -> None:
        (tmp_path / "config.json").write_text(json.dumps(config))
        VLLMEngine(engine_args=engine_args).check(EngineContext(str(tmp_path), lora_rank=lora))

    monkeypatch.delenv("VLLM_MLA_DISABLE", raising=False)
    check({"model_type": "qwen2"})
    with pytest.raises(ValueError, match="quantization='fp8'.*engine_args.quantization"):
        check({"model_type": "qwen2"}, quantization="fp8")
    with pytest.raises(ValueError, match="quantization='awq'"):
        check({"model_type": "qwen2", "quantization_config": {"quant_method": "awq"}})
    check({"model_type": "qwen2"}, lora=8, quantization="fp8")  # whose base is never pushed
    latent = {"model_type": "deepseek_v3", "kv_lora_rank": 512}
    for config in (latent, {"model_type": "kimi", "text_config": latent}):
        with pytest.raises(ValueError, match=r"latent attention \(kv_lora_rank=512\).*VLLM_MLA_DISABLE=1"):
            check(config)
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    check(latent)


@pytest.mark.parametrize(
    ("engine", "share"),
    [
        (VLLMEngine(), 0.4),
        (VLLMEngine(in_process=False), 0.4),
        (VLLMEngine(in_process=False, devices=[1, 2]), 0.9),
        (VLLMEngine(in_process=False, gpu_memory_utilization=0.7), 0.7),
    ],
)
def test_the_memory_share_leaves_room_for_a_trainer_on_the_same_gpu(engine: VLLMEngine, share: float) -> None:
    assert conversion.arguments(engine, context(0), cuda=True)["gpu_memory_utilization"] == share


@pytest.mark.parametrize(("level", "tags"), [(1, None), (2, ["weights"])])
def test_the_trainers_unused_memory_is_given_back_before_an_engine_wakes(
    level: Any, tags: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: told.append("empty_cache"))
    engine = VLLMEngine(in_process=False, sleep_level=level)
    engine._on_cuda = True
    stand_in: Any = SimpleNamespace(sleep=told.append, wake=told.append, guarded=nullcontext)
    engine._adapter = stand_in  # type: ignore[assignment]
    engine.sleep()
    engine.wake()
    engine._wake("weights", "kv_cache")  # as a push does, after the weights
    assert told == [level, "empty_cache", tags, *(["empty_cache", ["kv_cache"]] if level == 2 else [])]
