"""Two processes learn what one process learns from the whole batch: advantages, losses, gradients, refills.

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

from lightrl.algorithms import GRPOLightningModule, PPOLightningModule
from lightrl.algorithms.module import ExtraLosses, Shaping, Updates
from lightrl.callbacks import EMA, ReferenceSync, WeightSync
from lightrl.data.sft import PTXSource
from lightrl.distributed.fsdp2 import FSDP2Strategy
from lightrl.models.spec import ModelSpec
from lightrl.objectives import GroupRelative, KLInLoss
from lightrl.rollout import Ahead
from lightrl.rollout.learner import RLCallback
from tests import forks
from tests.toys import OtherExperts, ThreadEngine, digits_reward, quickstart_model, quiet_trainer, some_flat, sums_data

TIMES = ("time/", "optim/lr")


class Uneven(ThreadEngine):
    """Hands groups out at different times on different ranks, so that ranks learn from different pieces."""

    async def generate(self, request: Any) -> Any:
        group = await super().generate(request)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        await asyncio.sleep(0.05 * ((request.seed + rank) % 2))
        return group


class Record(RLCallback):
    """Per rollout: advantages by sequence, gradients of every update, metrics, and the prompt cursor."""

    def __init__(self) -> None:
        self.rows: dict[str, Any] = {}
        self.gradients: list[torch.Tensor] = []
        self.metrics: list[dict[str, float]] = []
        self.cursors: list[int] = []
        self._rollouts: Any = None

    def on_rollout_scored(self, trainer: Any, module: Any, rollouts: Any) -> None:
        self._rollouts = rollouts

    def on_experience_made(self, trainer: Any, module: Any, experience: Any) -> None:
        r, number, seen = self._rollouts, len(self.metrics), {}
        for i, prompt in enumerate(r.prompts):
            seen[prompt] = seen.get(prompt, -1) + 1
            real = experience.attention_mask[i]
            key = f"{number}/{prompt}/{seen[prompt]}"
            self.rows[key] = (experience.token_ids[i][real], experience.advantages[i][real])

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for p in parameters if (g := p.grad) is not None]
        self.gradients.append(torch.cat([g.detach().flatten() for g in whole]).clone())

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.metrics.append({k: v for k, v in outputs.items() if not k.startswith(TIMES)})
        self.cursors.append(trainer.datamodule.prompt_cursor)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


def run(kind: str, path: str, devices: int, strategy: str = "auto") -> Record:
    """Two rollouts, with ranks of unequal work: responses differ in length and micro-batches hold two rows."""
    seed_everything(0, verbose=False)
    rows = [{"prompt": f"{a:02d}+01=", "completion": str(a + 1) * (1 + a % 3)} for a in range(16)]
    ptx = {"ptx": PTXSource(rows=rows, batch_size=8 // devices)}
    common: dict[str, Any] = {
        "optimizer": sgd,
        "updates": Updates(micro_batch_tokens=40),
        "extra_losses": ExtraLosses(ptx_coef=0.1),
    }
    spec = ModelSpec(path, layout="packed")
    module: PPOLightningModule
    if kind == "ppo":
        module = PPOLightningModule(
            spec, ppo_epochs=2, shaping=Shaping(top_entropy_fraction=0.5, mask_truncated=True), **common
        )
        data = {"rewards": [digits_reward], **ptx}
    else:
        module = GRPOLightningModule(spec, advantage=GroupRelative("batch"), kl=KLInLoss("k2"), **common)
        data = {"rewards": [some_flat], "dynamic_sampling_rounds": 8, **ptx}
    if kind == "experts":
        data["engine"] = OtherExperts()
    if kind == "ahead":
        data |= {"engine": Uneven(), "schedule": Ahead()}
    record = Record()
    callbacks = [WeightSync(), record, EMA(0.9), ReferenceSync(every_n_rollouts=1, alpha=0.5)]
    sharded: dict[str, Any] = {
        "context": FSDP2Strategy(context_parallel_size=devices),
    }
    trainer = quiet_trainer(
        devices=devices, strategy=sharded.get(strategy, strategy), callbacks=callbacks, log_every_n_steps=1
    )
    trainer.fit(module, sums_data(rollouts_per_epoch=2, prompts_per_rollout=8, **data))
    return record


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("ppo", "context"),  # under FSDP2
        ("ahead", "ddp"),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("ppo", "ddp"), ("experts", "context"))),
    ],
)
def test_two_ranks_equal_one(kind: str, strategy: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    if kind == "experts":
        sizes |= {"family": "Mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    path = quickstart_model(tmp_path / "model", **sizes)
    one = run(kind, path, devices=1)
    if kind == "experts":
        assert not torch.allclose(one.gradients[0], run("grpo", path, devices=1).gradients[0], atol=1e-3)
    forks.ranks(__name__, kind, path, str(tmp_path), strategy)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    assert ranks[0]["cursors"] == ranks[1]["cursors"] == one.cursors
    both = ranks[0]["rows"] | ranks[1]["rows"]
    assert both.keys() == one.rows.keys() and not ranks[0]["rows"].keys() & ranks[1]["rows"].keys()
    for key, (tokens, advantages) in one.rows.items():
        assert torch.equal(both[key][0], tokens), key
        torch.testing.assert_close(both[key][1], advantages, atol=2e-6, rtol=1e-5)
    for rank in ranks:
        assert len(rank["gradients"]) == len(one.gradients) == (4 if kind == "ppo" else 2)
        for ours, expected in zip(rank["gradients"], one.gradients, strict=True):
            torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)
    assert ranks[0]["metrics"] == ranks[1]["metrics"]
    per_rank = {"rollout/dropped_groups", "rollout/flat_groups", "reward/sampled_mean"}  # means over ranks of their own
    for ours, expected in zip(ranks[0]["metrics"], one.metrics, strict=True):
        assert ours.keys() == expected.keys()
        for name in expected.keys() - per_rank:
            assert ours[name] == pytest.approx(expected[name], abs=2e-6, rel=1e-5), name
    if kind == "ahead":
        assert any(m["rollout/dropped_groups"] > 0 for m in one.metrics), "the toy must refill"
    if kind == "ahead":
        assert [m["rollout/staleness"] for m in one.metrics] == [0, 1]


def main(kind: str, path: str, folder: Path, strategy: str) -> None:
    torch.set_num_threads(1)
    record = run(kind, path, devices=2, strategy=strategy)
    rank = torch.distributed.get_rank()
    state = {name: getattr(record, name) for name in ("rows", "gradients", "metrics", "cursors")}
    torch.save(state, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4])
