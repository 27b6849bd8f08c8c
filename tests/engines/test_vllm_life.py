"""Start, close and start again in one process; the trainer's process group, environment and threads survive it."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightrl.engines import EngineContext, VLLMEngine
from lightrl.engines.vllm import conversion
from tests import forks
from tests.engines.conftest import build_model, change
from tests.engines.test_vllm_sync import canary_gap, sampled_gap

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]


def main(place: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{place}/store", rank=0, world_size=1)
    environment, set_num_threads = dict(os.environ), torch.set_num_threads
    gaps = []
    for tied in (False, True):
        folder = place / f"model{tied}"
        build_model(folder, tied=tied)
        # A folder without weights: the engine starts with dummy ones, and the first sync brings the policy's.
        for file in folder.glob("*.safetensors") if tied else ():
            file.rename(folder / "weights.bak")
        torch.manual_seed(3)
        model = build_model(place / "trainer", tied=tied)
        state = torch.random.get_rng_state()
        engine = VLLMEngine()
        engine.start(EngineContext(str(folder), max_prompt_tokens=32, max_new_tokens=32, random_init=tied))
        engine.start(EngineContext("elsewhere"))  # started: nothing happens
        assert torch.equal(state, torch.random.get_rng_state())
        change(model)
        before = canary_gap(engine, model)
        engine.load_weights(model.named_parameters(), policy_version=0)
        gaps.append([before, canary_gap(engine, model), *(sampled_gap(engine, model, t) for t in (1.0, 0.7))])
        engine.close()
        engine.close()
        assert not engine.started and engine.policy_version == -1
        assert torch.distributed.is_initialized() and torch.set_num_threads is set_num_threads
        ours = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
        assert ours == {k: v for k, v in environment.items() if not k.startswith("VLLM_")}
        value = torch.ones(1)
        torch.distributed.all_reduce(value)
    for before, canary, hot, cool in gaps:
        assert before > 0.5 and max(canary, hot, cool) <= 5e-5


@pytest.mark.long
def test_cycles_in_one_process(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    process = forks.Fork(__name__, str(tmp_path))
    assert process.poll(550) == 0, process.printed()[-3000:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2"),
        ({"devices": [1]}, "devices="),
    ],
)
def test_contradictions_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VLLMEngine(**arguments)


def test_engine_arguments_win_and_flags_arrive(tied_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = EngineContext(str(tied_folder), dtype="bfloat16", max_prompt_tokens=10, max_new_tokens=20, seed=2**40)
    plain = conversion.arguments(VLLMEngine(), context, cuda=False)
    assert plain["model"] == str(tied_folder) and plain["dtype"] == "bfloat16" and plain["max_model_len"] == 30
    assert plain["enforce_eager"] and "kv_cache_memory_bytes" in plain and "load_format" not in plain
    engine = VLLMEngine(
        dtype="float32", max_model_len=99, gpu_memory_utilization=0.3,
        sleep_level=1, engine_args={"enforce_eager": False, "max_num_seqs": 4},
    )  # fmt: skip
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    with pytest.raises(ValueError, match="fire_temperature"):
        conversion.arguments(engine, replace(context, fire=True), cuda=True)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    chosen = conversion.arguments(engine, replace(context, fire=True), cuda=True)
    assert (chosen["dtype"], chosen["max_model_len"]) == ("float32", 99)
    assert chosen["gpu_memory_utilization"] == 0.3 and "kv_cache_memory_bytes" not in chosen
    assert chosen["enable_sleep_mode"] and chosen["logits_processors"] and chosen["max_num_seqs"] == 4
    assert chosen["enforce_eager"] is False
    dummy = conversion.arguments(VLLMEngine(), EngineContext(str(tied_folder), random_init=True), cuda=False)
    assert dummy["load_format"] == "dummy"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
