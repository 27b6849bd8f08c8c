"""What users put around the step trains as it is written, without declaring anything."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

from lightrl.algorithms import GRPOLightningModule, RewardLightningModule, SFTLightningModule
from lightrl.algorithms.module import ExtraLosses, Shaping, Updates
from lightrl.algorithms.schedules import LRSchedule
from lightrl.callbacks import EMA, AdaptiveKL, RolloutCheckpoint, WeightSync
from lightrl.data import PreferenceDataModule, PreferenceSource, SFTDataModule, SFTSource
from lightrl.models.spec import ModelSpec
from lightrl.objectives import (
    GDPO,
    GroupRelative,
    KLInLoss,
    LossInput,
    PPOClip,
    SequenceMean,
    TokenMean,
    TurnReturns,
)
from lightrl.objectives.off_policy import OffPolicyCorrection
from lightrl.records import Experience, Rollouts
from lightrl.rollout import Evaluation, RolloutDataModule
from lightrl.rollout.learner import RLCallback, require_rl_callbacks
from tests.algorithms.toys import FirstSums, fit, grpo, weights
from tests.callbacks.toys import Loader
from tests.toys import SMALL, Keep, model_fixture, quiet_trainer, sgd, sums_data

path = model_fixture(**SMALL)


def large_steps(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=20.0)


# ---- several updates per rollout, made by code that declares nothing -------------------------------------------------


class ThreeUpdates(GRPOLightningModule):
    """Overrides the public hook and nothing else."""

    def minibatches(self, experience: Experience) -> Iterator[Experience]:
        for _ in range(3):
            yield experience


class TwoEpochs(RLCallback):
    def on_experience_made(self, trainer: Any, module: Any, experience: Experience) -> None:
        module.ppo_epochs = 2


@pytest.mark.parametrize("way", ["minibatches", "callback"])
def test_several_updates_have_the_ratio_to_the_policy_that_began(way: str, path: str) -> None:
    settings: dict[str, Any] = {"optimizer": large_steps, "kl": None, "loss": PPOClip(0.01, 0.01)}
    own: Any = ThreeUpdates(path, **settings) if way == "minibatches" else GRPOLightningModule(path, **settings)
    known = GRPOLightningModule(path, ppo_epochs=3 if way == "minibatches" else 2, **settings)
    found = fit(own, callbacks=[TwoEpochs()] if way == "callback" else [])
    expected = fit(known)
    assert found.experiences[0].old_logprobs is not None
    assert found.metrics[0]["policy/clip_fraction_region"] > 0 < expected.metrics[0]["policy/clip_fraction_region"]
    torch.testing.assert_close(weights(own), weights(known), atol=1e-5, rtol=1e-4)


def test_a_wrong_promise_of_one_update_ends_the_run(path: str) -> None:
    class Promises(TwoEpochs):
        reads_old_logprobs = False
        reads_all_rows = False

    with pytest.raises(RuntimeError, match="old_logprobs"):
        fit(grpo(path), callbacks=[Promises()])


# ---- shapes that would be counted wrongly ----------------------------------------------------------------------------


class MeanTerm(GRPOLightningModule):
    def compute_loss(self, rows: Experience) -> Any:
        losses, metrics = super().compute_loss(rows)
        return {**losses, "mine": losses["policy"].mean()}, metrics


class ColumnKL(KLInLoss):
    def __call__(self, logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        return super().__call__(logprobs, old_logprobs, ref_logprobs).mean(1, keepdim=True)


class ColumnWeights(TokenMean):
    def weights(self, mask: Tensor) -> Tensor:
        return mask.float().mean(1, keepdim=True)


class SumLoss(PPOClip):
    def __call__(self, given: LossInput) -> Any:
        return -(given.advantages * given.logprobs * given.mask).sum(), {}


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda path: GRPOLightningModule(path, kl=None, loss=SumLoss()), "loss=SumLoss"),
        (lambda path: MeanTerm(path, kl=None), "mine"),
        (lambda path: GRPOLightningModule(path, kl=ColumnKL()), "kl=ColumnKL"),
        (lambda path: GRPOLightningModule(path, kl=None, aggregation=ColumnWeights()), "aggregation=ColumnWeights"),
    ],
)
def test_a_value_that_is_not_per_token_is_rejected(make: Any, name: str, path: str) -> None:
    with pytest.raises(ValueError, match=name):
        fit(make(path))


class Penalty(GRPOLightningModule):
    """A mean over tokens of one's own, as a further loss."""

    def compute_loss(self, rows: Experience) -> Any:
        losses, metrics = super().compute_loss(rows)
        return {**losses, "mine": 0.1 * self.forward_policy(rows)["logprobs"].square()}, metrics


