"""Two processes sample ahead as one process does.

Run as a module, the file is what each of the two does.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything

from lightrl.algorithms import GRPOLightningModule
from lightrl.algorithms.settings import Updates
from lightrl.callbacks import WeightSync
from lightrl.models.spec import ModelSpec
from lightrl.objectives import KLInLoss
from lightrl.rollout import Ahead
from tests import forks
from tests.distributed.test_two_ranks import Record, sgd, some_flat
from tests.toys import SMALL, ThreadEngine, quickstart_model, quiet_trainer, sums_data

WAYS: dict[str, dict[str, Any]] = {
    "staleness": {"schedule": Ahead(), "rewards": [some_flat], "dynamic_sampling_rounds": 8},
}


class Uneven(ThreadEngine):
    """Hands groups out at different times on different ranks, so that ranks learn from different pieces."""

    async def generate(self, request: Any) -> Any:
        group = await super().generate(request)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        await asyncio.sleep(0.05 * ((request.seed + rank) % 2))
        return group


def run(way: str, path: str, devices: int) -> Record:
    seed_everything(0, verbose=False)
    module = GRPOLightningModule(
        ModelSpec(path, layout="packed"), kl=KLInLoss("k2"), optimizer=sgd, updates=Updates(micro_batch_tokens=40)
    )
    record = Record()
    trainer = quiet_trainer(
        devices=devices, strategy="ddp" if devices > 1 else "auto", callbacks=[WeightSync(), record]
    )
    arguments = {"engine": Uneven(), "rollouts_per_epoch": 3, "prompts_per_rollout": 8, **WAYS[way]}
    trainer.fit(module, sums_data(**arguments))
    return record


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_equal_one(way: str, tmp_path: Path) -> None:
    path = quickstart_model(tmp_path / "model", **SMALL)
    one = run(way, path, devices=1)
    forks.ranks(__name__, way, path, str(tmp_path))
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    assert ranks[0]["cursors"] == ranks[1]["cursors"] == one.cursors
    assert {**ranks[0]["rows"], **ranks[1]["rows"]}.keys() == one.rows.keys()
    for rank in ranks:
        for ours, expected in zip(rank["gradients"], one.gradients, strict=True):
            torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)
    assert ranks[0]["metrics"] == ranks[1]["metrics"]
    ours, expected = ranks[0]["metrics"], one.metrics
    for name in ("reward/mean", "loss/policy", "kl/ref", "optim/grad_norm", "completions/length"):
        assert [m[name] for m in ours] == pytest.approx([m[name] for m in expected], abs=2e-6, rel=1e-5), name
    if way == "staleness":
        assert [m["rollout/staleness"] for m in ours] == [0, 1, 1]
        assert any(m["rollout/dropped_groups"] > 0 for m in expected), "the toy must refill"


def main(way: str, path: str, folder: Path) -> None:
    torch.set_num_threads(1)
    record = run(way, path, devices=2)
    rank = torch.distributed.get_rank()
    state = {name: getattr(record, name) for name in ("rows", "gradients", "metrics", "cursors")}
    torch.save(state, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
