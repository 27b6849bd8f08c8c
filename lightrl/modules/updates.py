"""From gradients to weights: the optimizer's parameter groups, and the step that all ranks take or skip together."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightrl.modules import strategies

if TYPE_CHECKING:
    from lightrl.modules.ppo import PPOLightningModule

__all__ = ["parameter_groups", "report", "step_or_skip"]


def parameter_groups(module: PPOLightningModule) -> list[dict[str, Any]]:
    """The trained parameters as the groups `actor` and, with a critic, `critic`; a shared critic's is its head."""
    head = set(module.actor.value_head.parameters()) if module.actor.value_head is not None else set()
    actor = [p for p in module.actor.parameters() if p.requires_grad and p not in head]
    critic = [*head] if module.critic is None else [p for p in module.critic.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": actor, "name": "actor"}]
    if critic:
        lr = {} if module.critic_lr is None else {"lr": module.critic_lr}
        groups.append({"params": critic, "name": "critic", **lr})
    return groups


def step_or_skip(module: PPOLightningModule, *, finite: bool) -> dict[str, Tensor | float]:
    """Clips, steps and schedules; or skips, on all ranks together, when something is not finite on any.

    Args:
        module: its optimizer, schedulers and counters of skipped updates are used.
        finite: whether this rank's losses were all finite.

    Returns:
        `optim/skipped_updates` (0 or 1), `optim/lr_*`, and `optim/grad_norm` of a step that was taken.

    Raises:
        RuntimeError: `max_skipped_updates` updates in a row were skipped.
    """
    optimizer: Any = module.optimizers()
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    norm = strategies.clip_gradients(module.trainer.strategy, trained, module.max_grad_norm)
    broken = not finite or (norm is not None and not bool(torch.isfinite(norm)))
    skip = bool(module.all_max(torch.tensor(float(broken))))
    learning_rates = {f"optim/lr_{_role(group)}": float(group["lr"]) for group in optimizer.param_groups}
    if not skip:
        with strategies.frozen_group(optimizer, "actor") if module.in_critic_warmup else nullcontext():
            optimizer.step()
        norm, skip = strategies.after_step(module.trainer.strategy, norm)
    if skip:
        strategies.discard_gradients(module.trainer.strategy)
    else:
        schedulers: Any = module.lr_schedulers() or []
        for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
            scheduler.step()
    optimizer.zero_grad()
    _count_skip(module, skip, norm)
    norm_metric = {} if norm is None or skip else {"optim/grad_norm": norm}
    return {"optim/skipped_updates": float(skip), **learning_rates, **norm_metric}


def report(module: PPOLightningModule, metrics: dict[str, float], num_rows: int) -> dict[str, float]:
    """Adds the coefficients in use to a rollout's metrics, shows them to callbacks and logs them."""
    if module.kl is not None:
        metrics["kl/coef"] = float(module.kl_coef)
    if module.entropy_coef:
        metrics["policy/entropy_coef"] = float(module.entropy_coef)
    module._call_callbacks("on_policy_updated", metrics)
    module.log_dict(metrics, batch_size=num_rows)
    return metrics


def _count_skip(module: PPOLightningModule, skip: bool, norm: Tensor | None) -> None:
    module.skipped_in_a_row = module.skipped_in_a_row + 1 if skip else 0
    module.num_skipped_updates += skip
    if module.skipped_in_a_row >= module.max_skipped_updates:
        raise RuntimeError(
            f"{module.skipped_in_a_row} updates in a row had a non-finite loss or gradient norm (the last norm: "
            f"{None if norm is None else norm.item()}). Lower the learning rate, check the scale of the rewards, "
            "or raise max_skipped_updates. The weights are those of the last finite update."
        )


def _role(group: dict[str, Any]) -> str:
    return {"actor": "policy"}.get(group.get("name", "policy"), group.get("name", "policy"))