def test_an_own_loss_does_not_grow_with_the_number_of_micro_batches(path: str) -> None:
    ends = []
    for tokens in (100_000, 30):
        module = Penalty(
            path, optimizer=sgd, kl=None, updates=Updates(micro_batch_tokens=tokens), aggregation=SequenceMean()
        )
        fit(module)
        ends.append(weights(module))
    torch.testing.assert_close(ends[0], ends[1], atol=1e-6, rtol=1e-5)


# ---- rows and tokens that are left out -------------------------------------------------------------------------------


def test_parameters_of_a_subclass_are_trained(path: str) -> None:
    def scaled(base: Any, **settings: Any) -> Any:
        class Scaled(base):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__(path, optimizer=sgd, **settings)
                self.scale = torch.nn.Parameter(torch.ones(()))

            def compute_loss(self, rows: Experience) -> Any:
                losses, metrics = super().compute_loss(rows)
                return losses | {"scale": (self.scale - 3).square() + 0 * losses["policy"]}, metrics

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                given = super().training_step(batch, batch_idx)
                return given if settings else given + (self.scale - 3).square()

        return Scaled()

    rows = [{"prompt": "1+1=", "completion": "2", "chosen": "2", "rejected": "3"}] * 2
    supervised = {
        SFTLightningModule: SFTDataModule(SFTSource(rows=rows), batch_size=2),
        RewardLightningModule: PreferenceDataModule(PreferenceSource(rows=rows), batch_size=2),
    }
    modules = [scaled(base) for base in supervised]
    for module, data in zip(modules, supervised.values(), strict=True):
        quiet_trainer(callbacks=[]).fit(module, data)
    modules.append(scaled(GRPOLightningModule, updates=Updates(max_grad_norm=None)))
    fit(modules[-1])
    for module in modules:
        assert float(module.scale) == pytest.approx(1 + 0.1 * 4)


class OwnLoss(GRPOLightningModule):
    def other_losses(self, rows: Experience, out: dict[str, Tensor]) -> Any:
        return {"mine": out["logprobs"]}, {}


class Counts(GRPOLightningModule):
    rows = 0

    def compute_loss(self, rows: Experience) -> Any:
        self.rows += len(rows)
        return super().compute_loss(rows)


class OwnTotal(GRPOLightningModule):
    def total_loss(self, micro: Any, losses: dict[str, Tensor]) -> Tensor:
        return super().total_loss(micro, losses) + micro.total({"policy": losses["policy"]})


@pytest.mark.parametrize("own", [OwnLoss, OwnTotal, Counts])
def test_every_row_is_trained_if_a_loss_is_overridden(own: Any, path: str) -> None:
    """Also rows without an advantage, and with the log-probs before the update."""
    module = own(path, kl=None, optimizer=sgd)
    keep = fit(module, rewards=[lambda completions, **_: [1.0] * len(completions)])
    assert not module.skips_zero_advantages(keep.experiences[0])
    assert keep.experiences[0].old_logprobs is not None
    assert own is not OwnLoss or "optim/grad_norm" in keep.metrics[0]
    assert own is not Counts or module.rows == 32


class SequenceRatio(PPOClip):
    """One ratio per sequence, written by somebody who declares nothing."""

    def __call__(self, given: LossInput) -> Any:
        log_ratio = torch.where(given.mask, given.logprobs - given.old_logprobs, 0.0).sum(1, keepdim=True)
        return -(log_ratio.exp() * given.advantages) * given.mask, {}


