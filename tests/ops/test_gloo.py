"""Two real gloo processes give the advantages, losses and gradients of one process with the whole batch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightrl.objectives import (
    GDPO,
    GSPO,
    RLOO,
    AdvantageInput,
    ConstantLength,
    GroupRelative,
    LossInput,
    PPOClip,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    SequenceMean,
    SequenceSum,
    TokenMean,
)
from lightrl.ops.advantages import AllSum, identity, masked_whiten
from lightrl.ops.entropy import top_entropy_mask
from tests import forks

PARTS = {0: slice(0, 8), 1: slice(8, 24)}


def everything(rows: slice, all_sum: AllSum) -> list[Tensor]:
    """Advantages, token losses divided by the global count, gradients and filter masks of some of 24 rows."""
    gen = torch.Generator().manual_seed(0)
    mask = torch.rand(24, 7, generator=gen) > 0.3
    rewards = torch.randn(24, 7, generator=gen) * 3 + 1
    groups = torch.arange(6).repeat_interleave(4)
    parts = {name: torch.rand(24, generator=gen)[rows] for name in "ab"}
    logprobs, old, entropy = -torch.rand(3, 24, 7, generator=gen)
    mask, rewards, groups, old = mask[rows], rewards[rows], groups[rows], old[rows]
    out = [masked_whiten(rewards, mask, all_sum=all_sum), top_entropy_mask(-entropy[rows], mask, 0.2, all_sum=all_sum)]
    estimators = (GroupRelative("batch"), RLOO(True), GDPO(), ReinforcePlusPlus(), ReinforcePlusPlusBaseline())
    for estimator in estimators:
        advantages, _ = estimator(
            AdvantageInput(
                rewards, mask, groups, reward_parts=parts, part_weights={"a": 1.0, "b": 2.0}, all_sum=all_sum
            )
        )
        out.append(advantages)
        for aggregation in (TokenMean(), SequenceMean(), ConstantLength(9), SequenceSum()):
            for loss in (PPOClip(), GSPO()):
                leaf = logprobs[rows].clone().requires_grad_()
                token_loss, _ = loss(LossInput(leaf, old, advantages, mask))
                weighted = aggregation.weights(mask) * token_loss / all_sum(aggregation.count(mask))
                weighted.sum().backward()
                assert leaf.grad is not None
                out += [weighted.detach(), leaf.grad]
    return [x.float() for x in out]


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)

    def all_sum(x: Tensor) -> Tensor:
        total = x.detach().clone()
        dist.all_reduce(total)
        return total

    torch.save(everything(PARTS[rank], all_sum), folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.distributed
def test_two_processes_equal_one(tmp_path: Path) -> None:
    forks.ranks(__name__, str(tmp_path))
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for whole, first, second in zip(everything(slice(0, 24), identity), *ranks, strict=True):
        assert torch.allclose(torch.cat([first, second]), whole, atol=1e-6, rtol=1e-6)


if __name__ == "__main__":
    main(int(os.environ["LOCAL_RANK"]), Path(sys.argv[1]))
