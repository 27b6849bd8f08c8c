"""What a second run gets that shares data or callbacks with a first one, or resumes it with other settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch import callbacks as lightning
from transformers import AutoTokenizer

from lightrl.algorithms import GRPOLightningModule, LRSchedule, RewardLightningModule, SFTLightningModule
from lightrl.callbacks import EMA
from lightrl.data.preferences import PreferenceDataModule, PreferenceSource
from lightrl.data.sft import SFTDataModule, SFTSource
from lightrl.rollout import Evaluation
from tests.toys import SMALL, model_fixture, quickstart_model, quiet_trainer, sums_data

ROWS = [{"prompt": f"{i}+1=", "completion": str(i + 1), "chosen": str(i + 1), "rejected": "99"} for i in range(8)]

path = model_fixture(**SMALL)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose tokenizer has the same tokens with other IDs."""
    folder = tmp_path_factory.mktemp("other")
    quickstart_model(folder, seed=1, **SMALL)
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    words, special = content["model"]["vocab"], {token["content"] for token in content["added_tokens"]}
    plain = [word for word in words if word not in special]
    content["model"]["vocab"] |= dict(zip(plain, [words[word] for word in [*plain[1:], plain[0]]], strict=True))
    file.write_text(json.dumps(content))
    return str(folder)


class Batches(Callback):
    """The tokens of every batch, and the learning rate after it."""

    def __init__(self) -> None:
        self.seen: list[list[list[int]]] = []
        self.rates: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        ids = batch["token_ids"] if isinstance(batch, dict) else batch.token_ids
        self.seen.append(ids.tolist())
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def supervised(rows: list[dict[str, Any]] = ROWS, **kwargs: Any) -> SFTDataModule:
    return SFTDataModule(SFTSource(rows=rows), **{"batch_size": 2, **kwargs})


def rollouts(**kwargs: Any) -> Any:
    return sums_data(**{"prompts_per_rollout": 2, "group_size": 2, "rollouts_per_epoch": 2, **kwargs})


@pytest.mark.parametrize("kind", ["sft", "reward", "rl"])
def test_data_is_tokenized_again_for_another_model(kind: str, path: str, other: str) -> None:
    """The first model's tokens would be other text to the second."""
    data: Any = rollouts() if kind == "rl" else supervised()
    if kind == "reward":
        data = PreferenceDataModule(PreferenceSource(rows=ROWS), batch_size=2)
    make: Any = {"sft": SFTLightningModule, "reward": RewardLightningModule, "rl": GRPOLightningModule}[kind]
    for model in (path, other):
        watch = Batches()
        quiet_trainer(callbacks=[watch], max_steps=1).fit(make(model), data)
        text = AutoTokenizer.from_pretrained(model).decode(watch.seen[0][0])
        assert (text[2] if kind == "rl" else text[1]) == "+", text


def test_overfit_batches_repeat(path: str) -> None:
    watch = Batches()
    quiet_trainer(callbacks=[watch], max_epochs=3, overfit_batches=2).fit(SFTLightningModule(path), supervised())
    assert watch.seen[:2] == watch.seen[2:4] == watch.seen[4:] and watch.seen[0] != watch.seen[1]


def test_epochs_with_a_limit_are_equally_long(path: str, tmp_path: Path) -> None:
    """Four batches in epochs of three: the second epoch goes on with the fourth and a new pass."""

    def run(epochs: int, ckpt: Path | None = None) -> tuple[Any, Batches]:
        watch = Batches()
        trainer = quiet_trainer(callbacks=[watch], max_epochs=epochs, limit_train_batches=3)
        trainer.fit(SFTLightningModule(path), supervised(), ckpt_path=ckpt)
        return trainer, watch

    trainer, whole = run(2)
    assert trainer.global_step == 6 and len({str(batch) for batch in whole.seen[:4]}) == 4
    trainer, _ = run(1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer, rest = run(2, tmp_path / "a.ckpt")
    assert trainer.global_step == 6 and rest.seen == whole.seen[3:]


def test_the_batch_size_finder_tries_the_sizes(path: str, tmp_path: Path) -> None:
    data, watch = supervised(ROWS * 4), Batches()
    find = lightning.BatchSizeFinder(max_trials=2, steps_per_trial=1)
    quiet_trainer(callbacks=[find, watch], default_root_dir=tmp_path).fit(SFTLightningModule(path), data)
    assert data.batch_size == 4 and {len(batch) for batch in watch.seen} == {4} and len(watch.seen) == 8


@pytest.mark.parametrize("name", ["StochasticWeightAveraging", "EMAWeightAveraging", "BatchSizeFinder", "ModelPruning"])
def test_callbacks_without_effect_are_rejected(name: str, path: str) -> None:
    given: dict[str, Any] = {
        "StochasticWeightAveraging": {"swa_lrs": 1e-3},
        "ModelPruning": {"pruning_fn": "l1_unstructured"},
    }
    make = getattr(lightning, name)
    with pytest.raises(ValueError, match=name):
        quiet_trainer(callbacks=[make(**given.get(name, {}))]).fit(GRPOLightningModule(path), rollouts())
    if name in given:
        with pytest.raises(ValueError, match=name):
            quiet_trainer(callbacks=[make(**given[name])]).fit(SFTLightningModule(path), supervised())


def test_checkpoints_by_time_are_rejected(path: str, tmp_path: Path) -> None:
    """Lightning never writes them in manual optimization."""
    save = lightning.ModelCheckpoint(tmp_path, train_time_interval={"seconds": 0})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="train_time_interval"):
        quiet_trainer(callbacks=[save], enable_checkpointing=True).fit(GRPOLightningModule(path), rollouts())