def test_the_entropy_filter_takes_gradients_whatever_the_loss(path: str) -> None:
    module = grpo(path, loss=SequenceRatio(), shaping=Shaping(top_entropy_fraction=0.25))
    keep, seen = fit(module), []
    rows = keep.experiences[0]
    assert rows.in_policy_loss is not None
    out = {"logprobs": rows.engine_logprobs.clone().requires_grad_()}
    seen = torch.autograd.grad(module.policy_loss(rows, out)[0].sum(), out["logprobs"])[0] != 0
    assert bool(seen.any()) and not bool((seen & ~rows.in_policy_loss).any())


class EntropyWatcher(Callback):
    """A plain callback that acts on what it reads."""

    def __init__(self) -> None:
        self.entropies: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.entropies.append(outputs["policy/entropy"])


def test_metrics_are_those_of_all_rows_if_anybody_may_read_them(path: str) -> None:
    watcher = EntropyWatcher()
    fit(grpo(path), callbacks=[watcher], rewards=[FirstSums()])
    everything = fit(
        grpo(path, extra_losses=ExtraLosses(entropy_coef=1e-12)), rewards=[FirstSums()]
    )  # its gradient needs every row
    assert watcher.entropies == pytest.approx([everything.metrics[0]["policy/entropy"]], rel=1e-5)


# ---- rewards that callbacks change -----------------------------------------------------------------------------------


class Change(RLCallback):
    """Adds the number of each row to its reward, in place or not, and to its parts or turns if asked."""

    def __init__(self, *, in_place: bool = False, also: str = "") -> None:
        self.in_place = in_place
        self.also = also

    def on_rollout_scored(self, trainer: Any, module: Any, rollouts: Rollouts) -> None:
        extra = torch.arange(len(rollouts)).float()
        if self.in_place:
            rollouts.rewards += extra
        else:
            rollouts.rewards = rollouts.rewards + extra
        if self.also == "parts":
            name = next(iter(rollouts.reward_parts))
            rollouts.reward_parts[name] = rollouts.reward_parts[name] + extra


@pytest.mark.parametrize("estimator", [GDPO(), TurnReturns()])
def test_a_changed_reward_that_the_estimator_does_not_read_is_rejected(estimator: Any, path: str) -> None:
    with pytest.raises(ValueError, match=f"on_rollout_scored.*{type(estimator).__name__}"):
        fit(grpo(path, advantage=estimator), callbacks=[Change()])


def test_a_hook_that_is_never_called_is_rejected() -> None:
    class Shapes(Callback):
        def on_rollout_scored(self, trainer: Any, module: Any, rollouts: Rollouts) -> None: ...

    with pytest.raises(ValueError, match="callback Shapes.*not an RLCallback"):
        require_rl_callbacks([Callback(), Shapes()])


def test_a_changed_reward_reaches_the_estimator(path: str) -> None:
    plain = fit(grpo(path, advantage=GDPO())).experiences[0].advantages
    changed = fit(grpo(path, advantage=GDPO()), callbacks=[Change(also="parts")]).experiences[0].advantages
    assert not torch.allclose(plain, changed)
    for in_place in (False, True):
        keep = fit(grpo(path, advantage=GroupRelative("none")), callbacks=[Change(in_place=in_place)])
        raw = fit(grpo(path, advantage=GroupRelative("none")))
        assert keep.metrics[0]["reward/mean"] == raw.metrics[0]["reward/mean"], "of the rewards before callbacks"
        assert not torch.allclose(keep.experiences[0].advantages, raw.experiences[0].advantages)


# ---- weights that something else changes -----------------------------------------------------------------------------


class Moves(Callback):
    """Changes the actor at a hook, by writing through `.data`, in place, or with the optimizer itself."""

    def __init__(self, hook: str, how: str) -> None:
        self.how = how
        setattr(self, hook, self.move)

    def move(self, trainer: Any, module: Any, *_: Any) -> None:
        matrix = module.actor.lm.model.layers[0].mlp.down_proj.weight
        if self.how == "data":
            matrix.data = matrix.data * 3
        elif self.how == "in place":
            with torch.no_grad():
                matrix.mul_(3.0)
        else:
            matrix.grad = torch.ones_like(matrix)
            trainer.optimizers[0].step()
            trainer.optimizers[0].zero_grad()


