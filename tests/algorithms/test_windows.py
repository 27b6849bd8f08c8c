"""Supervised gradients don't depend on how tokens and pairs are split over batches of one update."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy

from lightrl.algorithms import RewardLightningModule, SFTLightningModule
from lightrl.data.preferences import PreferenceDataModule, PreferenceSource
from lightrl.data.sft import SFTDataModule, SFTSource
from tests.toys import SMALL, model_fixture, quiet_trainer

NUMBERS = ["1", "12345678", "2", "3456789123", "9", "87", "654", "4321"]
ROWS = [{"prompt": f"{i}+1=", "completion": text} for i, text in enumerate(NUMBERS)]
PAIRS = [{"prompt": f"{i}+1=", "chosen": text, "rejected": "0"} for i, text in enumerate(NUMBERS)]


path = model_fixture(**SMALL)


class Gradients(Callback):
    """What the optimizer is given."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.seen.append(torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None]).clone())


def gradients(kind: str, path: str, batch_size: int, accumulate: int, *, rows: int = 8, **trainer: Any) -> Any:
    torch.manual_seed(0)
    rate = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.0)}
    if kind == "sft":
        module: Any = SFTLightningModule(path, **rate)
        data: Any = SFTDataModule(SFTSource(rows=ROWS[:rows]), batch_size=batch_size)
    else:
        module = RewardLightningModule(path, **rate)
        data = PreferenceDataModule(PreferenceSource(rows=PAIRS[:rows]), batch_size=batch_size)
    watch = Gradients()
    quiet_trainer(callbacks=[watch], accumulate_grad_batches=accumulate, max_epochs=1, **trainer).fit(module, data)
    return watch.seen


@pytest.mark.parametrize("kind", ["sft", "reward"])
def test_accumulation_is_one_large_batch(kind: str, path: str) -> None:
    whole, split = gradients(kind, path, 4, 1), gradients(kind, path, 1, 4)
    assert len(whole) == len(split) == 2
    for one, other in zip(whole, split, strict=True):
        torch.testing.assert_close(other, one, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("kind", ["sft", "reward"])
def test_the_last_window_of_an_epoch_is_a_whole_mean(kind: str, path: str) -> None:
    """Three batches of two in windows of two: the second update has one batch."""
    split = gradients(kind, path, 2, 2, rows=6)
    every = gradients(kind, path, 2, 1, rows=6)
    assert len(split) == 2 and len(every) == 3
    torch.testing.assert_close(split[1], every[2], atol=1e-6, rtol=1e-4)
    assert (split[0] - every[0]).abs().max() > 1e-4


def test_clipping_sees_the_mean(path: str) -> None:
    (whole, *_), (split, *_) = (gradients("sft", path, *shape, gradient_clip_val=0.1) for shape in ((4, 1), (2, 2)))
    torch.testing.assert_close(split, whole, atol=1e-6, rtol=1e-4)


def test_what_a_subclass_adds_keeps_its_weight(path: str) -> None:
    """The mean over a window's batches, as Lightning accumulates; its batches are equally long here."""

    class Regularized(SFTLightningModule):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch, batch_idx) + 10 * sum(p.square().sum() for p in self.parameters())

    def run(batch_size: int, accumulate: int) -> torch.Tensor:
        torch.manual_seed(0)
        module = Regularized(path, optimizer=lambda params: torch.optim.SGD(params, lr=0.0))
        rows = [{"prompt": "1+1=", "completion": str(i)} for i in range(4)]
        watch = Gradients()
        trainer = quiet_trainer(callbacks=[watch], accumulate_grad_batches=accumulate, max_epochs=1)
        trainer.fit(module, SFTDataModule(SFTSource(rows=rows), batch_size=batch_size))
        (seen,) = watch.seen
        return seen

    torch.testing.assert_close(run(1, 4), run(4, 1), atol=1e-5, rtol=1e-4)


def test_a_window_is_without_the_batches_of_an_earlier_run(path: str) -> None:
    """Both begin at step 0."""

    def run(*modes: dict[str, Any]) -> torch.Tensor:
        torch.manual_seed(0)
        module = SFTLightningModule(path, optimizer=lambda params: torch.optim.SGD(params, lr=0.0))
        for mode in modes:
            watch = Gradients()
            trainer = quiet_trainer(callbacks=[watch], accumulate_grad_batches=4, **mode)
            trainer.fit(module, SFTDataModule(SFTSource(rows=ROWS), batch_size=2))
        return watch.seen[0]

    torch.testing.assert_close(run({"fast_dev_run": True}, {}), run({}), atol=1e-6, rtol=1e-4)


def test_deepspeed_which_keeps_its_gradients_is_refused(path: str) -> None:
    module = SFTLightningModule(path)
    strategy = DeepSpeedStrategy.__new__(DeepSpeedStrategy)
    strategy._accelerator = strategy._precision_plugin = None
    module._trainer = SimpleNamespace(strategy=strategy, accumulate_grad_batches=2)  # type: ignore[assignment]
    with pytest.raises(ValueError, match="accumulate_grad_batches=2"):
        module.setup("fit")
