"""docs/lightning.md: every argument of the Trainer is in its table, and each row does what it says."""

from __future__ import annotations

import csv
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Trainer, callbacks
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightrl.algorithms import GRPOLightningModule, LRSchedule
from lightrl.cli.project import init as project
from lightrl.data.prompts import PromptSource
from lightrl.rollout import Evaluation, RolloutDataModule
from tests.toys import SMALL, model_fixture, quiet_trainer, sums_data

PAGE = (Path(__file__).parent.parent / "docs" / "lightning.md").read_text()
ROWS = dict(re.findall(r"^\| `(\w+)` \| (works|not supported) \|", PAGE, re.MULTILINE))
ROW_NAMES = [{"prompt": f"{a}+1=", "answer": a + 1} for a in range(6)]
REFUSED: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}


model = model_fixture(**SMALL)


def data(**kwargs: Any) -> RolloutDataModule:
    sizes = {"prompts": ROW_NAMES, "prompts_per_rollout": 2, "group_size": 2, "rollouts_per_epoch": 2}
    return sums_data(**{**sizes, **kwargs})


def module(model: str, **kwargs: Any) -> GRPOLightningModule:
    return GRPOLightningModule(model, kl=None, **kwargs)


def test_every_argument_of_the_trainer_has_a_row() -> None:
    assert set(inspect.signature(Trainer).parameters) <= set(ROWS)
    assert {name for name, says in ROWS.items() if says == "not supported" and name[0].islower()} == set(REFUSED)


@pytest.mark.parametrize("argument", sorted(REFUSED))
def test_an_unsupported_argument_is_named(argument: str, model: str) -> None:
    value = REFUSED[argument]
    with pytest.raises((ValueError, MisconfigurationException), match=f"{argument}={value}"):
        quiet_trainer(**{argument: value}).fit(module(model), data())


@pytest.mark.parametrize("name", [name for name, says in ROWS.items() if says == "not supported" and name[0].isupper()])
def test_an_unsupported_callback_is_rejected_by_name(name: str, model: str) -> None:
    with pytest.raises((ValueError, RuntimeError, MisconfigurationException), match=name):
        quiet_trainer(callbacks=[getattr(callbacks, name)({0: 1})]).fit(module(model), data())


def test_what_works_works_in_one_run_without_a_callback_for_weights(model: str, tmp_path: Path) -> None:
    seen: list[int] = []
    own = [
        callbacks.EarlyStopping("eval/reward", mode="max", patience=10),
        callbacks.ModelCheckpoint(monitor="eval/reward", mode="max"),
        callbacks.LearningRateMonitor(),
        callbacks.Timer(),
        callbacks.LambdaCallback(on_train_batch_end=lambda trainer, *_: seen.append(trainer.global_step)),
        callbacks.TQDMProgressBar(),
        callbacks.OnExceptionCheckpoint(tmp_path),
    ]
    trainer = Trainer(
        accelerator="cpu", devices=1, logger=CSVLogger(tmp_path / "csv"), callbacks=own, max_epochs=2, min_epochs=1,
        limit_train_batches=1, limit_val_batches=1, val_check_interval=1, num_sanity_val_steps=1, log_every_n_steps=1,
        deterministic=True, inference_mode=False, profiler="simple", detect_anomaly=True, sync_batchnorm=True,
        reload_dataloaders_every_n_epochs=1, default_root_dir=tmp_path,
    )  # fmt: skip
    schedule = LRSchedule("linear")
    own_data = data(evaluation=Evaluation({"small": ROW_NAMES[:2], "large": ROW_NAMES}, batch_size=8))
    own[0].monitor = own[1].monitor = "eval/small/reward"
    trainer.fit(module(model, lr_scheduler=schedule), own_data)
    assert seen == [1, 2] and trainer.checkpoint_callback.best_model_path
    with open(trainer.logger.log_dir + "/metrics.csv") as file:
        rows = list(csv.DictReader(file))
    rates = [float(row["optim/lr_policy"]) for row in rows if row["optim/lr_policy"]]
    assert rates == pytest.approx([1e-6, 0.5e-6])  # linear over the 2 updates that the run makes
    assert {"eval/small/reward", "eval/large/reward", "completions/length_min"} <= rows[0].keys()
    torch.set_anomaly_enabled(False)
    torch.use_deterministic_algorithms(False)


def test_a_null_number_of_rollouts_is_one_pass_in_the_order_of_the_rows(model: str) -> None:
    seen: list[str] = []

    def note(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        seen.extend(prompts)
        return [float(len(text)) for text in completions]

    own = data(
        prompts=PromptSource(rows=ROW_NAMES, shuffle=False),
        rollouts_per_epoch=None,
        rewards=[note],
        prompts_per_rollout=3,
    )
    trainer = quiet_trainer(callbacks=[])
    trainer.fit(module(model), own)
    assert trainer.global_step == 2
    names = [row["prompt"] for row in ROW_NAMES]
    assert (set(seen[:6]), set(seen[6:])) == (set(names[:3]), set(names[3:]))  # groups are scored as they finish
    assert len(seen) == 12


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (LRSchedule("constant", warmup=2), [0.5, 1, 1, 1]),
        (LRSchedule("linear", floor=0.2), [1, 0.8, 0.6, 0.4]),
        (LRSchedule("cosine", warmup=0.25), [1, 1, 0.75, 0.25]),
    ],
)
def test_schedules_by_hand(schedule: LRSchedule, expected: list[float]) -> None:
    assert [schedule.factor(update, 4) for update in range(4)] == pytest.approx(expected)


def test_the_python_block_builds(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1="}\n')
    (tmp_path / "rewards.py").write_text("def correct(completions, **_):\n    return [1.0 for _ in completions]\n")
    block, _ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(block.replace("MODEL", model), names)
    assert names["data"].rollouts_per_epoch is None and names["module"].lr_scheduler_factory.warmup == 0.03


def test_max_steps_counts_updates_and_barebones_runs(model: str) -> None:
    trainer = Trainer(accelerator="cpu", max_steps=3, min_steps=1, max_time="00:01:00:00", barebones=True)
    trainer.fit(module(model), data())
    assert trainer.global_step == 3


def test_a_project_with_its_own_callback_runs_from_a_script(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    project("project", model=model)
    (tmp_path / "my_callbacks.py").write_text(
        "from lightning.pytorch import Callback\n\n\n"
        "class MyCallback(Callback):\n"
        "    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):\n"
        "        print(f'batch {batch_idx}: {len(batch)} completions', 'reward/mean' in outputs)\n\n"
        "    def on_validation_end(self, trainer, pl_module):\n"
        "        print('evaluated', 'eval/reward/correct' in trainer.callback_metrics)\n"
    )
    for file in Path("project").iterdir():
        file.rename(tmp_path / file.name)
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    small = {"engine": "TransformersEngine", "prompts_per_rollout": 2, "group_size": 2, "rollouts_per_epoch": 6}
    config = yaml.safe_load(text)
    config["data"] = {"init_args": {**small, "sampling": {"max_new_tokens": 2}}}
    config["trainer"] |= {"accelerator": "cpu", "max_epochs": 1}
    Path("my_run.yaml").write_text(yaml.safe_dump(config))
    _, block = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(block, {})
    printed = capsys.readouterr().out
    assert printed.count("4 completions True") == 6 and printed.count("evaluated True") == 2
    saved = {path.name for path in Path("outputs/my_run/checkpoints").glob("*.ckpt")}
    assert "last.ckpt" in saved and len(saved) == 2 and list(Path("outputs/wandb").glob("offline-run-*"))