@pytest.mark.parametrize(
    ("hook", "how"),
    [("on_train_batch_end", "data"), ("on_validation_end", "in place"), ("on_train_epoch_end", "optimizer")],
)
def test_the_engine_gets_weights_whoever_changed_them(hook: str, how: str, path: str) -> None:
    module = grpo(path)
    seed_everything(0, verbose=False)
    keep = Keep()
    trainer = quiet_trainer(max_epochs=2, callbacks=[WeightSync(), keep, Moves(hook, how)])
    trainer.fit(module, sums_data(rollouts_per_epoch=2, evaluation=Evaluation([{"prompt": "12+34="}])))
    gaps = [metrics["kl/engine_gap_max"] for metrics in keep.metrics]
    assert len(gaps) == 4 and max(gaps) < 1e-4


def test_a_change_between_sampling_and_training_is_corrected_and_measured(path: str) -> None:
    module = grpo(path)
    keep = fit(module, rollouts=2, callbacks=[Moves("on_train_batch_start", "data")])
    assert keep.experiences[0].is_stale and min(m["kl/engine_gap_max"] for m in keep.metrics) > 1e-3
    assert "off_policy/weight" in keep.metrics[0] and not isinstance(module.loss, OffPolicyCorrection)
    quiet = fit(grpo(path), rollouts=2)
    assert not quiet.experiences[1].is_stale and "off_policy/weight" not in quiet.metrics[0]


def test_the_engine_gets_frozen_weights_that_changed(path: str) -> None:
    class MovesFrozen(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            matrix = module.actor.lm.model.embed_tokens.weight
            assert not matrix.requires_grad
            matrix.data.mul_(1.5)

    keep = fit(grpo(ModelSpec(path, freeze=["*embed_tokens*"])), rollouts=3, callbacks=[MovesFrozen()])
    assert len(keep.metrics) == 3 and max(metrics["kl/engine_gap_max"] for metrics in keep.metrics) < 1e-4


class MovesReference(RLCallback):
    """Moves the reference and declares nothing."""

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        for parameter in module.reference.parameters():
            parameter.data.mul_(0.5)


def test_a_moved_reference_is_in_the_checkpoint(path: str, tmp_path: Path) -> None:
    for callback, saved in ((MovesReference(), True), (EntropyWatcher(), False)):
        folder = tmp_path / type(callback).__name__
        module = GRPOLightningModule(path, optimizer=sgd)
        checkpoint = RolloutCheckpoint(1, dirpath=str(folder))
        trainer = quiet_trainer(enable_checkpointing=True, callbacks=[WeightSync(), callback, checkpoint])
        trainer.fit(module, sums_data(rollouts_per_epoch=1))
        state = torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]
        assert any(name.startswith("reference.") for name in state) == saved


class FreezesLater(Callback):
    """Freezes what was trained so far."""

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        module.actor.lm.model.layers.requires_grad_(False)


class ScalesFrozen(Callback):
    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        module.actor.lm.model.embed_tokens.weight.data.mul_(1.5)


@pytest.mark.parametrize(("callback", "freeze"), [(FreezesLater(), []), (ScalesFrozen(), ["*embed_tokens*"])])
def test_frozen_weights_that_are_not_those_of_the_model_are_in_the_checkpoint(
    callback: Any, freeze: list[str], path: str, tmp_path: Path
) -> None:
    module, again = (grpo(ModelSpec(path, freeze=freeze), optimizer=large_steps) for _ in range(2))
    trainer = quiet_trainer(callbacks=[WeightSync(), callback])
    trainer.fit(module, sums_data(rollouts_per_epoch=1))
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    again.load_weights(tmp_path / "saved.ckpt")
    assert torch.equal(weights(again), weights(module))


# ---- what is logged --------------------------------------------------------------------------------------------------


def test_a_step_logs_what_it_measured_or_nothing(path: str, tmp_path: Path) -> None:
    calls: list[int] = []

    def scores_the_first(completions: list[str], **_: Any) -> list[float | None]:
        calls.append(len(completions))
        return [float(i % 2) if sum(calls) <= 32 else None for i in range(len(completions))]

    trainer = quiet_trainer(callbacks=[WeightSync()], logger=CSVLogger(str(tmp_path)), log_every_n_steps=1)
    trainer.fit(
        grpo(path, updates=Updates(max_skipped_updates=5)), sums_data(rollouts_per_epoch=2, rewards=[scores_the_first])
    )
    with next(tmp_path.rglob("metrics.csv")).open() as file:
        entropies = [row["policy/entropy"] for row in csv.DictReader(file) if row["optim/skipped_updates"]]
    assert len(entropies) == 2 and float(entropies[0]) > 0 and entropies[1] == ""


