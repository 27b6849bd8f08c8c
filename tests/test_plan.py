"""`lightrl plan` against what a run really holds, and against numbers worked out by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightrl.algorithms import CriticSpec, GRPOLightningModule, PPOLightningModule
from lightrl.callbacks import WeightSync
from lightrl.cli import main
from lightrl.cli.plan.memory import (
    ModelSize,
    Plan,
    host_memory,
    measure_model,
    memory,
    total,
    trained_parameters,
)
from lightrl.cli.plan.time import step_seconds
from lightrl.models.spec import LoraSpec, ModelSpec
from tests.toys import quickstart_model, quiet_trainer, sums_data

QWEN_1_5B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960,
    "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
    "tie_word_embeddings": True, "max_position_embeddings": 32768,
}  # fmt: skip
PARAMETERS = 1_543_714_304


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The configuration of a 1.5 B model; nothing else is there."""
    folder = tmp_path_factory.mktemp("big")
    (folder / "config.json").write_text(json.dumps(QWEN_1_5B))
    return str(folder)


class Held(Callback):
    """Bytes of weights, gradients and optimizer state, at a step."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.gradients = sum(p.grad.nbytes for p in module.parameters() if p.grad is not None)
        frozen = [m for m in (module.reference, *module.reward_models.values()) if m is not None]
        self.frozen = sum(p.nbytes for model in frozen for p in model.parameters())
        self.weights = sum(p.nbytes for p in module.parameters()) - self.frozen

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        states = module.optimizers().state.values()
        self.optimizer = sum(x.nbytes for state in states for x in state.values() if isinstance(x, Tensor))


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "grpo_lora"])
def test_weights_gradients_and_optimizer_are_those_of_a_run(algorithm: str, tmp_path: Path) -> None:
    path, rank = quickstart_model(tmp_path), 4 if algorithm == "grpo_lora" else 0
    if rank:
        pytest.importorskip("peft")
    lora = LoraSpec(r=rank) if rank else None
    spec = ModelSpec(path, lora=lora)
    adam: dict[str, Any] = {"optimizer": lambda params: torch.optim.AdamW(params, lr=1e-3)}
    ppo = algorithm == "ppo"
    module = PPOLightningModule(spec, critic=CriticSpec(), **adam) if ppo else GRPOLightningModule(spec, **adam)
    held = Held()
    quiet_trainer(callbacks=[WeightSync(), held]).fit(module, sums_data(rollouts_per_epoch=1))
    size = measure_model(path, compute=torch.float32)
    case = Plan(size, critic=ppo, gpus=1, precision="32-true", lora=rank, frozen_bytes=4, engine=False)
    parts = memory(case, "ddp")
    for name in ("weights", "gradients", "optimizer"):
        assert parts[name] == pytest.approx(getattr(held, name), rel=0.01), name
    assert parts["reference"] == held.frozen


def test_parts_under_each_strategy(big: str) -> None:
    size = measure_model(big, compute=torch.bfloat16)
    case = Plan(size, gpus=8)
    both = PARAMETERS + PARAMETERS + 1537
    assert trained_parameters(case) == both
    ddp, fsdp2 = memory(case, "ddp"), memory(case, "fsdp2")
    assert (ddp["weights"], ddp["gradients"], ddp["optimizer"]) == (4 * both, 4 * both, 8 * both)
    assert ddp["reference"] == 2 * PARAMETERS and ddp["gathered"] == 0
    assert (fsdp2["weights"], fsdp2["gradients"], fsdp2["optimizer"]) == (both / 2, 4 * both, both)
    assert fsdp2["reference"] == PARAMETERS / 4 and fsdp2["gathered"] == 4 * (2 * size.block + size.outside)
    zero1, zero3 = memory(case, "zero1"), memory(case, "zero3")
    assert (zero1["weights"], zero1["gradients"], zero1["optimizer"]) == (2 * both, 2 * both, 12 * both / 8)
    assert (zero3["weights"], zero3["gradients"], zero3["optimizer"]) == (2 * both / 8, 2 * both, 12 * both / 8)
    offload = memory(case, "zero3_offload")
    assert offload["weights"] == offload["optimizer"] == 0 and host_memory(case, "zero3_offload") == 16 * both
    assert ddp["engine"] == 2 * PARAMETERS and ddp["KV cache"] == 2 * 28672 / 2 * 64 * 2048


QWEN_VL_3B = QWEN_1_5B | {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl", "hidden_size": 2048,
    "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {
        "model_type": "qwen2_5_vl", "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
        "patch_size": 14, "spatial_merge_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
        "out_hidden_size": 2048,
    },
}  # fmt: skip


def test_vision_models_are_measured(tmp_path: Path) -> None:
    """3.75 B parameters, 0.67 B of them see; as the card of Qwen2.5-VL-3B says."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN_VL_3B))
    three = measure_model(str(tmp_path), compute=torch.bfloat16)
    assert (three.parameters, three.vision) == (3_754_622_976, 668_684_288)
    assert (three.layers, three.kv_width) == (36, 2 * 36 * 2 * 128)
    case = Plan(three, critic=False, frozen_vision=True)
    assert trained_parameters(case) == 3_754_622_976 - 668_684_288


