"""Runs of every strategy for the tests of this folder; as a script, what each of two ranks does.

    python -m tests.distributed.job STRATEGY MODEL FOLDER STEP...

`tests.forks` starts both. Steps share the processes. Each step leaves `FOLDER/STRATEGY-STEP-RANK.pt`.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrl.algorithms import CriticSpec, GRPOLightningModule, PPOLightningModule
from lightrl.algorithms.module import Updates
from lightrl.callbacks import ReferenceSync, RolloutCheckpoint, WeightSync
from lightrl.distributed import strategies as adapters
from lightrl.distributed.fsdp2 import FSDP2Strategy
from lightrl.engines import VLLMEngine
from lightrl.models.spec import LoraSpec, ModelSpec
from tests.toys import OtherExperts, digits_reward, quiet_trainer, some_flat, sums_data

ROLLOUTS = 4


def make_strategy(name: str, **options: Any) -> Any:
    """The strategy of that name as the overlays configure it."""
    if name == "auto":
        return "auto"
    if name == "ddp":
        return DDPStrategy(gradient_as_bucket_view=True, **options)
    if name == "fsdp2":
        return FSDP2Strategy(**options)
    from tests.distributed.cpu_deepspeed import CPUZeROStrategy

    return CPUZeROStrategy(stage=int(name.removeprefix("zero")), **options)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-3, weight_decay=0.01, eps=1e-6)


def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=8)


class BrokenOnce(PPOLightningModule):
    """Computes a loss that is not a number in the first update of the second rollout, on the last rank only."""

    def compute_loss(self, minibatch: Any) -> Any:
        losses, metrics = super().compute_loss(minibatch)
        last = self.trainer.global_rank == self.trainer.world_size - 1
        broken = last and self.trainer.fit_loop.total_batch_idx == 1 and not self.num_skipped_updates
        factor = float("nan") if broken else 1.0
        return {name: loss * factor for name, loss in losses.items()}, metrics


class Record(Callback):
    """Per rollout: the canary's gap, metrics that do not depend on time, and this rank's number of micro-batches."""

    def __init__(self, sync: WeightSync) -> None:
        self.sync, self.gaps, self.metrics = sync, list[float](), list[dict[str, float]]()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        assert trainer.datamodule.engine.policy_version == self.sync_version(trainer)
        self.gaps.append(float(self.sync.last_gap or 0.0))
        self.metrics.append({k: float(v) for k, v in outputs.items() if not k.startswith("time/")})

    @staticmethod
    def sync_version(trainer: Any) -> int:
        return int(trainer.datamodule.engine.policy_version)


class Die(Callback):
    """Ends a rank in the middle of the second rollout's updates, as the kernel ends a process."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if trainer.fit_loop.total_batch_idx == 1 and trainer.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)


class DieSaving(Callback):
    """Ends a rank when its part of the second checkpoint of its process is written."""

    def __init__(self, rank: int) -> None:
        self.rank, self.savings = rank, 0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        wait = trainer.strategy.barrier

        def barrier(name: str | None = None) -> None:
            self.savings += name == "checkpoint_written"
            if self.savings == 2 and trainer.global_rank == self.rank:
                os.kill(os.getpid(), signal.SIGKILL)
            wait(name)

        trainer.strategy.barrier = barrier


class Sharded(Callback):
    """Each backward leaves this rank its shards of the gradients, and not whole ones that wait for the last."""

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        zero = isinstance(trainer.strategy, DeepSpeedStrategy)  # whose optimizer has the shards
        assert all((parameter.grad is None) == zero for parameter in module.actor.parameters())


def scores_run_out(completions: list[str], **columns: Any) -> list[float | None]:
    """None for all of rank 0's from its second rollout on, and of rank 1's from its third."""
    scores = digits_reward(completions=completions, **columns)
    _SCORED.append(len(scores))
    groups = 4 * (1 + torch.distributed.get_rank())  # each rank has four of a rollout, scored one by one
    return [score if len(_SCORED) <= groups else None for score in scores]