def test_the_spread_of_large_rewards_is_exact(path: str) -> None:
    def large(completions: list[str], **_: Any) -> list[float]:
        return [20_000 + 0.25 * (i % 2) for i in range(len(completions))]

    metrics = fit(grpo(path), rewards=[large]).metrics[0]
    assert metrics["reward/std"] == metrics["reward/large/std"] == pytest.approx(0.125, rel=1e-6)


def test_the_kl_to_the_reference_is_measured_once(path: str) -> None:
    """With old log-probs it is that of the rollout, before the update; the update's own rows don't replace it."""
    keep = fit(GRPOLightningModule(path, optimizer=sgd, kl=KLInLoss(), ppo_epochs=2), rollouts=2, rewards=[FirstSums()])
    rows = keep.experiences[1]
    assert rows.old_logprobs is not None and rows.ref_logprobs is not None
    expected = (rows.old_logprobs - rows.ref_logprobs)[keep.rollouts[1].response_mask].mean()
    assert keep.metrics[1]["kl/ref"] == pytest.approx(float(expected), abs=1e-7)


# ---- hooks without `super`, and runs after others --------------------------------------------------------------------


class Draw(Callback):
    """Random numbers, which only follow from those before if the generators' states come back."""

    def __init__(self) -> None:
        self.drawn: list[float] = []

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        self.drawn.append(float(torch.rand(())))


def test_hooks_without_super_resume_and_evaluate(path: str, tmp_path: Path) -> None:
    hooks = ("on_train_start", "on_load_checkpoint", "on_validation_epoch_end")
    mixin = type("Mixin", (), {hook: lambda self, *_: None for hook in hooks})
    own = type("Own", (mixin, GRPOLightningModule), {})

    def run(folder: str, max_epochs: int, seed: int) -> tuple[list[float], Tensor, bool]:
        seed_everything(seed, verbose=False)
        module, draw = own(path, optimizer=sgd, kl=None), Draw()
        callbacks = [WeightSync(), draw, RolloutCheckpoint(1, dirpath=str(tmp_path / folder))]
        trainer = quiet_trainer(max_epochs=max_epochs, enable_checkpointing=True, callbacks=callbacks)
        data = sums_data(rollouts_per_epoch=1, prompts_per_rollout=2, evaluation=Evaluation([{"prompt": "01+01="}]))
        trainer.fit(module, data, ckpt_path="last" if seed else None)
        return draw.drawn, weights(module), "eval/reward" in trainer.callback_metrics

    whole = run("whole", 2, 0)
    run("parts", 1, 0)
    resumed = run("parts", 2, 1)
    assert resumed[0] == whole[0][1:] and torch.equal(resumed[1], whole[1]) and whole[2] and resumed[2]


