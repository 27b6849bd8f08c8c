"""Turns scored rollouts into experience, mini-batches, and losses, per trajectory.

A trajectory whose history was rewritten has several rows. Estimators, loss weights, and sequence ratios work on
`TrajectoryLayout`, with one row per trajectory, so results don't depend on the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from lightrl.algorithms.module import Shaping
from lightrl.distributed.strategies import MetricSums
from lightrl.models.packing.micro_batches import cut_micro_batches
from lightrl.models.spec import Layout
from lightrl.objectives.estimators import AdvantageEstimator, AdvantageInput
from lightrl.objectives.loss_terms import KLInReward, KLPenalty, LossInput, PolicyLoss
from lightrl.ops.formulas import AllSum, group_stats, masked_whiten
from lightrl.records import Advantages, Experience, MicroBatch, ModelOutputs, Rollouts

WEIGHTS = "lightrl/weights"
"""Key of the token weights in `token_extras` of micro-batches."""

# ---- trajectories ----------------------------------------------------------------------------------------------------


def first_rows(trajectory_ids: Tensor) -> Tensor:
    """Returns the indices of the first row of each trajectory, ascending."""
    return _firsts(trajectory_ids.unique(return_inverse=True)[1]).sort().values


def trajectory_lengths(mask: Tensor, trajectory_ids: Tensor) -> Tensor:
    """Returns the (B,) number of masked tokens in all rows of each row's trajectory."""
    index = trajectory_ids.unique(return_inverse=True)[1]
    lengths = mask.sum(1)
    return torch.zeros_like(lengths).index_add_(0, index, lengths)[index]


def _firsts(index: Tensor) -> Tensor:
    count = int(index.max()) + 1 if len(index) else 0
    rows = torch.arange(len(index), device=index.device)
    return torch.full((count,), len(index), device=index.device).scatter_reduce_(0, index, rows, "amin")


class TrajectoryLayout:
    """Maps tensors between B rows and the n trajectories they belong to.

    In (n, S) tensors, one row holds the masked tokens of all rows of a trajectory, concatenated. If every trajectory
    has one row, `join` and `split` return their input.

    Args:
        trajectory_ids: (B,) int64, equal for all rows of a trajectory.
        mask: (B, T) bool, the tokens to map. Each sampled token is in only one row.
        on_host: Copy of `trajectory_ids` in host memory, which avoids a synchronization. Defaults to none.

    Attributes:
        is_cut: Whether any trajectory has several rows.
        mask: (n, S) bool, True on tokens. The `mask` argument if no trajectory has several rows.
    """

    def __init__(self, trajectory_ids: Tensor, mask: Tensor, on_host: Tensor | None = None) -> None:
        self._row_mask = mask
        self.mask = mask
        self.is_cut = on_host is None or len(on_host.unique()) < len(on_host)
        if not self.is_cut:
            return
        unique, self._index = trajectory_ids.unique(return_inverse=True)
        self.is_cut = len(unique) < len(trajectory_ids)
        if not self.is_cut:
            return
        rows, columns = mask.nonzero(as_tuple=True)
        owners = self._index[rows]
        order = owners.argsort(stable=True)
        self._rows = rows[order]
        self._columns = columns[order]
        self._owners = owners[order]
        counts = owners.bincount(minlength=len(unique))
        begins = counts.cumsum(0) - counts
        self._slots = torch.arange(len(order), device=mask.device) - begins[self._owners]
        self._firsts = _firsts(self._index)
        slots = torch.arange(max(int(counts.max()), 1), device=mask.device)
        self.mask = slots < counts[:, None]

    def join(self, x: Tensor) -> Tensor:
        """Maps (B, T) to (n, S), 0 outside the mask, or (B,), constant per trajectory, to (n,). Differentiable."""
        if not self.is_cut:
            return x
        if x.ndim == 1:
            return x[self._firsts]
        joined = x.new_zeros(self.mask.shape)
        return joined.index_put((self._owners, self._slots), x[self._rows, self._columns])

    def split(self, x: Tensor) -> Tensor:
        """Maps (n, S) to (B, T), 0 outside the mask, or (n,) to (B,). Differentiable."""
        if not self.is_cut:
            return x
        if x.ndim == 1:
            return x[self._index]
        split = x.new_zeros(self._row_mask.shape)
        return split.index_put((self._rows, self._columns), x[self._owners, self._slots])


# ---- rewards that an estimator reads ---------------------------------------------------------------------------------


