"""Grouped settings of the RL modules, and checks for incompatible combinations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightrl.distributed.strategies import local_shard


def make_optimizer(factory: Callable[[Any], Any], parameters: Any, strategy: Strategy) -> Any:
    """Builds the optimizer; warns if updates are too small for bfloat16 weights.

    An Adam update is about as large as the learning rate. Neighbors of a bfloat16 weight w are 2^-8 to 2^-7 |w| away,
    so a single update below half of that rounds back to w. DeepSpeed's optimizers keep float32 weights.
    """
    optimizer = factory(parameters)
    if "Adam" in type(optimizer).__name__ and not isinstance(strategy, DeepSpeedStrategy):
        for group in optimizer.param_groups:
            _warn_of_lost_updates(group)
    return optimizer


def _warn_of_lost_updates(group: dict[str, Any]) -> None:
    matrices = [p for p in group["params"] if p.dtype == torch.bfloat16 and p.dim() > 1]
    largest = max(matrices, key=lambda p: p.numel(), default=None)
    own = None if largest is None else local_shard(largest)
    if own is None or not own.numel():
        return
    size, rate = float(own.abs().float().mean()), float(group["lr"])
    if 0 < rate < size * 2.0**-9:
        rank_zero_warn(
            f"optimizer: lr={rate:g} is too small for bfloat16 weights (mean magnitude {size:.1g}, spacing about "
            f"{size * 2.0**-8:.1g}): most updates round to zero. Set actor.dtype=float32 with "
            "trainer.precision=bf16-mixed, or raise the learning rate."
        )


def change_settings(trainer: Any, given: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    """Sets what a resumed run gives its optimizer's groups differently, instead of the checkpoint's values.

    The learning rate is multiplied by `given / saved`, which keeps the position in a schedule.
    """
    for number, (own, before) in enumerate(zip(given, saved, strict=False)):
        group = trainer.optimizers[0].param_groups[number]
        for name in sorted(name for name in own.keys() & before.keys() if own[name] != before[name]):
            rank_zero_info(f"Resuming with {name}={own[name]} instead of the checkpoint's {before[name]}.")
            if name != "lr" or not before["lr"]:
                group[name] = own[name]
                continue
            group["lr"] *= own["lr"] / before["lr"]
            for scheduler in (config.scheduler for config in trainer.lr_scheduler_configs):
                for each in (scheduler, *getattr(scheduler, "_schedulers", ())):  # of SequentialLR
                    if hasattr(each, "base_lrs"):
                        each.base_lrs[number] = group["initial_lr"] = own["lr"]


@dataclass(frozen=True)
class Updates:
    """Updates per rollout and their limits.

    Args:
        minibatch_size: Number of trajectories per optimizer step, over all ranks. Must divide the rollout. Defaults to
            the whole rollout.
        micro_batch_tokens: Maximum number of tokens per forward/backward pass. Affects memory and speed, not results.
            Defaults to 16384, and to 4096 on a CPU.
        max_grad_norm: Maximum joint gradient norm of policy and critic. None disables clipping.
        max_skipped_updates: Number of consecutive updates with a non-finite loss or gradient that stops the run.
        off_policy_correction: Apply `OffPolicyCorrection` to rollouts sampled by older policies. No effect if the loss
            declares that it reads the engine's log-probs.
    """

    minibatch_size: int | None = None
    micro_batch_tokens: int | None = None
    max_grad_norm: float | None = 1.0
    max_skipped_updates: int = 5
    off_policy_correction: bool = True

    def tokens(self, device_type: str) -> int:
        """`micro_batch_tokens`, or its default for the device type."""
        default = 4096 if device_type == "cpu" else 16384  # larger ones are no faster on a CPU, and need more memory
        return default if self.micro_batch_tokens is None else self.micro_batch_tokens


@dataclass(frozen=True)
class Shaping:
    """Clipping of rewards and advantages, and filters on trained tokens.

    Args:
        reward_clip: Maximum absolute trajectory reward, before the KL penalty. None disables clipping.
        advantage_clip: Maximum absolute advantage, after whitening. None disables clipping.
        mask_truncated: Exclude completions truncated at `max_new_tokens` from all losses and their normalizers. They
            still count in the baselines of other completions.
        top_entropy_fraction: Fraction of the rollout's tokens that the policy loss trains, by highest entropy over all
            ranks. In (0, 1]; 1 trains all tokens. The paper (https://arxiv.org/abs/2506.01939) uses 0.2. As in the
            paper, the normalizer counts all tokens. The KL penalty, entropy bonus, and critic also use all tokens.
    """

    reward_clip: float | None = None
    advantage_clip: float | None = None
    mask_truncated: bool = False
    top_entropy_fraction: float = 1.0


@dataclass(frozen=True)
class ExtraLosses:
    """Weights of losses added to the policy loss. 0 disables a loss.

    Args:
        entropy_coef: Weight of the entropy bonus.
        ptx_coef: Weight of the supervised loss on the data module's `ptx` examples, a mean over completion tokens.
            InstructGPT's PPO-ptx (https://arxiv.org/abs/2203.02155, eq. 2) sums over tokens instead.
        aux_loss_coef: Weight of a mixture-of-experts model's load-balancing loss, computed per micro-batch. It is the
            only loss that depends slightly on the micro-batch size.
    """

    entropy_coef: float = 0.0
    ptx_coef: float = 0.0
    aux_loss_coef: float = 0.0


def require_matching_parts(module: Any) -> None:
    """Raises a ValueError if parts of an RL module are incompatible. Called at the end of its constructor."""
    advantage, kl, clip = module.advantage, module.kl, module.shaping.reward_clip
    if advantage.needs_critic and getattr(module, "critic_spec", None) is None:
        raise ValueError(
            f"advantage={type(advantage).__name__} needs a critic but critic=None. Use PPOLightningModule with a "
            "CriticSpec, or an estimator without a critic (GroupRelative, RLOO, ...)."
        )
    advantage.refuse_combination(kl, whiten=module.whiten_advantages)
    if clip is not None:
        advantage.refuse_shaped_rewards(f"reward_clip={clip}")
    if kl is not None and module.actor_spec.random_init and module.reference_spec is None:
        raise ValueError(
            "actor.random_init=True with kl: there are no pretrained weights to use as reference. "
            "Set kl=None, or pass a reference."
        )
