"""A resumed run is compared with its checkpoint; two runs in one folder and weights that are not finite are refused."""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightrl.algorithms import PPOLightningModule
from lightrl.callbacks import RolloutCheckpoint, RolloutWriter, WeightSync
from lightrl.checkpoints.files import StorageError, verify
from lightrl.checkpoints.run_folder import RunGuard, is_of_another_run, last_of_runs
from lightrl.models.spec import ModelSpec
from tests.toys import SMALL, adam, model_fixture, quiet_trainer, sums_data

model = model_fixture(**SMALL)


def fit(
    folder: Path, model: str | ModelSpec, *callbacks: Any, resume: Any = None, trainer: Any = None, **data: Any
) -> Any:
    learner = PPOLightningModule(model, optimizer=adam, ppo_epochs=1)
    arguments = {"max_epochs": 1 if resume is None else 2, **(trainer or {})}
    run = quiet_trainer(
        callbacks=[WeightSync(), *callbacks], enable_checkpointing=True, default_root_dir=folder, **arguments
    )
    run.fit(
        learner, sums_data(**{"rollouts_per_epoch": 2, "prompts_per_rollout": 2, "seed": 0, **data}), ckpt_path=resume
    )
    return run


def saving(folder: Path, **arguments: Any) -> RolloutCheckpoint:
    return RolloutCheckpoint(**{"every_n_rollouts": 1, "dirpath": str(folder / "checkpoints"), **arguments})


@pytest.fixture(scope="module")
def last(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("first")
    fit(folder, model, saving(folder))
    return str(folder / "checkpoints" / "last.ckpt")


def test_a_checkpoint_of_a_run_with_other_parts_frozen_is_refused(model: str, last: str, tmp_path: Path) -> None:
    frozen = ModelSpec(model, freeze=["embed_tokens"])
    with pytest.raises(ValueError, match="parameter group"):
        fit(tmp_path, frozen, saving(tmp_path), resume=last)


class Spoil(Callback):
    """Makes a weight, or what the optimizer keeps of it, NaN after the first rollout."""

    def __init__(self, optimizer: bool = False) -> None:
        self.optimizer = optimizer

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            with torch.no_grad():
                weight = next(pl_module.actor.parameters())
                state = trainer.optimizers[0].state[weight]
                (next(x for x in state.values() if x.ndim) if self.optimizer else weight).fill_(float("nan"))


@pytest.mark.parametrize("optimizer", [False, True])
@pytest.mark.parametrize("lightnings", [False, True])
def test_weights_that_are_not_finite_are_never_saved(
    optimizer: bool, lightnings: bool, model: str, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    own = [RunGuard(), ModelCheckpoint(folder, save_last=True, every_n_train_steps=1)]
    with pytest.raises(ValueError, match="not finite .the optimizer's" if optimizer else "weights are not finite"):
        fit(tmp_path, model, Spoil(optimizer), *(own if lightnings else [saving(tmp_path)]))
    verify(folder / "last.ckpt")
    stored = torch.load(folder / "last.ckpt", weights_only=True)
    assert stored["global_step"] == 1 and all(bool(value.isfinite().all()) for value in stored["state_dict"].values())


class Within(Callback):
    """Begins another run, through a link to the folder, while this one trains."""

    def __init__(self, begin: Any) -> None:
        self.begin = begin

    def on_train_batch_start(self, *_: Any) -> None:
        self.begin()


def test_two_runs_of_one_process_in_one_folder(model: str, tmp_path: Path) -> None:
    """Beside one another: refused. One after the other: also after an error, whose traceback holds the first."""
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="in use by process") as held:
        fit(tmp_path, model, saving(tmp_path), Within(lambda: fit(tmp_path, model, saving(tmp_path / "link"))))
    for _ in range(2):
        fit(tmp_path, model, saving(tmp_path))
    assert held.tb is not None


def test_a_time_budget_ends_with_a_checkpoint(model: str, tmp_path: Path) -> None:
    run = fit(
        tmp_path,
        model,
        saving(tmp_path, every_n_rollouts=10**6),
        trainer={"max_epochs": -1, "max_time": timedelta(seconds=1)},
    )
    stored = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert stored["global_step"] == run.global_step > 0


def test_rollouts_on_a_full_disk_are_one_message(model: str, tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("a file where the folder should be")
    with pytest.raises(StorageError, match="rank0.pt' can't be written"):
        fit(tmp_path, model, RolloutWriter(every_n_rollouts=1, dirpath=str(tmp_path / "rollouts")))


def test_last_is_that_of_the_newest_run_under_a_loggers_name(model: str, tmp_path: Path) -> None:
    def run(resume: str | None = None) -> Any:
        logger = CSVLogger(tmp_path, name="same")
        return fit(tmp_path, model, RolloutCheckpoint(every_n_rollouts=1), resume=resume, trainer={"logger": logger})

    run()
    run()
    assert run("last").ckpt_path == str(tmp_path / "same/version_1/checkpoints/last.ckpt")


def test_last_skips_runs_with_other_settings(tmp_path: Path) -> None:
    for version, size in enumerate((2, 3)):
        folder = tmp_path / f"version_{version}/checkpoints"
        folder.mkdir(parents=True)
        torch.save({"lightrl": {"settings": {"group_size": size}}}, folder / "last.ckpt")
    assert last_of_runs(tmp_path, {"group_size": 2}) == {tmp_path / "version_0/checkpoints/last.ckpt"}
    assert last_of_runs(tmp_path, {}) == {tmp_path / "version_1/checkpoints/last.ckpt"}
    with pytest.raises(ValueError, match=r"different settings \(.*version_1 has group_size=3"):
        last_of_runs(tmp_path, {"group_size": 4})


class Fail(Callback):
    """Raises when the run is set up, or in its first rollout."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.fail)

    def fail(self, *_: Any) -> None:
        raise RuntimeError("gone")


def test_last_leaves_the_checkpoints_of_before_a_fresh_start_alone(model: str, tmp_path: Path) -> None:
    """One that began and saved nothing goes on from nothing, least of all from the end of another."""
    folder = tmp_path / "checkpoints"
    fit(tmp_path, model, saving(tmp_path))
    shutil.copy(folder / "last.ckpt", folder / "first.ckpt")
    with pytest.raises(RuntimeError, match="gone"):
        fit(tmp_path, model, saving(tmp_path), Fail("on_fit_start"), seed=7)
    assert fit(tmp_path, model, saving(tmp_path), resume="last").global_step == 4  # what did not begin changes nothing
    with pytest.raises(RuntimeError, match="gone"):
        fit(tmp_path, model, saving(tmp_path), Fail("on_train_batch_start"), seed=7)
    with pytest.raises(ValueError, match="ckpt_path=last: "):
        fit(tmp_path, model, saving(tmp_path), resume="last", seed=7)
    fit(tmp_path, model, saving(tmp_path, filename="own"), seed=7)
    (folder / "first.ckpt").touch()
    with pytest.warns(UserWarning, match=r"from .*(own|last).ckpt and skips .*first.ckpt: .*earlier run"):
        fit(tmp_path, model, saving(tmp_path), resume="last", seed=7)
    fit(tmp_path, model, saving(tmp_path, filename="again"), resume=str(folder / "first.ckpt"))
    assert is_of_another_run(folder / "own.ckpt") and not is_of_another_run(folder / "again.ckpt")