def _uncredited(estimator: AdvantageEstimator, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """Returns the (B,) part of the rewards that `estimator` doesn't read, for scored rows, and its rounding error."""
    parts, weights = [_turn_totals(rollouts)], rollouts.reward_weights
    if estimator.credit == "parts":
        parts += [weights.get(name, 1.0) * part.nan_to_num(0.0) for name, part in rollouts.reward_parts.items()]
    total, read = rollouts.rewards.nan_to_num(0.0), torch.stack(parts)
    largest = (total.abs() + read.abs().sum(0)).max()
    return total - read.sum(0), 8 * torch.finfo(torch.float32).eps * (1.0 + largest)


@contextmanager
def keeps_credit(estimator: AdvantageEstimator, rollouts: Rollouts) -> Iterator[None]:
    """Context manager in which callbacks must not change rewards that the estimator doesn't read."""
    if estimator.credit == "total":
        yield
        return
    before, _ = _uncredited(estimator, rollouts)
    yield
    missed, rounding = _uncredited(estimator, rollouts)
    if bool((rollouts.rewards.isfinite() & ((missed - before).abs() > rounding)).any()):
        estimator.refuse_shaped_rewards("on_rollout_scored: a callback changes rewards")


def _with_credited_parts(estimator: AdvantageEstimator, rollouts: Rollouts) -> Rollouts:
    """Adds the sum of turn rewards to the rewards by function, for an estimator with `credit` "parts"."""
    parts, weights = dict(rollouts.reward_parts), dict(rollouts.reward_weights)
    if several := sorted(parts.keys() - weights.keys()):
        name = type(estimator).__name__
        raise ValueError(
            f"rewards_by_label with advantage={name}: {several} need a weight that is equal for all labels."
        )
    missed, rounding = _uncredited(estimator, rollouts)
    missed = torch.where(rollouts.rewards.isfinite() & (missed.abs() > rounding), missed, 0.0)
    if rollouts.turn_rewards:  # lack those of turns without trained tokens
        name = next(iter(rollouts.turn_rewards))
        parts[name], weights[name] = _turn_totals(rollouts) + missed, 1.0
    elif bool(missed.any()):
        estimator.refuse_shaped_rewards("changed rewards")
    return replace(rollouts, reward_parts=parts, reward_weights=weights)


def _turn_totals(rollouts: Rollouts) -> Tensor:
    """Returns the (B,) sum of turn rewards of each row's trajectory."""
    if not rollouts.turn_rewards:
        return torch.zeros_like(rollouts.rewards)
    layout = TrajectoryLayout(rollouts.trajectory_ids, rollouts.response_mask)
    turns = [(layout.join(x) * layout.mask).sum(1) for x in rollouts.turn_rewards.values()]
    return layout.split(torch.stack(turns).sum(0))


# ---- advantages ------------------------------------------------------------------------------------------------------


def estimate_advantages(
    rollouts: Rollouts,
    outputs: ModelOutputs,
    estimator: AdvantageEstimator,
    kl: KLPenalty | None,
    reward_clip: float | None,
    all_sum: AllSum,
) -> Advantages:
    """Computes advantages before whitening and clipping."""
    if estimator.credit == "parts":
        rollouts = _with_credited_parts(estimator, rollouts)
    rewards = rollouts.rewards
    if reward_clip is not None:  # what is clipped would otherwise be a penalty of the last turn
        share = (reward_clip / rewards.abs()).clamp(max=1.0).nan_to_num(1.0)[:, None]
        turns = {name: x * share for name, x in rollouts.turn_rewards.items()}
        rollouts, rewards = replace(rollouts, turn_rewards=turns), rewards.clamp(-reward_clip, reward_clip)
    valid = rewards.isfinite()
    rewards = torch.where(valid, rewards, 0.0)
    layout = TrajectoryLayout(rollouts.trajectory_ids, rollouts.response_mask)
    token_rewards = shape_rewards(rollouts, rewards, valid, layout)
    if isinstance(kl, KLInReward) and outputs.old_logprobs is not None and outputs.ref_logprobs is not None:
        penalty = one_per_token("kl", kl, kl(outputs.old_logprobs, outputs.ref_logprobs), token_rewards)
        token_rewards = token_rewards - kl.coef * penalty * rollouts.response_mask
    anchors = None
    if rollouts.states:
        from lightrl.objectives.special_estimators import turn_anchors

        anchors = turn_anchors(rollouts)
    optional = (outputs.values, rollouts.turn_ids, anchors)
    values, turn_ids, anchors = (None if x is None else layout.join(x) for x in optional)
    parts = {name: layout.join(part) for name, part in rollouts.reward_parts.items()}
    # A trajectory without trained tokens has no place for its reward, so it would count as 0 in baselines.
    there = layout.join(valid) & layout.mask.any(1)
    joined = (layout.join(token_rewards), layout.mask, layout.join(rollouts.group_ids), values, there)
    given = AdvantageInput(*joined, parts, dict(rollouts.reward_weights), turn_ids, anchors, all_sum)
    advantages, returns = estimator(given)
    returns = None if returns is None else layout.split(returns)
    return Advantages(layout.split(advantages), returns, rewards, valid)


def shape_rewards(rollouts: Rollouts, totals: Tensor, valid: Tensor, layout: TrajectoryLayout) -> Tensor:
    """Assigns rewards to tokens: turn rewards to each turn's last token, the rest to the trajectory's last token.

    `totals` are (B,) and include turn rewards. Returns (B, T) float32, 0 outside the mask and on rows not in `valid`.
    """
    positions = torch.arange(layout.mask.shape[1], device=layout.mask.device)
    last = torch.where(layout.mask, positions, -1).max(1).values
    has_response, joined = last >= 0, layout.join(totals)
    rewards = torch.zeros(layout.mask.shape, device=totals.device)
    for of_turns in rollouts.turn_rewards.values():
        rewards = rewards + layout.join(of_turns) * layout.mask
    rewards[has_response, last[has_response]] += (joined - rewards.sum(1))[has_response]
    return layout.split(rewards) * valid.unsqueeze(1)


# ---- experience ------------------------------------------------------------------------------------------------------


def join_experience(
    rollouts: Rollouts,
    outputs: ModelOutputs,
    found: Advantages,
    raw_rewards: Tensor,
    shaping: Shaping,
    *,
    whiten: bool,
    is_stale: bool,
    all_sum: AllSum,
    means: Callable[[MetricSums], dict[str, float]],
) -> Experience:
    """Combines a rollout with log-probs, values, and advantages. Collective.

    Removes untrained rows from the mask, whitens and clips advantages, and filters tokens by entropy. `raw_rewards` are
    those before changes by callbacks, (B,), NaN for unscored rows.
    """
    firsts = first_rows(rollouts.trajectory_ids)
    metrics = rollout_metrics(rollouts, outputs, raw_rewards, firsts, shaping.reward_clip)
    trained = found.valid & ~rollouts.truncated if shaping.mask_truncated else found.valid
    mask = rollouts.response_mask & trained.unsqueeze(1)
    explained: dict[str, float] = {}
    if outputs.values is not None and found.returns is not None:
        from lightrl.ops.baselines import explained_variance

        share = explained_variance(outputs.values, found.returns, mask, all_sum)
        explained = {"value/explained_variance": float(share)}
    advantages = masked_whiten(found.advantages, mask, all_sum=all_sum) if whiten else found.advantages
    keep, clip = None, shaping.advantage_clip
    if shaping.top_entropy_fraction < 1 and outputs.entropy is not None:
        from lightrl.ops.baselines import top_entropy_mask

        keep = top_entropy_mask(outputs.entropy, mask, shaping.top_entropy_fraction, all_sum=all_sum)
        metrics["policy/top_entropy"] = outputs.entropy[keep]
    metrics["advantage/abs"] = advantages[mask].abs()
    if clip is not None:
        metrics["advantage/clip_fraction"] = (advantages[mask].abs() > clip).float()
        advantages = advantages.clamp(-clip, clip)
    advantages = advantages * mask
    taught = rollouts.trajectory_ids[(advantages != 0).any(1)]
    metrics["advantage/nonzero_fraction"] = torch.isin(rollouts.trajectory_ids[firsts], taught).float()
    rewards = {name: part[firsts] for name, part in {"mean": raw_rewards, **rollouts.reward_parts}.items()}
    sampled = {f.name: getattr(rollouts, f.name) for f in fields(Experience) if hasattr(rollouts, f.name)}
    own: dict[str, Any] = {
        "host": dict(rollouts.host),
        "response_mask": mask,
        "advantages": advantages,
        "in_policy_loss": keep,
        "is_stale": is_stale,
        "metrics": _means_and_stds(metrics, rewards, means) | explained,
    }
    return Experience(**(sampled | vars(outputs) | vars(found) | own))


def _means_and_stds(
    metrics: dict[str, Tensor], rewards: dict[str, Tensor], means: Callable[[MetricSums], dict[str, float]]
) -> dict[str, float]:
    """Returns the means of metrics, and the stds of rewards whose mean is among them, over ranks. Collective."""
    sums, squares = MetricSums(), MetricSums()
    sums.add(metrics)
    measured = means(sums)
    # Two passes for numerical stability: `E[r^2] - E[r]^2` loses a small spread of large rewards.
    for name, given in rewards.items():
        if f"reward/{name}" in measured:
            spread = (given[given.isfinite()].double() - measured[f"reward/{name}"]).square()
            squares.add({"reward/std" if name == "mean" else f"reward/{name}/std": spread})
    return measured | {name: value**0.5 for name, value in means(squares).items()}


def rollout_metrics(
    rollouts: Rollouts, outputs: ModelOutputs, raw_rewards: Tensor, rows: Tensor, reward_clip: float | None
) -> dict[str, Tensor]:
    """Collects metrics per trajectory (`rows` are the first rows) and per token; the caller averages them."""
    mask = rollouts.response_mask
    lengths = trajectory_lengths(mask, rollouts.trajectory_ids)[rows].float()
    rewards = raw_rewards[rows]
    scored = rewards.isfinite()
    varied = group_stats(rollouts.rewards, rollouts.group_ids, rollouts.rewards.isfinite()).varied
    before = torch.where(mask.any(1), mask.int().argmax(1), rollouts.attention_mask.sum(1))
    metrics: dict[str, Tensor] = {
        "reward/mean": rewards[scored],
        "reward/scored_fraction": scored.float(),
        "reward/zero_std_fraction": (~varied[rows]).float(),
        **dict.fromkeys(("completions/length", "completions/length_max", "completions/length_min"), lengths),
        "rollout/truncated_fraction": rollouts.truncated[rows].float(),
        "rollout/prompt_length": before[rows].float(),
    }
    if reward_clip is not None:
        metrics["reward/clip_fraction"] = (rollouts.rewards[rows].abs() > reward_clip).float()
    finished = lengths[~rollouts.truncated[rows]]
    if len(finished):
        names = ("rollout/finished_length", "rollout/finished_length_min", "rollout/finished_length_max")
        metrics |= dict.fromkeys(names, finished)
    for name, part in rollouts.reward_parts.items():
        given = part[rows]
        metrics[f"reward/{name}"] = given[given.isfinite()]
    if outputs.old_logprobs is not None:
        if outputs.old_logprobs is not rollouts.engine_logprobs:
            gap = (rollouts.engine_logprobs - outputs.old_logprobs)[mask]
            metrics |= {"kl/engine": gap, "kl/engine_gap_max": gap.abs()}
        if outputs.ref_logprobs is not None:
            metrics["kl/ref"] = (outputs.old_logprobs - outputs.ref_logprobs)[mask]
    if outputs.values is not None:
        metrics["value/mean"] = outputs.values[mask]
    return metrics


# ---- mini-batches and micro-batches ----------------------------------------------------------------------------------


def count_minibatches(size: int, total: int, ranks: int) -> int:
    """Number of mini-batches of `size` trajectories in a rollout of `total` trajectories over all ranks.

    Raises a ValueError if `size` doesn't divide the rollout, or isn't a multiple of the ranks.
    """
    if size % ranks or total % size:
        raise ValueError(
            f"minibatch_size={size}: does not divide the rollout's {total} trajectories (prompts x group size over "
            f"all {ranks} ranks) into equal parts per rank. Use a divisor of {total} that is a multiple of "
            f"{ranks}, or null for one update per epoch."
        )
    return total // size


def cut_minibatches(experience: Experience, count: int, *, seed: int) -> list[Experience]:
    """Splits a rollout into `count` mini-batches with equal numbers of trajectories, with groups shuffled by the seed.

    Groups stay whole if each rank's mini-batch size is a multiple of the group size. Rows of a trajectory always stay
    together. Supervised examples, at least one per mini-batch or a ValueError, keep their order and are spread evenly.
    """
    if count == 1:
        return [experience]
    ids = experience.trajectory_ids
    firsts = first_rows(ids)
    groups = experience.group_ids[firsts]
    unique = groups.unique()
    place = torch.randperm(len(unique), generator=torch.Generator().manual_seed(seed)).to(ids.device)
    shares = firsts[place[torch.searchsorted(unique, groups)].argsort(stable=True)].tensor_split(count)
    if len(firsts) < len(ids):
        shares = tuple((ids[part][:, None] == ids).nonzero()[:, 1] for part in shares)
    parts = [experience.select(rows) for rows in shares]
    extra = experience.supervised
    if extra is None:
        return parts
    if len(extra) < count:
        raise ValueError(
            f"ptx.batch_size={len(extra)}: each rank needs at least one example per mini-batch ({count}). Use at "
            f"least {count}, or a larger minibatch_size."
        )
    dealt = torch.arange(len(extra)).tensor_split(count)
    return [replace(part, supervised=extra.select(rows)) for part, rows in zip(parts, dealt, strict=True)]


def weighted_micro_batches(
    module: Any, minibatch: Experience, *, skip_zero: bool, whole_trajectories: bool
) -> list[MicroBatch]:
    """Splits a mini-batch by tokens and weights them so that the micro-batch losses sum to the mini-batch loss.

    Multiplies by the number of ranks, since Lightning averages gradients. Supervised examples, weighted by `ptx_coef`,
    come first: DDP needs every trained model in the last backward pass. `skip_zero` excludes trajectories whose
    advantages are all 0, which still count in the normalizers. `whole_trajectories` keeps rows of a trajectory
    together, even above the budget.

    Returns:
        Micro-batches, the same number on every rank. Empty if no rank has a trainable token.
    """
    ranks, used = module.trainer.world_size, {model.stream.layout for model in module.trained_models}
    # The layout of the trained models that computes the most tokens.
    layout: Layout = "padded" if "padded" in used else "packed" if "packed" in used else "auto"
    budget = module.updates.tokens(module.device.type)
    mask, ptx = minibatch.response_mask, minibatch.supervised
    aggregation, trajectories = module.aggregation, TrajectoryLayout(minibatch.trajectory_ids, mask)
    found = one_per_token("aggregation", aggregation, aggregation.weights(trajectories.mask), trajectories.mask)
    weights = trajectories.split(torch.where(trajectories.mask, found.float(), 0.0))
    count = aggregation.count(trajectories.mask).double()
    learned = mask.new_zeros(()) if ptx is None else ptx.response_mask.sum()
    counts = module.all_sum(torch.stack([count, mask.sum().double(), learned.double()]))
    if not bool(counts[1:].any()):
        return []
    policy, tokens, supervised = (ranks / max(x, 1.0) for x in counts.tolist())
    micros = list[MicroBatch]()
    if ptx is not None:
        parts = cut_micro_batches(ptx, budget, layout)
        micros += [MicroBatch(part, None, module.ptx_coef * supervised) for part in parts]
    weighed = replace(minibatch, token_extras={**minibatch.token_extras, WEIGHTS: weights * policy})
    options = {"skip_zero": skip_zero, "whole_trajectories": whole_trajectories}
    for rows in cut_micro_batches(weighed, budget, layout, **options):
        extras = dict(rows.token_extras)
        own = extras.pop(WEIGHTS)
        micros.append(MicroBatch(replace(rows, token_extras=extras), own, tokens))
    return micros


# ---- losses ----------------------------------------------------------------------------------------------------------


def trajectory_loss(loss: PolicyLoss, rows: Experience, out: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes (b, T) policy losses and metrics. `loss` sees each trajectory as one row."""
    layout = TrajectoryLayout(rows.trajectory_ids, rows.response_mask, rows.on_host("trajectory_ids"))
    logprobs = out["logprobs"]
    old = logprobs.detach() if rows.old_logprobs is None else rows.old_logprobs
    if rows.in_policy_loss is not None:  # other tokens keep their loss value but get no gradient
        logprobs = torch.where(rows.in_policy_loss, logprobs, logprobs.detach())
    optional = (rows.ref_logprobs, out.get("entropy"))
    ref, entropy = (None if x is None else layout.join(x) for x in optional)
    tokens = (layout.join(logprobs), layout.join(old), layout.join(rows.advantages), layout.mask)
    engine = layout.join(rows.engine_logprobs)
    found, metrics = loss(LossInput(*tokens, engine_logprobs=engine, ref_logprobs=ref, entropy=entropy))
    token_loss = one_per_token("loss", loss, found, layout.mask)
    shape = layout.mask.shape
    per_token = {name: layout.split(x) for name, x in metrics.items() if torch.is_tensor(x) and x.shape == shape}
    return layout.split(token_loss), {**metrics, **per_token}


def one_per_token(argument: str, part: object, found: Tensor, like: Tensor) -> Tensor:
    """Rejects a result of a user-defined part that is not (B, T), since other shapes would broadcast."""
    if found.shape == like.shape:
        return found
    raise ValueError(
        f"{argument}={type(part).__name__}: returned shape {tuple(found.shape)} for tokens of shape "
        f"{tuple(like.shape)}. Return one value per token."
    )
