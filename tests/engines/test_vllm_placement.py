"""Which devices the engine of each rank takes; nothing is started."""

from __future__ import annotations

import pytest

from lightrl.engines import EngineContext, VLLMEngine


def context(rank: int) -> EngineContext:
    return EngineContext("model", rank=rank, local_rank=rank, world_size=2, device=f"cuda:{rank}")


def test_each_rank_has_a_tensor_parallel_group_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = VLLMEngine(in_process=False, tensor_parallel_size=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    groups = [engine.environment(context(rank), cuda=True)[0]["CUDA_VISIBLE_DEVICES"] for rank in range(2)]
    assert groups == ["4,5", "6,7"]
    assert engine.arguments(context(1), cuda=True)["tensor_parallel_size"] == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(ValueError, match="tensor_parallel_size=2: cuda:1's engine needs GPUs 2 to 3 of the 2 visible"):
        engine.environment(context(1), cuda=True)


def test_an_engine_in_the_trainers_process_is_on_its_device() -> None:
    forced, _ = VLLMEngine().environment(context(1), cuda=True)
    assert (forced["RANK"], forced["LOCAL_RANK"], forced["WORLD_SIZE"]) == ("1", "1", "2")
    assert VLLMEngine().arguments(context(1), cuda=True)["distributed_executor_backend"] == "external_launcher"


def test_an_engine_takes_the_trainers_gpu_and_not_the_one_of_its_rank() -> None:
    one = EngineContext("model", device="cuda:3")  # Trainer(devices=[3]): rank 0 on GPU 3
    assert VLLMEngine().environment(one, cuda=True)[0]["LOCAL_RANK"] == "3"


def test_devices_say_where_engines_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "8,9,10,11,12,13")
    engine = VLLMEngine(in_process=False, tensor_parallel_size=2, devices=[2, 3, 5, 4])
    groups = [engine.environment(context(rank), cuda=True)[0]["CUDA_VISIBLE_DEVICES"] for rank in range(2)]
    assert groups == ["10,11", "13,12"]
    few = VLLMEngine(in_process=False, tensor_parallel_size=2, devices=[2, 3])
    with pytest.raises(ValueError, match="rank 1 of this machine needs 4 of them"):
        few.environment(context(1), cuda=True)
    with pytest.raises(ValueError, match="in_process=False"):
        VLLMEngine(devices=[1])
    with pytest.raises(ValueError, match="different numbers"):
        VLLMEngine(in_process=False, devices=[1, 1])


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
    assert engine.arguments(context(0), cuda=True)["gpu_memory_utilization"] == share
