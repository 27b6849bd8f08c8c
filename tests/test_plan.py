"""`lightrl plan` against what a run really holds, and against numbers worked out by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightrl.algorithms import CriticSpec, GRPOLightningModule, PPOLightningModule
from lightrl.callbacks import WeightSync
from lightrl.cli import main
from lightrl.cli.config_files import expand_configs
from lightrl.cli.plan.memory import (
    USABLE,
    ModelSize,
    Plan,
    activations,
    host_memory,
    measure_model,
    memory,
    total,
    trained_parameters,
)
from lightrl.cli.plan.time import step_seconds
from lightrl.models.loading import load_causal_lm
from lightrl.models.policy import PolicyModel
from lightrl.models.spec import LoraSpec, ModelSpec
from tests.rows import as_rows
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


def test_vision_models_are_measured(tmp_path: Path) -> None:
    """3.75 B parameters, 0.67 B of them see; as the card of Qwen2.5-VL-3B says."""
    three = measure_model(model_of("Qwen/Qwen2.5-VL-3B-Instruct", tmp_path), compute=torch.bfloat16)
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
    """With a sleeping engine, 7B fits on 8 GPUs of 80 GB, and 72B on 64. With whole gradients, they would not."""
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


@contextmanager
def saved_bytes(model: nn.Module) -> Iterator[dict[int, int]]:
    """Storage -> bytes of what autograd keeps, weights left out."""
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    saved: dict[int, int] = {}
    kept = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)  # a storage that is freed could lend its address to another
        if tensor.untyped_storage()._cdata not in own:
            saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield saved


@pytest.mark.parametrize(
    ("precision", "checkpointing", "family"),
    [
        *[(p, c, "Qwen2") for p in ("32-true", "bf16-mixed") for c in (False, True)],
        *[(p, False, "Olmoe") for p in ("32-true", "bf16-mixed")],
    ],
)
def test_activations_are_about_those_of_a_forward(
    precision: Any, checkpointing: bool, family: str, tmp_path: Path
) -> None:
    """Within a quarter: the layouts keep some index tensors, and checkpointing a block's arguments."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2} if family == "Olmoe" else {}
    path = quickstart_model(tmp_path, family=family, **experts)
    mixed = precision == "bf16-mixed"
    model = PolicyModel(
        load_causal_lm(ModelSpec(path, gradient_checkpointing=checkpointing), trainable=True), layout="packed"
    )
    rows, length = 16, 64
    ids = torch.randint(3, 20, (rows, length))
    mask = torch.ones(rows, length, dtype=torch.bool)
    response = mask.clone()
    response[:, :8] = False
    with saved_bytes(model) as saved, torch.autocast("cpu", torch.bfloat16, enabled=mixed, cache_enabled=False):
        out = model(as_rows(ids, mask, response))
    assert out.logprobs.requires_grad
    size = measure_model(path, compute=torch.bfloat16 if mixed else torch.float32)
    case = Plan(size, critic=False, precision=precision, micro_batch_tokens=rows * length, checkpointing=checkpointing)
    block = size.saved_per_token * rows * length + size.saved_weights
    expected = activations(case) - block * checkpointing  # the block at work comes in the backward only
    assert sum(saved.values()) == pytest.approx(expected, rel=0.25)


MODELS: dict[str, dict[str, Any]] = {  # from the models' cards
    "Qwen/Qwen2.5-0.5B-Instruct": QWEN_1_5B | {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    },
    "Qwen/Qwen2.5-1.5B-Instruct": QWEN_1_5B,
    "Qwen/Qwen2.5-VL-3B-Instruct": QWEN_1_5B | {
        "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
    },
    "Qwen/Qwen2.5-VL-7B-Instruct": QWEN_1_5B | {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    },
}  # fmt: skip


VISION = {
    "model_type": "qwen2_5_vl", "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
    "patch_size": 14, "spatial_merge_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
}  # fmt: skip


def model_of(name: str, folder: Path) -> str:
    """A folder with the model's configuration, which base models share with their instructed ones."""
    config = dict(MODELS[name if "-Instruct" in name else f"{name}-Instruct"])
    if "-VL-" in name:
        config |= {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
        config["rope_scaling"] = {"type": "mrope", "mrope_section": [16, 24, 24]}
        config["vision_config"] = VISION | {"out_hidden_size": config["hidden_size"]}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


RECIPES = sorted((Path(__file__).parent.parent / "configs" / "recipes").glob("*qwen*.yaml"))


def whole(recipe: Path) -> dict[str, Any]:
    """A recipe and what it builds on, as one."""
    config: dict[str, Any] = {}
    for argument in expand_configs([f"--config={recipe}"]):
        _update(config, yaml.safe_load(Path(argument.removeprefix("--config=")).read_text()))
    return config


def _update(config: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            _update(config[key], value)
        else:
            config[key] = value


GPUS = re.compile(r"(one|eight)(?: of)? (\d+) GB")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_fit_the_gpus_that_their_headers_name(recipe: Path, tmp_path: Path) -> None:
    text = recipe.read_text()
    config = whole(recipe)
    module, engine = config["model"]["init_args"], config["data"]["init_args"]["engine"]["init_args"]
    actor, ppo = module["actor"], config["model"]["class_path"].startswith("PPO")
    size = measure_model(model_of(actor["path"], tmp_path), compute=torch.bfloat16)
    claims = GPUS.findall("\n".join(line for line in text.splitlines()[:4] if line.startswith("#")))
    assert claims, "the header names no GPU"
    for count, gigabytes in claims:
        memory_of_gpu = float(gigabytes) * 1e9
        case = Plan(
            size,
            critic=ppo,
            reference="kl" not in module or module["kl"] is not None,
            gpus={"one": 1, "eight": 8}[count],
            precision=config["trainer"]["precision"],
            frozen_bytes=2 if (module.get("reference") or {}).get("dtype") == "bfloat16" else 4,
            micro_batch_tokens=module["updates"]["micro_batch_tokens"],
            checkpointing=actor.get("gradient_checkpointing", False),
            engine=not engine.get("sleep_level", 0),
            engine_bytes=engine["gpu_memory_utilization"] * memory_of_gpu,
            fused=module["optimizer"]["init_args"].get("fused", False),
            frozen_vision="visual" in actor.get("freeze", []),
        )
        parts = memory(case, "ddp" if count == "one" else "fsdp2")
        listed = {name: round(value / 1e9, 1) for name, value in parts.items() if value}
        assert total(parts) <= USABLE * memory_of_gpu, listed
        assert module["optimizer"]["init_args"]["fused"], "a step's temporaries would be as large as the parameters"
        least = 2 * size.parameters + 64 * 1024 * 2 * size.kv_width  # its weights, and 64 sequences of 1,024 tokens
        assert engine["gpu_memory_utilization"] * memory_of_gpu >= least


def test_table_of_the_documentation(root: Path, tmp_path: Path) -> None:
    text = (root / "docs" / "memory.md").read_text()
    for label in SHAPES:
        size = size_of(label, tmp_path)
        for algorithm in ("PPO", "GRPO"):
            ppo = algorithm == "PPO"
            case = Plan(size, critic=ppo, reward=size if ppo else None, engine=False)
            strategies = ("ddp", "fsdp2", "zero2", "zero3", "zero3_offload")
            totals = [f"{total(memory(case, strategy)) / 2**30:.1f}" for strategy in strategies]
            assert f"| {label} | {algorithm} | {' | '.join(totals)} |" in text
