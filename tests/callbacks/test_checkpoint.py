"""`RolloutCheckpoint`: which files it keeps, which weights they hold, and that each resumes."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule

from lightrl.callbacks import EMA, EvaluateFirst, RolloutCheckpoint
from lightrl.checkpoints.files import StorageError
from tests.callbacks.toys import Loader, LoggingModule, make_rollouts
from tests.toys import quiet_trainer


class Rewards(LoggingModule):
    """Logs rewards 1, 3, 2, 5, 4, 0 in turn."""

    def training_step(self, rollouts: Any, batch_idx: int) -> dict[str, float]:
        metrics = super().training_step(rollouts, batch_idx)
        self.log("score", (1.0, 3.0, 2.0, 5.0, 4.0, 0.0)[batch_idx])
        return metrics


def two_rollouts() -> Any:
    return make_rollouts(["1+1="], [["2", "3"]], [[1.0, 0.0]])


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ({}, ["rollout=000006"]),
        ({"every_n_rollouts": 4}, ["rollout=000006"]),  # the end of a run is saved, too
        ({"save_top_k": 0}, []),
        ({"save_top_k": 2}, ["rollout=000005", "rollout=000006"]),
        ({"save_top_k": -1, "every_n_rollouts": 2}, ["rollout=000002", "rollout=000004", "rollout=000006"]),
        ({"save_top_k": 2, "monitor": "score"}, ["rollout=000004", "rollout=000005"]),
        ({"save_top_k": 1, "monitor": "score", "mode": "min"}, ["rollout=000006"]),
        ({"filename": "{rollout}-{score:.1f}", "monitor": "score"}, ["4-5.0"]),
    ],
)
def test_what_is_kept(
    arguments: dict[str, Any], kept: list[str], make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    callback = RolloutCheckpoint(dirpath=str(tmp_path / "c"), **{"every_n_rollouts": 1, **arguments})
    make_trainer(callback, enable_checkpointing=True).fit(Rewards(), Loader([two_rollouts()] * 6))
    assert sorted(p.stem for p in (tmp_path / "c").glob("*.ckpt")) == sorted([*kept, "last"])


# ---- the weights that were evaluated ---------------------------------------------------------------------------------


class Counting(LoggingModule):
    """Each rollout adds 1 to the weight, whose value decides the evaluation's score."""

    def __init__(self, scores: Sequence[float], name: str = "eval/reward") -> None:
        super().__init__()
        self.scores, self.name, self.evaluated = scores, name, []

    def training_step(self, rollouts: Any, batch_idx: int) -> dict[str, float]:
        self.optimizers().step()
        with torch.no_grad():
            self.weight += 1
        self.log("reward/mean", 0.5)
        return {}

    def validation_step(self, rollouts: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.evaluated.append(round(float(self.weight)))
        self.log(self.name, torch.tensor(float(self.scores[self.evaluated[-1]])), batch_size=1)


class Supervised(LightningModule):
    """The same with automatic optimization, as supervised runs have it."""

    def __init__(self, scores: Sequence[float]) -> None:
        super().__init__()
        self.weight, self.scores = torch.nn.Parameter(torch.zeros(1)), scores

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return -self.weight.sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("eval/loss", self.scores[round(float(self.weight))])


def fit(
    folder: Path, module: Any, rollouts: int, *callbacks: Any, resume: str | None = None, sets: int = 1, **trainer: Any
) -> Any:
    given = {"max_epochs": 5, "enable_checkpointing": True, "default_root_dir": folder, **trainer}
    run = quiet_trainer(callbacks=list(callbacks), **given)
    evaluation = [Loader([two_rollouts()]) for _ in range(sets)]
    run.fit(module, Loader([two_rollouts()] * rollouts), evaluation or None, ckpt_path=resume)
    return run


def named(folder: Path) -> dict[str, float]:
    """Name -> weight of each checkpoint except the last."""
    stored = {p.stem: torch.load(p, weights_only=True) for p in folder.glob("*.ckpt") if p.stem != "last"}
    return {name: float(each["state_dict"]["weight"]) for name, each in stored.items()}


NAME = "{rollout}: {eval/reward:.0f}"


@pytest.mark.parametrize(
    ("rollouts", "trainer", "evaluated_at"),
    [
        (1, {}, [1, 2, 3, 4, 5]),  # at the end of each epoch
        (6, {"val_check_interval": 2, "max_epochs": 1}, [2, 4, 6]),  # within an epoch
        (3, {"val_check_interval": 2, "check_val_every_n_epoch": None, "max_epochs": 3}, [2, 4, 6, 8]),
        (2, {"check_val_every_n_epoch": 2}, [4, 8]),
    ],
)
@pytest.mark.parametrize("every_n", [1, None])
def test_the_file_of_a_score_holds_the_weights_that_got_it(
    every_n: int | None, rollouts: int, trainer: dict[str, Any], evaluated_at: list[int], tmp_path: Path
) -> None:
    scores = [0, 0, 1, 9, 2, 3, 8, 4, 5, 6, 7]
    saving = RolloutCheckpoint(every_n, str(tmp_path), save_top_k=-1, monitor="eval/reward", filename=NAME)
    fit(tmp_path, Counting(scores), rollouts, saving, **trainer)
    assert named(tmp_path) == {f"{weight}: {scores[weight]}": weight for weight in evaluated_at}
    best = max(evaluated_at, key=lambda weight: scores[weight])
    assert float(torch.load(saving.best_model_path)["state_dict"]["weight"]) == best


def test_supervised_runs_rank_what_was_evaluated(tmp_path: Path) -> None:
    name, scores = "{rollout}: {eval/loss:.0f}", [9.0, 5.0, 1.0, 4.0, 3.0, 0.0]
    saving = RolloutCheckpoint(1, str(tmp_path), monitor="eval/loss", mode="min", save_top_k=2, filename=name)
    fit(tmp_path, Supervised(scores), 1, saving)
    assert named(tmp_path) == {"2: 1": 2.0, "5: 0": 5.0}


def test_an_evaluation_before_training_ranks_the_initial_weights(tmp_path: Path) -> None:
    saving = RolloutCheckpoint(1, str(tmp_path), monitor="eval/reward", filename=NAME, save_top_k=2)
    fit(tmp_path, Counting([9, 1, 2, 3, 4, 5]), 1, saving, EvaluateFirst())
    assert named(tmp_path) == {"0: 9": 0.0, "5: 5": 5.0}
    module = Counting([9, 1, 2, 3, 4, 5])
    fit(tmp_path, module, 1, RolloutCheckpoint(1, str(tmp_path)), resume=str(tmp_path / "0: 9.ckpt"))
    assert module.evaluated == [1, 2, 3, 4, 5]


def test_a_check_of_some_batches_before_training_ranks_nothing(tmp_path: Path) -> None:
    saving = RolloutCheckpoint(1, str(tmp_path), monitor="eval/reward", filename=NAME)
    run = quiet_trainer(callbacks=[saving], enable_checkpointing=True, num_sanity_val_steps=1)
    run.fit(Counting([9, 1]), Loader([two_rollouts()]), Loader([two_rollouts()] * 2))
    assert named(tmp_path) == {"1: 1": 1.0}


@pytest.mark.parametrize("rollouts", [1, 2])
def test_a_ranked_file_resumes_without_a_second_evaluation(rollouts: int, tmp_path: Path) -> None:
    scores = [0, 1, 9, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12]
    saving = RolloutCheckpoint(1, str(tmp_path), monitor="eval/reward", filename=NAME, save_top_k=-1)
    whole = Counting(scores)
    fit(tmp_path, whole, rollouts, saving)
    module = Counting(scores)
    again = RolloutCheckpoint(1, str(tmp_path), monitor="eval/reward", filename=NAME, save_top_k=-1)
    run = fit(tmp_path, module, rollouts, again, resume=str(tmp_path / "2: 9.ckpt"))
    assert [weight for weight in whole.evaluated if weight > 2] == module.evaluated
    assert float(module.weight) == float(whole.weight) and run.current_epoch == 5
    assert again.best_k_models.keys() == saving.best_k_models.keys()
    run = fit(tmp_path, module, rollouts, again, resume=str(tmp_path / "last.ckpt"), max_epochs=6)
    assert run.fit_loop.total_batch_idx + 1 == 6 * rollouts and run.current_epoch == 6


def test_with_an_average_the_file_of_a_score_holds_the_policy_and_the_average_that_got_it(tmp_path: Path) -> None:
    class Averaged(Counting):
        def validation_step(self, rollouts: Any, batch_idx: int) -> None:
            self.averages = [*getattr(self, "averages", []), float(self.weight)]
            self.log("eval/reward", torch.tensor([1.0, 9.0, 2.0][len(self.averages) - 1]))

    module = Averaged([])
    module.trained_model = (module, None)  # type: ignore[attr-defined]
    saving = RolloutCheckpoint(1, str(tmp_path), monitor="eval/reward", filename=NAME)
    fit(tmp_path, module, 1, EMA(decay=0.5), saving, max_epochs=3)
    stored = torch.load(tmp_path / "2: 9.ckpt", weights_only=True)
    assert float(stored["state_dict"]["weight"]) == 2.0
    (average,) = (float(state["ranks"][0]["weight"]) for name, state in stored["callbacks"].items() if "EMA" in name)
    assert average == module.averages[1] != 2.0


# ---- the last one ----------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The run ends where nothing can be saved."""


class Kill(Callback):
    def __init__(self, in_rollout: int) -> None:
        self.in_rollout = in_rollout

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.fit_loop.total_batch_idx == self.in_rollout - 1:
            os._exit(9)


def test_the_last_checkpoint_is_there_before_the_first_evaluation(tmp_path: Path) -> None:
    """Killed in rollout 4 of an epoch of 6, with a monitor that the epoch's end would log."""
    saving = RolloutCheckpoint(1, str(tmp_path), monitor="eval/reward")
    process = os.fork()
    if process == 0:
        fit(tmp_path, Counting([0] * 9), 6, Kill(4), saving, max_epochs=1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 9
    assert float(torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]["weight"]) == 3


class Batches(Callback):
    """Counts rollouts; logs nothing."""

    started = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.started += 1


def test_a_monitor_that_nothing_logs_is_reported(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="monitor='eval/rewrd'"):
        fit(tmp_path, Counting([0] * 9), 2, RolloutCheckpoint(2, str(tmp_path), monitor="eval/rewrd"), max_epochs=1)
    assert named(tmp_path) == {}


# ---- the disk --------------------------------------------------------------------------------------------------------


def files(folder: Path) -> int:
    """Number of different files, whatever their names."""
    return len({path.stat().st_ino for path in folder.iterdir() if ".ckpt" in path.name and path.suffix != ".sha256"})


def test_one_copy_per_checkpoint(tmp_path: Path) -> None:
    fit(tmp_path, Counting([0, 1]), 1, RolloutCheckpoint(1, str(tmp_path)), max_epochs=1)
    assert (tmp_path / "last.ckpt").samefile(tmp_path / "rollout=000001.ckpt") and files(tmp_path) == 1
    fit(tmp_path, Counting([0] * 9), 5, RolloutCheckpoint(1, str(tmp_path), save_top_k=3), max_epochs=1)
    assert (tmp_path / "last.ckpt").samefile(tmp_path / "rollout=000005.ckpt")
    assert files(tmp_path) == 3


def test_a_damaged_last_checkpoint_falls_back_to_the_one_before_it(tmp_path: Path) -> None:
    def run(resume: str | None, epochs: int) -> int:
        saving, seen = RolloutCheckpoint(1, str(tmp_path), save_top_k=2), Batches()
        fit(tmp_path, Counting(range(9)), 1, saving, seen, resume=resume, max_epochs=epochs)
        return seen.started

    assert run(None, 3) == 3
    content = bytearray((tmp_path / "last.ckpt").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "last.ckpt").write_bytes(content)  # in place: the file's other name is damaged, too
    with pytest.warns(UserWarning, match="skips .*last.ckpt"):
        assert run("last", 4) == 2
    assert float(torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]["weight"]) == 4


class FillDisk(Callback):
    """From rollout N on no file can be longer than a kilobyte."""

    def __init__(self, rollout: int) -> None:
        self.rollout = rollout

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.fit_loop.total_batch_idx == self.rollout - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.mark.parametrize("arguments", [{}, {"monitor": "eval/reward"}])
@pytest.mark.parametrize("rollout", [1, 3])
def test_a_full_disk_names_what_can_be_resumed_from(
    rollout: int, arguments: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr("lightrl.checkpoints.rollout_checkpoint.rank_zero_info", told.append)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    saving = RolloutCheckpoint(1, str(tmp_path / "c"), **arguments)
    try:
        with pytest.raises(StorageError, match="can't be written"):
            fit(tmp_path, Counting(range(9)), 1, FillDisk(rollout), saving)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    resume = [each.removeprefix("Resume with: --ckpt_path ") for each in told if each.startswith("Resume")]
    assert resume == ([] if rollout == 1 else [str(tmp_path / "c" / "last.ckpt")])
    assert all(Path(path).exists() for path in saving.best_k_models)
    if resume:
        assert float(torch.load(resume[0], weights_only=True)["state_dict"]["weight"]) == 2
