"""Sums and counts that give exact means, whatever the cut."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from lightrl.distributed.reduction import MetricSums

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


SCRIPT = """
import sys, torch
import torch.distributed as dist
from lightrl.distributed.reduction import MetricSums
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
def both(op):
    def reduce(x):
        y = x.clone(); dist.all_reduce(y, op=op); return y
    return reduce
sums = MetricSums()
sums.add({"shared": torch.tensor([1.0, 2.0]) if rank == 0 else torch.tensor([6.0])})
sums.add({"only/first": 100.0} if rank == 0 else {"only/second": 1.0, "b_max": 2.0})
out = sums.reduce(both(dist.ReduceOp.SUM), both(dist.ReduceOp.MAX), torch.device("cpu"))
assert out == {"shared": 3.0, "only/first": 100.0, "only/second": 1.0, "b_max": 2.0}, out
dist.destroy_process_group()
"""


def test_ranks_with_different_names_neither_hang_nor_mix(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", SCRIPT]
    ranks = [subprocess.Popen([*arguments, str(rank), str(tmp_path / "store")]) for rank in range(2)]
    try:
        assert [process.wait(timeout=550) for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