@pytest.mark.parametrize("kind", ["sft", "rl"])
def test_a_scheduler_that_needs_a_metric_is_rejected(kind: str, path: str) -> None:
    make: Any = SFTLightningModule if kind == "sft" else GRPOLightningModule
    module = make(path, lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)
    with pytest.raises(ValueError, match="ReduceLROnPlateau"):
        quiet_trainer().fit(module, supervised() if kind == "sft" else rollouts())


def test_a_schedule_needs_a_known_number_of_updates(path: str) -> None:
    """Lightning counts the updates of a changing accumulation, and of a loader without a length, wrongly."""

    class NoLength(SFTDataModule):
        def train_dataloader(self) -> Any:
            return iter(super().train_dataloader())

    def fit(data: SFTDataModule, *callbacks: Any, **trainer: Any) -> None:
        module = SFTLightningModule(path, lr_scheduler=LRSchedule("linear"))
        quiet_trainer(callbacks=[*callbacks], **trainer).fit(module, data)

    with pytest.raises(ValueError, match="GradientAccumulationScheduler"):
        fit(supervised(), lightning.GradientAccumulationScheduler({0: 1, 1: 4}))
    with pytest.raises(ValueError, match="lr_scheduler"):
        fit(NoLength(SFTSource(rows=ROWS), batch_size=2))
    with pytest.raises(ValueError, match="lr_scheduler"):
        fit(supervised(), max_epochs=-1)


class OwnOptimizer(GRPOLightningModule):
    """Groups its parameters by name, as docs/custom_algorithms.md says, and has a hook without `super`."""

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer_factory([{"params": [p]} for _, p in self.actor.named_parameters()])
        if not callable(self.lr_scheduler_factory):
            return optimizer
        return [optimizer], [self.lr_scheduler_factory(optimizer)]

    def on_fit_start(self) -> None:
        pass


@pytest.mark.parametrize("schedule", [None, LRSchedule("linear"), "torch"])
@pytest.mark.parametrize("kind", ["sft", "rl", "override"])
def test_a_lower_rate_takes_effect_in_a_resumed_run(kind: str, schedule: Any, path: str, tmp_path: Path) -> None:
    """Messages about diverged runs advise it."""

    def run(rate: float, epochs: int, ckpt: str | None = None) -> tuple[Any, list[float]]:
        make: Any = {"sft": SFTLightningModule, "rl": GRPOLightningModule, "override": OwnOptimizer}[kind]
        plan: Any = schedule
        if schedule == "torch":
            plan = lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, 8)  # noqa: E731
        module = make(
            path,
            optimizer=lambda params: torch.optim.AdamW(params, lr=rate, weight_decay=rate),
            lr_scheduler=plan,
        )
        watch = Batches()
        trainer = quiet_trainer(callbacks=[watch], max_epochs=epochs)
        trainer.fit(module, supervised() if kind == "sft" else rollouts(), ckpt_path=ckpt)
        return trainer, watch.rates

    first, _ = run(1e-3, 1)
    first.save_checkpoint(tmp_path / "a.ckpt")
    _, same = run(1e-3, 2, str(tmp_path / "a.ckpt"))
    second, lower = run(1e-5, 2, str(tmp_path / "a.ckpt"))
    assert lower == pytest.approx([rate / 100 for rate in same])
    assert second.optimizers[0].param_groups[0]["weight_decay"] == 1e-5


def test_an_average_is_of_one_module_and_tests_use_it(path: str) -> None:
    average, seen = EMA(0.5), list[torch.Tensor]()

    def weights(module: Any) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in module.actor.parameters()])

    class Tested(Callback):
        def on_test_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
            seen.append(weights(module))

    def fit(rate: float) -> tuple[torch.Tensor, torch.Tensor]:
        seed_everything(0, verbose=False)
        module = GRPOLightningModule(path, kl=None, optimizer=lambda params: torch.optim.SGD(params, lr=rate))
        data = rollouts(evaluation=Evaluation([{"prompt": "1+1="}]))
        trainer = quiet_trainer(callbacks=[average, Tested()], max_steps=2)
        trainer.fit(module, data)
        trainer.test(module, data, verbose=False)
        state = average.state_dict()["ranks"][0]
        return weights(module), torch.cat([state[name].flatten() for name, _ in module.actor.named_parameters()])

    trained, mean = fit(1.0)
    torch.testing.assert_close(seen[0], mean)
    assert not torch.equal(trained, mean)
    still, mean = fit(0.0)
    torch.testing.assert_close(mean, still)


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_an_evaluation_without_data_is_an_error(stage: str, path: str) -> None:
    with pytest.raises(ValueError, match="evaluation.prompts=None"):
        getattr(quiet_trainer(), stage)(GRPOLightningModule(path), rollouts())
    with pytest.raises(ValueError, match="val=None"):
        getattr(quiet_trainer(), stage)(SFTLightningModule(path), supervised())


def test_tokens_without_an_embedding_are_named(path: str, tmp_path: Path) -> None:
    """Torch's own error is an index, and on a GPU an assertion that ends the process."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path)
    rows = [{"prompt": "<new>1+1=", "completion": "2"}] * 2
    with pytest.raises(ValueError, match="resize_token_embeddings"):
        quiet_trainer().fit(SFTLightningModule(path), supervised(rows, tokenizer=str(tmp_path)))
    with pytest.raises(ValueError, match="resize_token_embeddings"):
        quiet_trainer().fit(GRPOLightningModule(path), rollouts(prompts=rows, tokenizer=str(tmp_path)))