class OwnState(RolloutDataModule):
    """Written as in Lightning's documentation."""

    def state_dict(self) -> dict[str, Any]:
        return {"own": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict == {"own": 1}


class Renamed(RolloutDataModule):
    pass


@pytest.mark.parametrize("first", [OwnState, RolloutDataModule])
def test_a_data_module_without_super_or_with_a_new_name_resumes(first: Any, path: str, tmp_path: Path) -> None:
    def run(folder: str, max_epochs: int, cls: Any) -> list[str]:
        seed_everything(0, verbose=False)
        data, keep = sums_data(rollouts_per_epoch=1, prompts_per_rollout=2), Keep()
        data.__class__ = cls
        callbacks = [WeightSync(), keep, RolloutCheckpoint(1, dirpath=str(tmp_path / folder))]
        trainer = quiet_trainer(max_epochs=max_epochs, enable_checkpointing=True, callbacks=callbacks)
        trainer.fit(grpo(path), data, ckpt_path="last")
        return [prompt for rollouts in keep.rollouts for prompt in rollouts.prompts[::4]]

    whole = run("whole", 2, RolloutDataModule)
    assert run("parts", 1, first) + run("parts", 2, OwnState if first is OwnState else Renamed) == whole


def test_a_hook_runs_once_whoever_calls_super(path: str) -> None:
    class First(GRPOLightningModule):
        began = 0

        def on_train_start(self) -> None:
            self.began += 1

    class Second(First):
        def on_train_start(self) -> None:
            super().on_train_start()

    module = Second(path, optimizer=sgd, kl=None)
    fit(module)
    assert module.began == 1


def test_setup_without_super_checks_and_rounds_no_rewards(path: str) -> None:
    own = type("Own", (GRPOLightningModule,), {"setup": lambda self, stage: None})
    keep = Keep()
    trainer = quiet_trainer(precision="bf16-true", callbacks=[WeightSync(), keep])
    trainer.fit(own(path, optimizer=sgd, kl=None), sums_data(rollouts_per_epoch=1))
    assert keep.rollouts[0].rewards.dtype == keep.rollouts[0].engine_logprobs.dtype == torch.float32
    never_called = type("Plain", (Callback,), {"on_rollout_scored": lambda self, *_: None})()
    with pytest.raises(ValueError, match="RLCallback"):
        quiet_trainer(callbacks=[never_called]).fit(own(path, optimizer=sgd, kl=None), sums_data())


def test_the_end_of_a_test_without_super_logs(path: str) -> None:
    own = type("Own", (GRPOLightningModule,), {"on_test_epoch_end": lambda self: None})
    data = sums_data(evaluation=Evaluation([{"prompt": "01+01="}]))
    (metrics,) = quiet_trainer().test(own(path, optimizer=sgd, kl=None), data, verbose=False)
    assert "eval/reward" in metrics


class Counter:
    """A part of a user's callback with a state of its own."""

    def state_dict(self) -> dict[str, int]:
        return {"count": 1}


def test_the_parts_of_a_run_work_without_super(path: str, tmp_path: Path) -> None:
    """Data module, checkpoint, and callbacks: the run ends, closes, saves, and resumes as with our classes."""
    hooks: dict[str, Any] = {name: lambda self, stage: None for name in ("setup", "teardown")}
    own_data = type("Data", (RolloutDataModule,), hooks)
    hooks = {name: lambda *_, **__: None for name in ("setup", "on_train_batch_end", "on_validation_end")}
    own_saver = type("Saver", (RolloutCheckpoint,), hooks)
    states = {"state_dict": lambda self: {"own": Counter().state_dict()}, "load_state_dict": lambda self, state: None}
    own_kl, own_ema = (type(f"Own{kind.__name__}", (kind,), states) for kind in (AdaptiveKL, EMA))

    def run(folder: str, max_epochs: int, saver: Any, kl: Any, ema: Any, data_class: Any) -> tuple[Any, ...]:
        seed_everything(0, verbose=False)
        data = sums_data(rollouts_per_epoch=1, prompts_per_rollout=2)
        data.__class__ = data_class
        callbacks = [WeightSync(), kl(0.01, 20), ema(0.5), saver(1, dirpath=str(tmp_path / folder))]
        trainer = quiet_trainer(max_epochs=max_epochs, enable_checkpointing=True, callbacks=callbacks)
        module = GRPOLightningModule(path, optimizer=sgd, kl=KLInLoss())
        trainer.fit(module, data, ckpt_path="last")
        average = next(iter(callbacks[2]._average.values()))
        return weights(module), callbacks[1].coef, average, data.engine.started, len(list(tmp_path.glob(f"{folder}/*")))

    whole = run("whole", 3, RolloutCheckpoint, AdaptiveKL, EMA, RolloutDataModule)
    run("parts", 2, own_saver, own_kl, own_ema, own_data)
    resumed = run("parts", 3, own_saver, own_kl, own_ema, own_data)
    assert torch.equal(resumed[0], whole[0]) and torch.equal(resumed[2], whole[2])
    assert resumed[1] == whole[1] and not resumed[3] and resumed[4] == whole[4]


class Failure(Exception):
    pass


def test_a_run_begins_without_the_gradients_of_one_that_failed(path: str) -> None:
    class Fails(GRPOLightningModule):
        fails = True

        def apply_gradients(self, *, finite: bool) -> Any:
            if self.fails:
                raise Failure
            return super().apply_gradients(finite=finite)

    free = Updates(max_grad_norm=None)
    module = Fails(path, optimizer=sgd, kl=None, updates=free)
    with pytest.raises(Failure):
        fit(module)
    module.fails = False
    assert torch.equal(fit(module).gradients[0], fit(grpo(path, updates=free)).gradients[0])


def test_an_evaluation_is_without_what_an_interrupted_one_measured(path: str) -> None:
    class Fails(Callback):
        def on_validation_batch_end(self, *_: Any) -> None:
            raise Failure

    def evaluate(module: Any, *callbacks: Any) -> Any:
        data = sums_data(evaluation=Evaluation([{"prompt": f"{a:02d}+01="} for a in range(4)], batch_size=2))
        return quiet_trainer(callbacks=list(callbacks)).validate(module, data, verbose=False)

    seed_everything(0, verbose=False)
    module = grpo(path)
    expected = evaluate(module)
    with pytest.raises(Failure):
        evaluate(module, Fails())
    assert evaluate(module) == expected


def test_a_run_from_a_checkpoint_saves_what_it_froze_there(path: str, tmp_path: Path) -> None:
    first, spec = grpo(path, optimizer=large_steps), ModelSpec(path, freeze=["*embed_tokens*"])
    for number, module in enumerate((first, None)):
        trainer = quiet_trainer(callbacks=[WeightSync()])
        second: Any = module or GRPOLightningModule.load_from_checkpoint(
            tmp_path / "0.ckpt", actor=spec, kl=None, optimizer=large_steps
        )
        trainer.fit(second, sums_data(rollouts_per_epoch=1))
        trainer.save_checkpoint(tmp_path / f"{number}.ckpt")
    again = GRPOLightningModule.load_from_checkpoint(tmp_path / "1.ckpt", actor=spec, kl=None)
    assert torch.equal(weights(again), weights(second))


# ---- schedules of resumed runs ---------------------------------------------------------------------------------------


def test_a_resumed_run_of_another_length_has_the_rates_of_its_length(path: str, tmp_path: Path) -> None:
    def run(max_epochs: int, rollouts: int, ckpt_path: str | None = None) -> list[float]:
        seed_everything(0, verbose=False)
        keep = Keep()
        module = grpo(path, lr_scheduler=LRSchedule("linear"))
        trainer = quiet_trainer(
            max_epochs=max_epochs,
            enable_checkpointing=True,
            callbacks=[WeightSync(), keep, RolloutCheckpoint(1, dirpath=str(tmp_path))],
        )
        trainer.fit(module, sums_data(rollouts_per_epoch=rollouts), ckpt_path=ckpt_path)
        return [metrics["optim/lr_policy"] for metrics in keep.metrics]

    first = run(2, 2)
    assert first == pytest.approx([first[0] * (1 - i / 4) for i in range(4)])
    rates = run(4, 2, str(tmp_path / "last.ckpt"))
    assert rates == pytest.approx([first[0] * (1 - done / 8) for done in (4, 5, 6, 7)])


def test_a_schedule_counts_the_rollouts_of_other_loaders(path: str) -> None:
    """How many updates their rollouts give is not known before."""
    rollouts = fit(grpo(path)).rollouts[0]
    module, keep = grpo(path, lr_scheduler=LRSchedule("linear"), updates=Updates(minibatch_size=16)), Keep()
    quiet_trainer(callbacks=[keep]).fit(module, Loader([rollouts, rollouts]))
    rates = [metrics["optim/lr_policy"] for metrics in keep.metrics]
    assert len(keep.gradients) == 4 and rates == pytest.approx([rates[0], rates[0] / 2])


def test_optimizers_of_a_subclass(path: str) -> None:
    """Its scheduler is stepped after each update, as documented; several optimizers are rejected."""

    class One(GRPOLightningModule):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.actor.parameters(), lr=1e-3)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    class Several(GRPOLightningModule):
        def configure_optimizers(self) -> Any:
            first, *others = self.actor.parameters()
            return [torch.optim.SGD([first], lr=1e-3), torch.optim.SGD(others, lr=1e-4)]

    keep = Keep()
    quiet_trainer(callbacks=[keep]).fit(One(path, kl=None), sums_data(rollouts_per_epoch=3))
    assert [metrics["optim/lr_policy"] for metrics in keep.metrics] == pytest.approx([1e-3, 5e-4, 2.5e-4])
    with pytest.raises(ValueError, match="configure_optimizers"):
        quiet_trainer().fit(Several(path, kl=None), sums_data())


