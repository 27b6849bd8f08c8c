"""What a TRL script says becomes a configuration that the real command line builds, and nothing is lost in silence."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

import lightrl
from lightrl.algorithms import ExtraLosses, Shaping, Updates
from lightrl.cli import main, run
from lightrl.cli.from_trl import convert_trl, from_trl
from tests.toys import quickstart_model

SCRIPT: dict[str, Any] = {
    "model_name_or_path": "MODEL",
    "dataset_name": "rows.jsonl",
    "reward_funcs": ["think_format_reward", "rewards.right"],
    "reward_weights": [0.5, 1.0],
    "learning_rate": 2.0e-5,
    "warmup_ratio": 0.1,
    "lr_scheduler_type": "cosine",
    "num_generations": 4,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "num_iterations": 2,
    "max_completion_length": 6,
    "beta": 0.04,
    "loss_type": "dr_grpo",
    "bf16": False,
    "gradient_checkpointing": False,
    "num_train_epochs": 1,
    "save_strategy": "no",
    "output_dir": "outputs/moved",
    "ddp_timeout": 100,
    "made_up": 3,
}


def test_sizes_objective_and_schedule_are_those_of_the_script() -> None:
    config, notes = convert_trl(SCRIPT)
    model, data = config["model"]["init_args"], config["data"]["init_args"]
    # 4 per device x 4 steps = 16 completions = 4 prompts x 4; an update has 4 x 2 of them
    assert (data["prompts_per_rollout"], data["group_size"]) == (4, 4)
    assert (model["updates"]["minibatch_size"], model["ppo_epochs"]) == (8, 2)
    assert model["aggregation"] == {"class_path": "ConstantLength", "init_args": {"length": 6}}
    assert model["kl"]["init_args"]["coef"] == 0.04
    assert model["lr_scheduler"] == {"name": "cosine", "warmup": 0.1}
    assert config["trainer"]["precision"] == "32-true" and data["rollouts_per_epoch"] is None
    assert any(note.startswith("ddp_timeout: 100") for note in notes)
    assert any(note.startswith("made_up: 3") for note in notes)


def test_the_defaults_of_trl_are_written_out() -> None:
    config, _ = convert_trl({"model_name_or_path": "m", "dataset_name": "d", "use_vllm": True})
    model = config["model"]["init_args"]
    assert model["kl"] is None and model["aggregation"] == {"class_path": "TokenMean", "init_args": {}}
    loss = model["loss"]["init_args"]
    assert (loss["level"], loss["mode"], loss["high"]) == ("sequence", "mask", 3.0)
    assert config["seed_everything"] == 42 and config["trainer"]["max_epochs"] == 3


@pytest.mark.parametrize(
    ("options", "interval"),
    [
        ({"eval_strategy": "steps", "eval_steps": 6, "steps_per_generation": 2}, 3),  # of rollouts with two updates
        ({"eval_strategy": "steps", "logging_steps": 4}, 4),
        ({"eval_strategy": "epoch", "eval_steps": 6}, None),
    ],
)
def test_evaluation_is_as_often_as_in_the_script(options: dict[str, Any], interval: int | None) -> None:
    config, _ = convert_trl({"model_name_or_path": "m", "dataset_name": "d", **options})
    assert config["trainer"].get("val_check_interval") == interval
    assert ("check_val_every_n_epoch" in config["trainer"]) == (interval is not None)


def test_strings_are_left_alone_as_in_trl() -> None:
    config, notes = convert_trl({"model_name_or_path": "m", "dataset_name": "d", "eval_strategy": "steps"})
    data = config["data"]["init_args"]
    assert data["prompts"]["chat_template"] is data["evaluation"]["prompts"]["chat_template"] is False
    assert any(note.startswith("prompts.chat_template") for note in notes)


def test_rloo_has_its_estimator_and_its_kl_in_the_reward() -> None:
    config, _ = convert_trl({"model_name_or_path": "m", "dataset_name": "d"}, "rloo")
    model = config["model"]["init_args"]
    assert config["model"]["class_path"] == "RLOOLightningModule"
    assert model["kl"] == {"class_path": "KLInReward", "init_args": {"estimator": "k1", "coef": 0.05}}


def test_what_a_script_says_in_other_forms_means_the_same() -> None:
    script = {"model_name_or_path": "m", "dataset_name": "d", "beta": "1e-3", "top_p": None, "save_total_limit": 2}
    script |= {"reward_funcs": "accuracy_reward", "use_peft": True, "lora_r": 4, "generation_kwargs": {"seed": 1}}
    config, _ = convert_trl({**script, "model_revision": "2024", "model_init_kwargs": {"use_cache": False}})
    model, data, trainer = config["model"]["init_args"], config["data"]["init_args"], config["trainer"]
    assert model["kl"]["init_args"]["coef"] == 0.001
    assert [reward["class_path"] for reward in data["rewards"]] == ["MathVerify"]
    assert model["actor"]["lora"] == {"r": 4, "alpha": 32, "target_modules": "all-linear", "quantize_4bit": False}
    assert model["actor"]["kwargs"] == {"use_cache": False, "revision": "2024"}
    assert data["sampling"] == {"max_new_tokens": 512, "temperature": 1.0, "extra": {"seed": 1}}
    (saving,) = (each["init_args"] for each in trainer["callbacks"] if each["class_path"] == "RolloutCheckpoint")
    assert saving == {"every_n_rollouts": 500, "save_top_k": 2}


@pytest.mark.parametrize(
    ("options", "argument"), [({"num_generations": 3}, "num_generations=3"), ({"loss_type": "cispo"}, "loss_type=")]
)
def test_what_would_train_something_else_is_rejected(options: dict[str, Any], argument: str) -> None:
    with pytest.raises(ValueError, match=argument):
        convert_trl({"model_name_or_path": "m", "dataset_name": "d", **options})


def test_secrets_of_a_script_are_neither_printed_nor_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {
        "model_name_or_path": "m",
        "dataset_name": "d",
        "hub_token": "hunter2",
        "output_dir": "https://me:hunter2@h",
    }
    options["model_init_kwargs"] = {"token": "hunter2"}
    (tmp_path / "trl.yaml").write_text(yaml.safe_dump(options))
    from_trl(str(tmp_path / "trl.yaml"), str(tmp_path / "new" / "mine.yaml"))  # whose folder is made
    written, said = (tmp_path / "new" / "mine.yaml").read_text(), "".join(capsys.readouterr())
    assert "hunter2" not in written + said
    assert "model.init_args.actor.kwargs.token: contains a secret" in said


def test_the_command_line_trains_with_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.argv", ["lightrl"])
    model = quickstart_model(tmp_path / "model", num_hidden_layers=1, hidden_size=32, intermediate_size=32)
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": f"{a}+1="}) for a in range(8)))
    (tmp_path / "rewards.py").write_text(
        "def right(completions, **_):\n    return [len(set(c)) for c in completions]\n"
    )
    (tmp_path / "trl.yaml").write_text(yaml.safe_dump({**SCRIPT, "model_name_or_path": model}))
    main(["from-trl", "trl.yaml"])
    assert "made_up: 3 is not converted" in capsys.readouterr().out
    assert "made_up" in (tmp_path / "config.yaml").read_text()
    quiet = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"]
    cli = run(["fit", "--config=config.yaml", *quiet])
    assert cli.trainer.global_step == 8  # 8 prompts are 2 rollouts of 2 x 2 updates
    assert cli.model.optimizers().param_groups[0]["lr"] < 2e-6  # cosine: almost 0 at the end


def test_a_script_instead_of_its_arguments_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("from trl import GRPOTrainer\n")
    with pytest.raises(SystemExit) as stop:
        main(["from-trl", "train.py"])
    assert stop.value.code == 2 and "script=train.py: has no arguments" in capsys.readouterr().err


GROUPS = (ExtraLosses, Shaping, Updates)


def rows_of_the_tables(root: Path) -> list[tuple[str, str]]:
    """(their option, ours) of every row of docs/migrate.md, without those of metrics."""
    page = (root / "docs" / "migrate.md").read_text().split("## From TRL: metrics")[0]
    rows = re.findall(r"^\| (`[^|]+) \| ([^|]+) \|", page, re.MULTILINE)
    return [(theirs, ours.strip()) for theirs, ours in rows]


def test_our_side_of_every_row_exists(root: Path) -> None:
    from lightning.pytorch import Trainer

    from lightrl import algorithms, callbacks, data, engines, environments, objectives, rewards, rollout
    from lightrl.algorithms.settings import LRSchedule

    rooms = (lightrl, algorithms, callbacks, engines, objectives, rewards, data, environments, rollout)
    rows = rows_of_the_tables(root)
    assert len(rows) > 90
    known: dict[str, Any] = {"Trainer": Trainer, "LRSchedule": LRSchedule}
    for theirs, ours in rows:
        names = re.findall(r"`([A-Z]\w+)(?:\.(\w+)(?:\.(\w+))?)?", ours)
        assert names or ours.startswith("-"), (theirs, ours)
        for owner, argument, inner in names:
            cls = known.get(owner) or next((getattr(room, owner) for room in rooms if hasattr(room, owner)), None)
            assert cls is not None, (theirs, owner)
            if argument:
                inits = [each.__init__ for each in cls.__mro__ if "__init__" in vars(each)]
                assert any(argument in inspect.signature(init).parameters for init in inits), (theirs, owner, argument)
            if inner:
                assert inner in {field.name for group in GROUPS for field in fields(group)}, (theirs, inner)


def test_our_side_of_every_metric_is_documented(root: Path) -> None:
    table = (root / "docs" / "migrate.md").read_text().split("## From TRL: metrics")[1]
    ours = re.findall(r"^\| `[^`]+` \| `([^`]+)` \|", table, re.MULTILINE)
    metrics = (root / "docs" / "metrics.md").read_text()
    assert len(ours) == 6 and [name for name in ours if f"| `{name}` |" not in metrics] == []