SHAPES = {
    "7 B": (3584, 18944, 28, 28, 4, 152064, False),
    "72 B": (8192, 29568, 80, 64, 8, 152064, False),
}  # of Qwen2.5


def size_of(label: str, folder: Path) -> ModelSize:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = QWEN_1_5B | dict(zip((*names, "vocab_size", "tie_word_embeddings"), SHAPES[label], strict=True))
    (folder / "config.json").write_text(json.dumps(config))
    return measure_model(str(folder), compute=torch.bfloat16)


def test_gradients_of_large_models_are_in_shards(tmp_path: Path) -> None:
    """7 B on 8 GPUs of 80 GB and 72 B on 64 fit beside an engine that sleeps; with whole gradients they did not."""
    seven, seventy = size_of("7 B", tmp_path), size_of("72 B", tmp_path)
    case = Plan(seven, critic=False, engine=False)
    fsdp2, zero3, zero1 = (memory(case, name) for name in ("fsdp2", "zero3", "zero1"))
    assert fsdp2["gradients"] == 4 * seven.parameters / 8 and zero3["gradients"] == 2 * seven.parameters / 8
    assert zero1["gradients"] == 2 * seven.parameters and zero1["gathered"] == 0
    assert fsdp2["gathered"] == 4 * (3 * seven.block + 2 * seven.outside)
    assert f"{total(fsdp2) / 2**30:.0f}" == "43"  # as docs/memory.md says
    assert (
        f"{total(memory(replace(case, gpus=64, actor=seventy, micro_batch_tokens=2048), 'fsdp2')) / 2**30:.0f}" == "66"
    )
    adapter = memory(replace(case, lora=32), "fsdp2")
    assert adapter["gradients"] == 4 * seven.lora(32) / 8 and adapter["gathered"] < fsdp2["gathered"]


def test_command_prints_a_table_and_a_recommendation(big: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--model", big, "--gpus", "8", "--gpu_memory", "80"])
    out = capsys.readouterr().out
    assert "(PPO, 1.54B parameters, 8 x 80 GiB)" in out and "zero3_offload" in out and "KV cache" in out
    assert "Use ddp" in out
    (tokens,) = re.findall(r"Micro-batches can have up to (\d+) tokens", " ".join(out.split()))
    assert int(tokens) >= 16384, "what was asked for fits"
    main(["plan", f"--model={big}/config.json", "--gpu-memory=48", "--engine", "elsewhere"])
    assert "Use fsdp2" in capsys.readouterr().out
    main(["plan", "--model", big, "--trajectories", "1024"])
    assert "Estimated seconds per step" in capsys.readouterr().out
    main(["plan", "--model", big, "--gpu_memory", "2", "--algorithm", "grpo"])
    out = capsys.readouterr().out
    assert "No strategy fits. Try" in out and "--lora 32" in out


SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    "tie_word_embeddings": True, "max_position_embeddings": 8192,
}  # fmt: skip
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 640,
    "intermediate_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 256, "vocab_size": 262144, "sliding_window": 512, "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}  # fmt: skip


def test_the_seconds_of_a_step_by_hand() -> None:
    """Two engines with 4 sequences each at 5e14 operations and 1e12 bytes per second: 4 prompts of 1e12 operations take
    8 ms; 1,000 steps read 2e9 + 4 x 1,000 x 1e5 = 2.4e9 bytes, 2.4 ms, and need 2 ms more. 12,000 tokens x 2e9 and
    4 x 10 x 1,000 x 8 x 1,500^2 / 2 = 3.6e11 are 2.436e13 operations for a forward; one of old log-probs and four
    (recomputation) for the update, on 2 GPUs with 4e14."""
    size = ModelSize(10**9, 0, 0, 0, 0, (), 10, 1000, 0, 50_000, 0.0, 0.0, 0.0)
    case = Plan(size, reference=False, gpus=2, sequences=4, length=1500)
    assert step_seconds(case, 8, 1000, 1000, 1 / 0.7) == pytest.approx((0.008 + 4.4, 5 * 2.436e13 / 8e14))
    slots = step_seconds(replace(case, sequences=2), 8, 1000, 1000, 1 / 0.7)
    assert slots[0] == pytest.approx(0.008 + 2 * 4.2)  # two batches of 1,000 steps of 2.2 + 2 ms
    plain = replace(case, checkpointing=False, reference=True)
    assert step_seconds(plain, 8, 1000, 1000, 1 / 0.7)[1] == pytest.approx(5 * 2.436e13 / 8e14)
