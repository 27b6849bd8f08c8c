"""Tiny models, tasks and trainers that several tests share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from lightning.pytorch import Trainer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config

from lightrl.callbacks import WeightSync
from lightrl.compat.transformers import router_modules
from lightrl.data.prompts import PromptSource
from lightrl.engines.transformers.engine import TransformersEngine
from lightrl.engines.vllm.engine import VLLMEngine
from lightrl.records import Experience, Rollouts, Routes, SamplingParams
from lightrl.rollout.datamodule import RolloutDataModule
from lightrl.rollout.learner import RLCallback

QUICKSTART_MODEL = Path(__file__).parent.parent / "configs" / "quickstart" / "model"
SMALL: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}


VOCAB = 97
SIZES: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
    **{"initializer_range": 0.2, "pad_token_id": 0},
}


def build(kind: str, head: str = "ForCausalLM", seed: int = 0, **changes: Any) -> Any:
    """A small model of a family of transformers, such as `qwen2` and `Gemma3Text`, with wide random weights."""
    torch.manual_seed(seed)
    name = kind[0].upper() + kind[1:]
    window = {"sliding_window": 6} if kind == "mistral" else {}
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **window, **changes})
    head = "LMHeadModel" if name == "GPT2" else head
    return getattr(transformers, name.removesuffix("Text") + head)(config)


def quickstart_model(
    folder: Path, seed: int = 0, family: str = "Qwen2", head: str = "ForCausalLM", **config: Any
) -> str:
    """The quickstart's tokenizer and sizes with random weights, wide enough that answers differ."""
    torch.manual_seed(seed)
    if "num_hidden_layers" in config:
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    cfg = Qwen2Config.from_pretrained(QUICKSTART_MODEL, initializer_range=0.1, **config)
    if family != "Qwen2":
        sizes = {name: value for name, value in cfg.to_dict().items() if name not in ("model_type", "architectures")}
        cfg = getattr(transformers, f"{family}Config")(**sizes | config)  # what a Qwen2 has not, too
    getattr(transformers, family + head)(cfg).save_pretrained(folder)
    AutoTokenizer.from_pretrained(QUICKSTART_MODEL).save_pretrained(folder)
    return str(folder)


def model_fixture(**config: Any) -> Any:
    """A module's fixture: the folder of a `quickstart_model`."""
    import pytest

    @pytest.fixture(scope="module")
    def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
        return quickstart_model(tmp_path_factory.mktemp("model"), **config)

    return folder


def near_ties(lm: Any, by: float = 6e-8) -> Any:
    """A mixture of experts whose experts 2i and 2i + 1 differ, while its routers tell them apart by last bits only."""
    generator = torch.Generator().manual_seed(7)
    for _, router in router_modules(lm):
        pairs = router.weight.data.view(-1, 2, router.weight.shape[1])
        pairs[:, 1] = pairs[:, 0] * (1 + by * torch.randn(pairs[:, 0].shape, generator=generator))
    return lm


def bandit_model(folder: Path, num_actions: int, seed: int = 0) -> str:
    """A model whose whole vocabulary are the actions of a bandit; token 0 also serves as prompt, pad and end."""
    tokens = {f"a{i}": i for i in range(num_actions)}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="a0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="a0", eos_token="a0", unk_token="a0")
    fast.save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "max_position_embeddings": 16}
    # With a pad token its embedding, which is the prompt here, would be zero.
    ends: dict[str, Any] = {"pad_token_id": None, "eos_token_id": 0, "bos_token_id": 0, "tie_word_embeddings": False}
    build("qwen2", seed=seed, vocab_size=num_actions, initializer_range=0.3, **sizes, **ends).save_pretrained(folder)
    return str(folder)


def digits_reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Fraction of characters that are an even digit: dense, so that a few updates move it."""
    return [sum(c in "02468" for c in text) / max(len(text), 1) for text in completions]


def some_flat(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Groups of prompts with an odd second digit have no spread, so that ranks refill unequally."""
    scores = digits_reward(prompts, completions)
    return [s + i if int(p[1]) % 2 == 0 else 1.0 for i, (p, s) in enumerate(zip(prompts, scores, strict=True))]


def sums_data(**kwargs: Any) -> RolloutDataModule:
    """Rollouts of eight sums, four completions each, from the transformers engine."""
    rows = [{"prompt": f"{a:02d}+{b:02d}="} for a in range(8) for b in range(8)]
    arguments: dict[str, Any] = {
        "prompts": PromptSource(rows=rows),
        "rewards": [digits_reward],
        "engine": TransformersEngine(),
        "sampling": SamplingParams(max_new_tokens=6),
        "group_size": 4,
        "prompts_per_rollout": 8,
        "rollouts_per_epoch": 4,
    }
    return RolloutDataModule(**{**arguments, **kwargs})


