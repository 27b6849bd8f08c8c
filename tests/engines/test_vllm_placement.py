"""Which devices the engine of each rank takes; nothing is started."""

from __future__ import annotations

import pytest

from lightrl.engines import EngineContext, VLLMEngine


def context(rank: int) -> EngineContext:
    return EngineContext("model", rank=rank, local_rank=rank, world_size=2, device=f"cuda:{rank}")


def test_each_rank_has_a_tensor_parallel_group_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = VLLMEngine(in_process=False, tensor_parallel_size=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    groups = [engine._environment(context(rank), cuda=True)[0]["CUDA_VISIBLE_DEVICES"] for rank in range(2)]
    assert groups == ["4,5", "6,7"]
    assert engine._arguments(context(1), cuda=True)["tensor_parallel_size"] == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(ValueError, match="tensor_parallel_size=2: cuda:1's engine needs GPUs 2 to 3 of the 2 visible"):
        engine._environment(context(1), cuda=True)


def test_an_engine_in_the_trainers_process_is_on_its_device() -> None:
    forced, _ = VLLMEngine()._environment(context(1), cuda=True)
    assert (forced["RANK"], forced["LOCAL_RANK"], forced["WORLD_SIZE"]) == ("1", "1", "2")
    assert VLLMEngine()._arguments(context(1), cuda=True)["distributed_executor_backend"] == "external_launcher"
