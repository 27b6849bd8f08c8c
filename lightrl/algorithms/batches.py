"""How a rollout is split into mini-batches and micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightrl.algorithms.experience import first_rows, loss_weights
from lightrl.models.packing.micro_batches import micro_batches, told_apart
from lightrl.models.spec import Layout
from lightrl.records import Experience, MicroBatch, RowBatch

AllReduce = Callable[[Tensor], Tensor]
Rows = TypeVar("Rows", bound=RowBatch)

WEIGHTS = "lightrl/weights"
"""Key of the token weights in `token_extras` of micro-batches."""


def widest_layout(*models: Any) -> Layout:
    """Returns the layout of these models that computes the most tokens."""
    used = {model.stream.layout for model in models}
    return "padded" if "padded" in used else "packed" if "packed" in used else "auto"


def micro_batch_rows(
    rows: RowBatch,
    budget: int,
    all_max: AllReduce,
    layout: Layout,
    units: Tensor | None = None,
) -> list[Tensor]:
    """Returns row indices of micro-batches of at most `budget` tokens, the same number per rank (some may be empty)."""
    ids = told_apart(rows.on_host("token_ids"), rows.inputs)
    host = ids, rows.on_host("attention_mask"), rows.on_host("response_mask")
    bins = micro_batches(*host, budget, layout=layout, units=units)
    most = int(all_max(torch.tensor(float(len(bins)))))
    if most > len(bins):
        bins = micro_batches(*host, budget, num_bins=most, layout=layout, units=units)
    return bins


def count_minibatches(size: int, total: int, ranks: int) -> int:
    """Number of mini-batches of `size` trajectories in a rollout of `total` trajectories over all ranks.

    Raises:
        ValueError: `size` doesn't divide the rollout, or isn't a multiple of the ranks.
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
    together. Supervised examples keep their order and are distributed evenly.

    Raises:
        ValueError: There are fewer supervised examples than mini-batches.
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
    come first: DDP needs every trained model in the last backward pass.

    Args:
        module: The `PolicyGradientLightningModule`.
        minibatch: The mini-batch.
        skip_zero: Whether to exclude trajectories whose advantages are all 0, which still count in the normalizers.
        whole_trajectories: Whether to keep rows of a trajectory together, even above the budget.

    Returns:
        Micro-batches, the same number on every rank. Empty if no rank has a trainable token.
    """
    ranks, all_max, layout = module.trainer.world_size, module.all_max, widest_layout(*module.trained_models)
    budget = module.updates.tokens(module.device.type)
    mask, ptx = minibatch.response_mask, minibatch.supervised
    weights, count = loss_weights(module.aggregation, minibatch)
    learned = mask.new_zeros(()) if ptx is None else ptx.response_mask.sum()
    counts = module.all_sum(torch.stack([count, mask.sum().double(), learned.double()]))
    if not bool(counts[1:].any()):
        return []
    policy, tokens, supervised = (ranks / max(x, 1.0) for x in counts.tolist())
    micros = list[MicroBatch]()
    if ptx is not None:
        parts = cut_micro_batches(ptx, budget, all_max, layout=layout)
        micros += [MicroBatch(part, None, module.ptx_coef * supervised) for part in parts]
    weighed = replace(minibatch, token_extras={**minibatch.token_extras, WEIGHTS: weights * policy})
    options: Any = {"skip_zero": skip_zero, "whole_trajectories": whole_trajectories, "layout": layout}
    for rows in cut_micro_batches(weighed, budget, all_max, **options):
        extras = dict(rows.token_extras)
        own = extras.pop(WEIGHTS)
        micros.append(MicroBatch(replace(rows, token_extras=extras), own, tokens))
    return micros


def cut_micro_batches(
    rows: Rows,
    budget: int,
    all_max: AllReduce,
    *,
    skip_zero: bool = False,
    whole_trajectories: bool = False,
    layout: Layout = "auto",
) -> list[Rows]:
    """Splits sequences into micro-batches, at least one and the same number on every rank.

    A rank without sequences gets one sequence with an empty response mask. See `weighted_micro_batches`.
    """
    units = None
    if isinstance(rows, Experience):
        if skip_zero:
            kept = _rows_with_advantage(rows)
            rows = rows.select(kept) if len(kept) else _without_response(rows)  # type: ignore[assignment]
        trajectory_ids = rows.on_host("trajectory_ids")
        if whole_trajectories and len(trajectory_ids.unique()) < len(rows):
            units = trajectory_ids
    found = micro_batch_rows(rows, budget, all_max, layout, units)
    return [rows.select(index).crop() if len(index) else _without_response(rows) for index in found]


def _rows_with_advantage(minibatch: Experience) -> Tensor:
    """Returns the rows of trajectories with a nonzero advantage on any token."""
    index = minibatch.trajectory_ids.unique(return_inverse=True)[1]
    trained = (minibatch.advantages != 0).any(1)
    return trained.new_zeros(len(index)).index_put_((index[trained],), trained.new_ones(()))[index].nonzero().squeeze(1)


def _without_response(rows: Rows) -> Rows:
    """Returns one row that participates in forward, backward, and collectives but contributes nothing."""
    row = rows.select(torch.zeros(1, dtype=torch.long)).crop()
    row.response_mask = torch.zeros_like(row.response_mask)
    if isinstance(row, Experience):
        row.advantages = torch.zeros_like(row.advantages)
        row.token_extras = {name: torch.zeros_like(x) for name, x in row.token_extras.items()}
    return row