def test_a_resumed_supervised_run_has_the_rates_of_its_length(path: str, tmp_path: Path) -> None:
    class Rates(Callback):
        def __init__(self) -> None:
            self.rates: list[float] = []

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            self.rates.append(optimizer.param_groups[0]["lr"])

    def run(max_epochs: int, rows: int, ckpt_path: str | None = None) -> list[float]:
        rates = Rates()
        module = SFTLightningModule(path, lr_scheduler=LRSchedule("linear"), optimizer=sgd)
        lines = [{"prompt": f"{i}+{i}=", "completion": str(2 * i)} for i in range(rows)]
        trainer = quiet_trainer(max_epochs=max_epochs, callbacks=[rates], enable_checkpointing=False)
        trainer.fit(module, SFTDataModule(SFTSource(rows=lines), batch_size=2), ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / "sft.ckpt")
        return rates.rates

    first = run(2, 4)
    assert first == pytest.approx([first[0] * (1 - i / 4) for i in range(4)])
    assert run(4, 2, str(tmp_path / "sft.ckpt")) == pytest.approx([first[0] * rate for rate in (0.5, 0.25)])


@pytest.mark.parametrize("times", [{"every_n_train_steps": 1}, {"save_on_train_epoch_end": True}])
def test_lightnings_checkpoint_between_epochs_keeps_schedule_and_order(
    times: dict[str, Any], path: str, tmp_path: Path
) -> None:
    def run(ckpt_path: str | None = None) -> Tensor:
        seed_everything(0, verbose=False)
        module = SFTLightningModule(path, lr_scheduler=LRSchedule("cosine"), optimizer=sgd)
        saver = ModelCheckpoint(tmp_path, "{step}", save_top_k=-1, **times)
        lines = [{"prompt": f"{i}+{i}=", "completion": str(2 * i)} for i in range(6)]
        trainer = quiet_trainer(max_epochs=2, callbacks=[saver], enable_checkpointing=True)
        trainer.fit(module, SFTDataModule(SFTSource(rows=lines), batch_size=2), ckpt_path=ckpt_path)
        return weights(module)  # type: ignore[arg-type]

    whole = run()
    assert torch.equal(run(str(tmp_path / "step=3.ckpt")), whole)


