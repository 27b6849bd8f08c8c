"""`precision: 16-mixed`: losses are scaled, an overflow skips the step and halves the scale on all ranks, curves stay.

On a CPU Lightning takes bfloat16 for `precision: 16-mixed`; given as a plugin it computes in float16.

Run as a module, the file is what each of two ranks does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor

from lightrl.algorithms import GRPOLightningModule, PPOLightningModule
from lightrl.algorithms.module import Updates
from lightrl.models.spec import ModelSpec
from tests import forks
from tests.toys import SMALL, quickstart_model, quiet_trainer, sums_data

SCALE = 2.0**12


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05)


def tiny(folder: Path) -> str:
    return quickstart_model(folder, **SMALL)


def half(scale: float = SCALE, **options: Any) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale, **options))


class Overflow(PPOLightningModule):
    """In the second rollout's update a gradient overflows, on the last rank only; the losses are finite."""

    def compute_loss(self, minibatch: Any) -> Any:
        last = self.trainer.global_rank == self.trainer.world_size - 1
        self.hooks = []
        if last and self.trainer.fit_loop.total_batch_idx == 1:
            parameter: Any = next(p for p in self.actor.parameters() if p.requires_grad)
            self.hooks.append(parameter.register_hook(lambda gradient: torch.full_like(gradient, float("inf"))))
        return super().compute_loss(minibatch)

    def apply_gradients(self, *, finite: bool) -> Any:
        for hook in self.hooks:
            hook.remove()
        return super().apply_gradients(finite=finite)


class Watch(Callback):
    """Weights and metrics after every rollout; the norms of what the optimizer was given."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []
        self.metrics: list[dict[str, float]] = []
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.norms.append(float(torch.cat([g.flatten() for g in gradients]).norm()))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.metrics.append({k: float(v) for k, v in outputs.items() if not k.startswith("time/")})
        self.weights.append(torch.cat([p.detach().flatten().clone() for p in module.actor.parameters()]))
        scaler = trainer.scaler
        self.scale = 1.0 if scaler is None else scaler.get_scale()


def train(path: str, module: Any = GRPOLightningModule, rollouts: int = 3, **options: Any) -> Watch:
    seed_everything(0, verbose=False)
    watch = Watch()
    kind = module(ModelSpec(path), optimizer=sgd, **options.pop("settings", {}))
    fit = options.pop("fit", {})
    quiet_trainer(callbacks=[watch], **options).fit(kind, sums_data(rollouts_per_epoch=rollouts), **fit)
    return watch


@pytest.mark.distributed
def test_two_ranks_skip_together_and_halve_the_scale(tmp_path: Path) -> None:
    tiny(tmp_path / "model")
    forks.ranks(__name__, str(tmp_path))
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert first["scales"] == second["scales"] == [SCALE, SCALE, SCALE / 2, SCALE / 2]
    assert first["skipped"] == second["skipped"] == [0.0, 1.0, 0.0, 0.0]
    before, skipped, after, _ = first["weights"]
    assert torch.equal(skipped, before) and not torch.equal(after, skipped)
    for ours, theirs in zip(first["weights"], second["weights"], strict=True):
        assert torch.equal(ours, theirs)


def test_the_bound_on_the_norm_holds_for_the_true_gradient(tmp_path: Path) -> None:
    """With a scale of 4,096 a gradient clipped to 0.01 reaches the optimizer with that norm, and is logged whole."""
    path = tiny(tmp_path)
    plain = train(path, rollouts=1, settings={"updates": Updates(max_grad_norm=None)})
    for bound in (None, 0.01):
        scaled = train(path, rollouts=1, plugins=[half()], settings={"updates": Updates(max_grad_norm=bound)})
        assert scaled.metrics[0]["optim/loss_scale"] == SCALE
        assert scaled.metrics[0]["optim/grad_norm"] == pytest.approx(plain.metrics[0]["optim/grad_norm"], rel=0.02)
        assert scaled.norms[0] == pytest.approx(bound or plain.norms[0], rel=0.02)


def test_the_scale_is_searched_kept_and_taken_up_again(tmp_path: Path) -> None:
    """A scale at which float16 overflows is halved until it does not, without stopping the run; checkpoints hold it."""
    path = tiny(tmp_path / "model")
    options: dict[str, Any] = {"settings": {"updates": Updates(max_skipped_updates=1)}, "plugins": [half(2.0**28)]}
    watch = train(path, rollouts=14, max_epochs=1, **options)
    skipped = [m["optim/skipped_updates"] for m in watch.metrics]
    count = int(sum(skipped))
    assert skipped[:2] == [1.0, 1.0] and count < 14
    assert watch.scale == 2.0 ** (28 - count)
    grown = train(path, rollouts=2, plugins=[half(growth_interval=2)])
    assert grown.scale == 2 * SCALE


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    watch = train(
        str(folder / "model"), Overflow, rollouts=4, devices=2, strategy="ddp", plugins=[half()],
        settings={"ppo_epochs": 1},
    )  # fmt: skip
    rank = torch.distributed.get_rank()
    scales = [m["optim/loss_scale"] for m in watch.metrics]
    skipped = [m["optim/skipped_updates"] for m in watch.metrics]
    torch.save({"scales": scales, "skipped": skipped, "weights": watch.weights}, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
