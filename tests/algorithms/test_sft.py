"""The supervised module: exact means over unequal batches and ranks, and the precisions it takes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from lightrl.algorithms import GRPOLightningModule, LRSchedule, RewardLightningModule, SFTLightningModule
from lightrl.data.sft import SFTDataModule, SFTSource
from tests.toys import SMALL, quickstart_model, quiet_trainer


class Fixed(SFTLightningModule):
    """Sums and counts that are given, in place of a model's."""

    def _nll(self, batch: Any) -> tuple[Tensor, Tensor]:
        return torch.tensor(float(batch[0]), requires_grad=True), torch.tensor(batch[1])


def test_the_validation_loss_is_a_mean_over_tokens_and_idle_ranks_do_not_count() -> None:
    """6 nats over 3 tokens, 1 over 1, and the empty row of an idle rank: 7 / 4."""
    module = Fixed("nowhere")
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign, assignment]
    for batch in ((6.0, 3), (1.0, 1), (0.0, 0)):
        module.validation_step(batch, 0)  # type: ignore[arg-type]
    assert module.eval_loss.compute().item() == pytest.approx(7 / 4)


@pytest.mark.parametrize(("batch", "expected"), [((6.0, 3), 6.0 * 2 / 4), ((0.0, 0), 0.0)])
def test_a_rank_without_tokens_weighs_nothing(
    batch: tuple[float, int], expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 2 ranks, with 4 tokens on both: their mean is the sum over all tokens divided by 4."""
    monkeypatch.setattr("lightrl.algorithms.supervised.strategies.all_reduce", lambda *_: torch.tensor(4))
    module = Fixed("nowhere")
    module._trainer = SimpleNamespace(world_size=2, strategy=None)  # type: ignore[assignment]
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign, assignment]
    loss = module.training_step({"token_ids": [0]} | dict(enumerate(batch)), 0)  # type: ignore[arg-type]
    assert loss.item() == pytest.approx(expected)


def test_float16_weights_are_refused_in_manual_optimisation_only(tmp_path: Path) -> None:
    path = quickstart_model(tmp_path, **SMALL)
    strategy = SingleDeviceStrategy("cpu", precision_plugin=HalfPrecision("16-true"))
    trainer = SimpleNamespace(strategy=strategy, precision="16-true")
    for kind in (SFTLightningModule, RewardLightningModule, GRPOLightningModule):
        module = kind(path)
        module._trainer = trainer
        if kind is GRPOLightningModule:
            with pytest.raises(ValueError, match="precision=16-true: float16 loss scaling"):
                module.setup("fit")
        else:
            module.setup("fit")


def test_a_scheduled_run_goes_on_with_the_rows_that_were_next(tmp_path: Path) -> None:
    """Lightning readies the rows to count the updates, before it reads the place in them from a checkpoint."""
    path = quickstart_model(tmp_path / "model", **SMALL)
    rows = [{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(8)]

    class Batches(Callback):
        def __init__(self) -> None:
            self.seen: list[Tensor] = []

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            self.seen.append(batch["token_ids"])

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if len(self.seen) == 1 and trainer.ckpt_path is None:
                trainer.save_checkpoint(tmp_path / "one.ckpt")

    def fit(resume: str | None = None) -> list[Tensor]:
        module, batches = SFTLightningModule(path, lr_scheduler=LRSchedule("linear")), Batches()
        data = SFTDataModule(SFTSource(rows=rows), batch_size=2)
        quiet_trainer(callbacks=[batches], max_epochs=2).fit(module, data, ckpt_path=resume)
        return batches.seen

    whole, rest = fit(), fit(str(tmp_path / "one.ckpt"))
    assert len(whole) == 8 and len(rest) == 7
    assert all(torch.equal(batch, again) for batch, again in zip(whole[1:], rest, strict=True))
