"""One update from a rollout whose groups come one after another: the same gradient, begun before the last is sampled.

Losses are accumulated as sums, and the gradient is divided once, when all tokens have been counted. Metrics, callbacks
and the step come after the last piece. Ranks work on their pieces one by one and meet in the last backward.
Letters: B sequences, T tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy
from torch import Tensor

from lightrl.modules import evaluation, strategies, updates
from lightrl.modules.aggregation import TokenMean
from lightrl.modules.experience import cut_micro_batches, widest_layout, with_normalizers, zero_rows_are_free
from lightrl.modules.metrics import MetricSums
from lightrl.types import Experience, Rollouts

if TYPE_CHECKING:
    from lightrl.modules.ppo import PPOLightningModule

__all__ = ["refuse", "streamed_step"]

HOOKS = ("minibatches", "micro_batches")


def refuse(module: PPOLightningModule) -> None:
    """Refuses what streaming would change.

    Raises:
        ValueError: the update needs all groups before its first gradient; the message says why, and the way out.
    """
    from lightrl.modules.ppo import PPOLightningModule

    name, advantage = type(module).__name__, type(module.advantage).__name__
    strategy = module.trainer.strategy
    other_count = module.critic_spec is not None or module.aux_loss_coef
    overridden = [hook for hook in HOOKS if getattr(type(module), hook) is not getattr(PPOLightningModule, hook)]
    changing = [type(c).__name__ for c in module.trainer.callbacks if getattr(c, "changes_rewards", False)]  # type: ignore[attr-defined]
    reasons = {
        f"ppo_epochs={module.ppo_epochs}: every epoch but the last ends with all groups": module.ppo_epochs > 1,
        f"minibatch_size={module.minibatch_size}: mini-batches are drawn from all groups": module.minibatch_size,
        f"advantage={advantage}: it normalises over the batch": module.advantage.scope != "group",
        "whiten_advantages=True: whitening needs all groups": module.whiten_advantages,
        f"top_entropy_fraction={module.top_entropy_fraction}: the threshold is that of all groups": (
            module.top_entropy_fraction < 1
        ),
        f"ptx_coef={module.ptx_coef}: supervised rows are normalised on their own": module.ptx_coef,
        f"aggregation={type(module.aggregation).__name__}: critic and routers are normalised by tokens, as only "
        "TokenMean does": other_count and type(module.aggregation) is not TokenMean,
        f"strategy={type(strategy).__name__}: ranks must run sharded models in step": isinstance(
            strategy, (DeepSpeedStrategy, ModelParallelStrategy)
        ),
        "reward_models on several ranks: ranks must score equally often": (
            module.reward_model_specs and module.trainer.world_size > 1
        ),
        f"{name} overrides {' and '.join(overridden)}, which pieces do not go through": overridden,
        f"callback {', '.join(changing)} changes rewards once all are there": changing,
    }
    for reason, true in reasons.items():
        if true:
            raise ValueError(
                f"streaming=True would not give the update of {name} exactly. {reason}. Change that, or take "
                "streaming=False or staleness=1."
            )


def streamed_step(module: PPOLightningModule, rollouts: Any) -> dict[str, float]:
    """`PPOLightningModule.training_step` for `rollouts` that have `pieces`; returns the same metrics.

    Each piece goes through `make_experience` and `compute_loss`, with normalisers of 1. Callbacks get the whole rollout
    and experience before the step, when nothing they change would count any more: a change is an error.

    Raises:
        ValueError: a callback changed rewards or advantages.
    """
    run = _Run(module)
    for rows, piece, last in run.timed("time/wait", rollouts.pieces()):
        run.piece(rows, piece, last=last)
    experience = run.whole(rollouts)
    begin = time.perf_counter()
    run.divide(experience)
    run.sums.add(module.apply_gradients(finite=bool(run.finite)))
    run.times["time/update"] += time.perf_counter() - begin
    return updates.report(module, {**experience.metrics, **module._reduce(run.sums), **run.times}, len(rollouts))


class _Run:
    """What one streamed update adds up."""

    def __init__(self, module: PPOLightningModule) -> None:
        self.module, self.strategy = module, module.trainer.strategy
        self.sums, self.made = MetricSums(), MetricSums()
        self.done: list[tuple[Tensor, Rollouts, Experience]] = []
        self.times = {"time/experience": 0.0, "time/update": 0.0, "time/wait": 0.0}
        self.finite = torch.ones((), dtype=torch.bool, device=module.device)
        self.models = [model for model in (module.actor, module.critic) if model is not None]

    def timed(self, name: str, items: Iterator[Any]) -> Iterator[Any]:
        """The same items; the time they take to come counts under that name."""
        while True:
            begin = time.perf_counter()
            item = next(items, None)
            self.times[name] += time.perf_counter() - begin
            if item is None:
                return
            yield item

    def piece(self, rows: Tensor, piece: Rollouts, *, last: bool) -> None:
        """Adds the gradient of some groups; with the last one it is reduced over ranks."""
        module, begin = self.module, time.perf_counter()
        module.piece_sums = self.made
        try:
            experience = module.make_experience(piece)
            self.done.append((rows, piece, experience))
            made = time.perf_counter()
            self.times["time/experience"] += made - begin
            skip = zero_rows_are_free(module)
            if last or not skip or bool((experience.advantages != 0).any()):
                layout, budget = widest_layout(*self.models), module.micro_batch_tokens
                micros = cut_micro_batches(experience, budget, module.all_max, skip_zero=skip, layout=layout)
                for i, micro in enumerate(micros):
                    with strategies.backward_scope(self.strategy, self.models, last=last and i == len(micros) - 1):
                        loss, values = module.compute_loss(micro)
                        module.manual_backward(loss)
                    self.finite &= torch.isfinite(loss.detach())
                    self.sums.add(values, micro.response_mask)
            self.times["time/update"] += time.perf_counter() - made
        finally:
            module.piece_sums = None

    def whole(self, rollouts: Any) -> Experience:
        """Shows the whole rollout to the callbacks; the whole experience, with its metrics."""
        module = self.module
        _fill(rollouts, self.done)
        rewards = rollouts.rewards.clone()
        module._call_callbacks("on_rollout_scored", rollouts)
        _refuse_change("on_rollout_scored", "rewards", rollouts.rewards, rewards)
        experience = _joined(rollouts, self.done)
        self.made.add({name: torch.tensor(value) for name, value in rollouts.metrics.items()})
        experience.metrics = evaluation.add_std(module._reduce(self.made))
        experience.metrics |= evaluation.critic_metrics(experience, module.all_sum)
        advantages = experience.advantages.clone()
        module._call_callbacks("on_experience_made", experience)
        _refuse_change("on_experience_made", "advantages", experience.advantages, advantages)
        return experience

    def divide(self, experience: Experience) -> None:
        """Turns the gradient of the sum into that of the mean."""
        optimizer: Any = self.module.optimizers()
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        torch._foreach_mul_(gradients, 1.0 / with_normalizers(self.module, experience).normalizer)


def _fill(rollouts: Any, done: list[tuple[Tensor, Rollouts, Experience]]) -> None:
    """Gives the whole rollout what reward models added to its pieces."""
    first = done[0][1]
    rollouts.reward_weights = first.reward_weights
    rollouts.rewards = _gathered([(rows, piece.rewards) for rows, piece, _ in done], len(rollouts), 0)
    rollouts.reward_parts = {
        name: _gathered([(rows, piece.reward_parts[name]) for rows, piece, _ in done], len(rollouts), 0)
        for name in first.reward_parts
    }


def _joined(rollouts: Any, done: list[tuple[Tensor, Rollouts, Experience]]) -> Experience:
    """The pieces' experience in the rows and columns of the whole rollout; what is no row is the first piece's."""
    first, total, width = done[0][2], len(rollouts), rollouts.token_ids.shape[1]
    joined: dict[str, Any] = {}
    for field in fields(first):
        value = getattr(first, field.name)
        parts = [(rows, getattr(experience, field.name)) for rows, _, experience in done]
        if isinstance(value, Tensor) and value.ndim:
            joined[field.name] = _gathered(parts, total, width)
        elif isinstance(value, list) and value:
            merged = {row: item for rows, items in parts for row, item in zip(rows.tolist(), items, strict=True)}
            joined[field.name] = [merged[row] for row in range(total)]
    joined["token_ids"] = rollouts.token_ids  # padded as the rollout is, not with zeros
    return replace(first, **joined)


def _gathered(parts: list[tuple[Tensor, Tensor]], total: int, width: int) -> Tensor:
    """(total,) or (total, width) from parts of their rows, narrower ones filled up with zeros on the right."""
    like = parts[0][1]
    out = like.new_zeros((total, width) if like.ndim == 2 else (total, *like.shape[1:]))
    for rows, values in parts:
        rows = rows.to(out.device)
        if like.ndim == 2:
            out[rows, : values.shape[1]] = values
        else:
            out[rows] = values
    return out


def _refuse_change(hook: str, name: str, now: Tensor, before: Tensor) -> None:
    if now.shape != before.shape or not torch.equal(now.nan_to_num(0.0), before.nan_to_num(0.0)):
        raise ValueError(
            f"A callback changed the {name} in {hook}, but with streaming=True their gradient has been computed by "
            "then. Set streaming=False (and `changes_rewards = True` on the callback, to be told at the start)."
        )