_SCORED: list[int] = []
VARIANTS: dict[str, dict[str, Any]] = {
    "offload": {
        "options": {"cpu_offload": True, "reduce_every_micro_batch": True},
        "model": {"gradient_checkpointing": True},
        "callbacks": [Sharded()],
    },
    "bf16": {"options": {"param_dtype": "bfloat16"}},  # the engine's dtype, too, or the canary stops the run
    "every": {"options": {"reduce_every_micro_batch": True}, "callbacks": [Sharded()]},
    "every-broken": {"kind": "broken", "options": {"reduce_every_micro_batch": True}},
    "vllm": {"engine": VLLMEngine(max_model_len=24)},
    "live": {"kind": "live"},
    "experts": {"kind": "experts", "engine": OtherExperts()},
    "unrewarded": {"rewards": [scores_run_out]},
    "kill0": {"callbacks": [Die(0)]},
    "kill1": {"callbacks": [Die(1)]},
    "saving0": {"callbacks": [DieSaving(0)]},
    "saving1": {"callbacks": [DieSaving(1)]},
}


def make_module(kind: str, path: str, **model: Any) -> Any:
    """PPO with a critic, two updates per rollout in unequal micro-batches; or GRPO with an adapter."""
    common: dict[str, Any] = {"optimizer": adam, "updates": Updates(micro_batch_tokens=60), "lr_scheduler": decay}
    if kind in ("ppo", "broken"):
        module = PPOLightningModule if kind == "ppo" else BrokenOnce
        return module(ModelSpec(path, **model), CriticSpec(lr=5e-3), **common)
    if kind == "live":
        actor = ModelSpec.of(AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path), **model)
        return PPOLightningModule(actor, CriticSpec(lr=5e-3), **common)
    if kind == "experts":
        return GRPOLightningModule(str(Path(path).with_name("experts")), **common)
    spec = ModelSpec(path, lora=LoraSpec(r=4, alpha=8.0), **model)
    return GRPOLightningModule(spec, **common)


def full_weights(module: Any) -> dict[str, torch.Tensor]:
    """Every trained tensor, whole: the policy under its Hugging Face names, the critic under its own. Collective."""
    gather = adapters.gathered
    weights = {name: tensor.clone() for name, tensor in module.named_policy_weights()}
    critic = getattr(module, "critic", None)
    for name, parameter in critic.named_parameters() if critic is not None else ():
        with gather(parameter) as full:
            weights[f"critic.{name}"] = full.clone()
    return weights


def train(
    kind: str,
    path: str,
    folder: Path | None = None,
    *,
    strategy: str = "auto",
    devices: int = 1,
    resume: Any = None,
    options: Any = None,
    model: Any = None,
    callbacks: Any = (),
    **data: Any,
) -> dict[str, Any]:
    """One run; checkpoints after every second rollout go to `folder`."""
    seed_everything(0, verbose=False)
    module = make_module(kind, path, **(model or {}))
    if kind == "lora":
        data = {"rewards": [some_flat], "dynamic_sampling_rounds": 8, **data}
    sync = WeightSync()
    record = Record(sync)
    moving = [] if kind == "lora" else [ReferenceSync(every_n_rollouts=1, alpha=0.5)]  # its reference is in checkpoints
    save = [] if folder is None else [RolloutCheckpoint(2, dirpath=str(folder), save_top_k=-1)]
    trainer = quiet_trainer(
        devices=devices,
        strategy=make_strategy(strategy, **(options or {})),
        callbacks=[sync, record, *moving, *save, *callbacks],
        enable_checkpointing=bool(save),
    )
    trainer.fit(module, sums_data(rollouts_per_epoch=ROLLOUTS, **data), ckpt_path=resume)
    result = {"weights": full_weights(module), "gaps": record.gaps, "metrics": record.metrics}
    result["updates"] = int(trainer.global_step)
    return result


def main(strategy: str, path: str, folder: Path, steps: list[str]) -> None:
    """Runs each step: KIND or the name of an entry of `VARIANTS`, or either with @CHECKPOINT or @last to go on."""
    torch.set_num_threads(1)
    for step in steps:
        kind, _, source = step.partition("@")
        variant = VARIANTS.get(kind, {})
        target = folder / strategy / kind if (kind == step and not variant) or "saving" in kind else None
        run = {"kind": "ppo" if variant else kind, "strategy": strategy, "devices": 2, **variant}
        resume = "last" if source == "last" else folder / source if source else None
        done = train(path=path, folder=target, resume=resume, **run)
        torch.save(done, folder / f"{strategy}-{step.replace('/', '+')}-{torch.distributed.get_rank()}.pt")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