def test_a_checkpoint_of_a_subclass_with_its_own_entries_resumes(path: str, tmp_path: Path) -> None:
    class Notes(GRPOLightningModule):
        def __init__(self, actor: ModelSpec, **settings: Any) -> None:
            super().__init__(actor, **settings)
            self.save_hyperparameters()

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = 7

    def run(max_epochs: int, ckpt_path: str | None = None) -> Tensor:
        seed_everything(0, verbose=False)
        module = Notes(ModelSpec(path), optimizer=sgd, kl=None, loss=PPOClip())
        checkpoint = RolloutCheckpoint(1, dirpath=str(tmp_path))
        trainer = quiet_trainer(max_epochs=max_epochs, enable_checkpointing=True, callbacks=[WeightSync(), checkpoint])
        trainer.fit(module, sums_data(rollouts_per_epoch=1), ckpt_path=ckpt_path)
        return weights(module)

    run(1)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["mine"] == 7
    resumed = run(2, str(tmp_path / "last.ckpt"))
    assert torch.equal(resumed, run(2))


class Refreshing(torch.optim.lr_scheduler.StepLR):
    """A user's scheduler with a method of the same name as one of `NamedSchedule`."""

    def refresh(self) -> None:
        raise AssertionError("belongs to the user")


def test_a_scheduler_of_the_user_is_stepped(path: str) -> None:
    module = grpo(path, lr_scheduler=lambda optimizer: Refreshing(optimizer, 1, gamma=0.5))
    rates = [metrics["optim/lr_policy"] for metrics in fit(module, rollouts=3).metrics]
    assert rates == pytest.approx([rates[0], rates[0] / 2, rates[0] / 4])
