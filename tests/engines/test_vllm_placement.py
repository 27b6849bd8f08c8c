"""Which devices the engine of each rank takes; nothing is started."""

from __future__ import annotations

import pytest

from lightrl.engines import EngineContext, VLLMEngine
from lightrl.engines._vllm_setup import engine_arguments, engine_environment


def context(rank: int) -> EngineContext:
    return EngineContext("model", rank=rank, local_rank=rank, world_size=2, device=f"cuda:{rank}")


def test_each_rank_has_a_tensor_parallel_group_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = VLLMEngine(in_process=False, tensor_parallel_size=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    groups = [engine_environment(engine, context(rank), cuda=True)[0]["CUDA_VISIBLE_DEVICES"] for rank in range(2)]
    assert groups == ["4,5", "6,7"]
    assert engine_arguments(engine, context(1), cuda=True)["tensor_parallel_size"] == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(ValueError, match="tensor_parallel_size=2: cuda:1's engine needs GPUs 2 to 3 of the 2 visible"):
        engine_environment(engine, context(1), cuda=True)


def test_an_engine_in_the_trainers_process_is_on_its_device() -> None:
    forced, _ = engine_environment(VLLMEngine(), context(1), cuda=True)
    assert (forced["RANK"], forced["LOCAL_RANK"], forced["WORLD_SIZE"]) == ("1", "1", "2")
    assert engine_arguments(VLLMEngine(), context(1), cuda=True)["distributed_executor_backend"] == "external_launcher"
