"""Sums and counts that give exact means, whatever the cut."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightrl.distributed.strategies import MetricSums
from tests import forks

CPU = torch.device("cpu")


def reduced(sums: MetricSums) -> dict[str, float]:
    return sums.reduce(lambda x: x, lambda x: x, CPU)


def test_means_are_over_masked_elements_and_do_not_depend_on_the_cut() -> None:
    values = torch.tensor([[1.0, 2.0, 30.0], [4.0, 50.0, 60.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    whole, parts = MetricSums(), MetricSums()
    whole.add({"a": values, "a_max": values}, mask)
    for row in range(2):
        parts.add({"a": values[row : row + 1], "a_max": values[row : row + 1]}, mask[row : row + 1])
    assert reduced(whole) == reduced(parts) == {"a": 7 / 3, "a_max": 4.0}  # (1 + 2 + 4) / 3


def test_other_shapes_are_averaged_over_all_elements_and_empty_ones_are_left_out() -> None:
    sums = MetricSums()
    sums.add({"rows": torch.tensor([1.0, 3.0]), "scalar": 5.0, "none": torch.zeros(0), "none_max": torch.zeros(0)})
    sums.add({"rows": torch.tensor([8.0])})
    assert reduced(sums) == {"rows": 4.0, "scalar": 5.0}


def main(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

    def both(op: Any) -> Any:
        def reduce(x: torch.Tensor) -> torch.Tensor:
            total = x.clone()
            dist.all_reduce(total, op=op)
            return total

        return reduce

    sums = MetricSums()
    sums.add({"shared": torch.tensor([1.0, 2.0]) if rank == 0 else torch.tensor([6.0])})
    sums.add({"only/first": 100.0} if rank == 0 else {"only/second": 1.0, "b_max": 2.0})
    out = sums.reduce(both(dist.ReduceOp.SUM), both(dist.ReduceOp.MAX), CPU)
    assert out == {"shared": 3.0, "only/first": 100.0, "only/second": 1.0, "b_max": 2.0}, out
    dist.destroy_process_group()


def test_ranks_with_different_names_neither_hang_nor_mix(tmp_path: Path) -> None:
    forks.ranks(__name__, str(tmp_path / "store"))


if __name__ == "__main__":
    main(int(os.environ["LOCAL_RANK"]), sys.argv[1])