class Keep(RLCallback):
    """Remembers what LightRL's hooks saw, the gradients of every update, and what `training_step` returned."""

    reads_old_logprobs = False
    reads_all_rows = False

    def __init__(self) -> None:
        self.rollouts: list[Rollouts] = []
        self.experiences: list[Experience] = []
        self.updated: list[dict[str, float]] = []
        self.gradients: list[torch.Tensor] = []
        self.metrics: list[dict[str, float]] = []

    def on_rollout_scored(self, trainer: Any, module: Any, rollouts: Rollouts) -> None:
        self.rollouts.append(rollouts)

    def on_experience_made(self, trainer: Any, module: Any, experience: Experience) -> None:
        self.experiences.append(experience)

    def on_policy_updated(self, trainer: Any, module: Any, metrics: dict[str, float]) -> None:
        self.updated.append(metrics)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.gradients.append(torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).clone())

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.metrics.append(outputs)


def on_ranks(function: Callable[..., Any], *shards: tuple[Any, ...]) -> list[Any]:
    """Calls function(*shard, all_sum=...) for each shard in a thread; all_sum adds up over the threads."""
    barrier = threading.Barrier(len(shards), timeout=120)
    box: list[Any] = [None] * len(shards)

    def rank(i: int) -> Any:
        def all_sum(x: torch.Tensor) -> torch.Tensor:
            box[i] = x.clone()
            barrier.wait()
            total = torch.stack(box).sum(0)
            barrier.wait()
            return total

        return function(*shards[i], all_sum=all_sum)

    with ThreadPoolExecutor(len(shards)) as pool:
        return [future.result() for future in [pool.submit(rank, i) for i in range(len(shards))]]


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.0)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


class Idle(WeightSync):
    """Takes the place of the data module's own, and pushes nothing."""

    def ensure_synced(self, module: Any, engine: Any) -> None:
        pass


class ThreadEngine(TransformersEngine):
    """May be asked from a thread beside the trainer: its weights are its own, so that is right, if no faster."""

    def check_overlap(self, *, in_flight: bool) -> None:
        pass


class OtherExperts(TransformersEngine):
    """Says that tokens went to two of the first four experts, by their id and place alone, and not where they went."""

    async def generate(self, request: Any) -> Any:
        group = await super().generate(request)
        for sample in group.completions:
            ids = torch.tensor([*request.token_ids, *sample.token_ids[:-1]])
            first = (ids + torch.arange(len(ids))) % 4
            sample.routes = Routes(torch.stack([first, (first + 1) % 4], 1)[:, None].to(torch.uint8))
        return group


class KeptEngine(VLLMEngine):
    """An engine that several runs share: the end of a run leaves it as it is, but for its weights."""

    def close(self) -> None:
        self.policy_version = -1

    def end(self) -> None:
        super().close()


def quiet_trainer(**kwargs: Any) -> Trainer:
    """A CPU trainer that prints and writes nothing."""
    arguments: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "max_epochs": 1,
        "callbacks": [WeightSync()],
    }
    return Trainer(**{**arguments, **kwargs})


def write_run(file: Path, model: str, module: str = "GRPOLightningModule", /, **changes: Any) -> str:
    """Writes a small run as YAML and returns its path; `trainer`, `model`, and `data` add to what these have."""
    trainer = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "enable_progress_bar": False, "logger": False}
    trainer |= {"enable_model_summary": False, "enable_checkpointing": False, "callbacks": ["WeightSync"]}
    data = {"prompts": {"rows": {"class_path": "lightrl.data.ArithmeticRows"}}, "rewards": ["ExactAnswer"]}
    data |= {"engine": "TransformersEngine", "sampling": {"max_new_tokens": 3}, "group_size": 2}
    data |= {"prompts_per_rollout": 4, "rollouts_per_epoch": 1}
    content = {
        "trainer": trainer | changes.pop("trainer", {}),
        "model": {"class_path": module, "init_args": {"actor": {"path": model}} | changes.pop("model", {})},
        "data": {"class_path": "RolloutDataModule", "init_args": data | changes.pop("data", {})},
    }
    file.write_text(yaml.safe_dump(changes | content))
    return str(file)


def run_example(config: str, folder: Path, *options: str) -> Any:
    """Runs a configuration of an example in a run directory of its own."""
    from lightrl.cli import run

    quiet = "--trainer.enable_progress_bar=false"
    return run(["fit", f"--config=examples/{config}.yaml", f"--run_dir={folder}", quiet, *options])
