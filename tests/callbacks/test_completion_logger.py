"""What CompletionLogger prints, logs and writes."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from rich.console import Console

from lightrl.callbacks.coefficients import RewardNormalization
from lightrl.callbacks.completion_logger import CompletionLogger, sample_records, samples_table
from lightrl.callbacks.throughput import EvaluateFirst
from lightrl.cli.report import report
from lightrl.cli.report.read import read_run
from lightrl.records import Rollouts
from tests.callbacks.toys import Loader, LoggingModule, make_rollouts
from tests.rows import as_experience


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


def test_records_of_training_and_evaluation(
    rollouts: Rollouts, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    trainer = make_trainer(CompletionLogger(every_n_rollouts=2, num_samples=3, terminal=False))
    trainer.fit(LoggingModule(), Loader([rollouts] * 4), Loader([rollouts]))
    records = read(tmp_path)
    assert [(r["step"], r["phase"]) for r in records] == [(1, "train")] * 3 + [(3, "train")] * 3 + [(3, "eval")] * 4
    # the first completion of each prompt, then the second of the first
    assert [r["completion"] for r in records[:3]] == ["2", "4\n", "[/red]33"]
    # "1+1=" takes positions 0..3, so "2" is at 4; "[b]2+2=" takes 0..6, "4\n" is at 7 and 8; "[/red]33" at 4..11
    assert [r["advantage"] for r in records[:3]] == [4.0, 7.5, 7.5]
    assert records[0] == {
        "step": 1, "phase": "train", "prompt": "1+1=", "question": "1+1=", "completion": "2", "reward": 1.0,
        "reward_parts": {"exact": 1.0}, "num_tokens": 1, "truncated": False, "advantage": 4.0,
    }  # fmt: skip
    assert "advantage" not in records[-1]


def test_rewards_are_raw_before_the_normalisation(
    rollouts: Rollouts, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    module = LoggingModule()
    trainer = make_trainer(CompletionLogger(1, num_samples=3, terminal=False), RewardNormalization())
    trainer.fit(module, Loader([rollouts]))
    assert [r["reward"] for r in read(tmp_path)] == [1.0, 1.0, 0.0]


def test_a_new_run_begins_the_file_anew_and_a_resumed_one_goes_on(
    rollouts: Rollouts, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    for _ in range(2):
        trainer = make_trainer(CompletionLogger(1, num_samples=1, terminal=False), max_epochs=1)
        trainer.fit(LoggingModule(), Loader([rollouts] * 2))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert [r["step"] for r in read(tmp_path)] == [0, 1]
    trainer = make_trainer(CompletionLogger(1, num_samples=1, terminal=False), max_epochs=2)
    trainer.fit(LoggingModule(), Loader([rollouts] * 2), ckpt_path=tmp_path / "x.ckpt", weights_only=False)
    assert [r["step"] for r in read(tmp_path)] == [0, 1, 2, 3]


def test_the_table_shows_texts_as_they_are_in_the_width_there_is(rollouts: Rollouts) -> None:
    rollouts.completions[0] = "x" * 1000 + "END"
    for width in (50, 120):
        out = io.StringIO()
        table = samples_table(sample_records(rollouts, 4), "[bold]rollout 1", max_characters=100)
        Console(file=out, width=width).print(table)
        lines = out.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        text = "".join(lines)
        assert "Samples: [bold]rollout 1" in text
        assert "\x1b" not in text
    assert "[/red]33" in text and "[b]2+2=" in text  # not taken for markup
    assert "4↵" in text and r"\x1b[2J55" in text  # control characters made visible


def test_parts_of_the_reward_and_what_functions_logged_are_shown_everywhere(
    rollouts: Rollouts, make_trainer: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class TableLogger(CSVLogger):
        log_table = mock.Mock()

    rollouts.reward_parts = {"exact": rollouts.rewards, "Judge": torch.tensor([0.5, 0.25, 0.0, 0.0])}
    rollouts.columns = {"answer": [2, 2, 4, 4], "Judge/verdict": ["well done", None, None, None]}
    logger = TableLogger(tmp_path, name="", version="")
    make_trainer(CompletionLogger(1, num_samples=2), logger=[logger, TensorBoardLogger(tmp_path)]).fit(
        LoggingModule(), Loader([rollouts])
    )
    table = TableLogger.log_table.call_args.kwargs
    assert table["columns"][5:] == ["reward/exact", "reward/Judge", "Judge/verdict"]
    assert [row[5:] for row in table["data"]] == [[1.0, 0.5, "well done"], [1.0, 0.0, None]]
    assert [record.get("extra") for record in read(tmp_path)] == [{"Judge/verdict": "well done"}, None]
    shown = capsys.readouterr().out
    page = report(tmp_path).read_text()
    assert "Judge/verdict: well done" in shown and "Judge 0.5" in shown
    assert "<span>Judge/verdict</span><span>well done</span>" in page and "<span>Judge</span><span>0.5</span>" in page


def test_a_terminal_without_all_characters_does_not_end_the_run(
    rollouts: Rollouts, make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr("sys.stdout", terminal)
    make_trainer(CompletionLogger(1, num_samples=2)).fit(LoggingModule(), Loader([rollouts]))
    terminal.flush()
    assert b"Samples: rollout 1" in terminal.buffer.getvalue()  # type: ignore[attr-defined]


def test_the_evaluation_before_training_is_logged_at_step_minus_one(
    rollouts: Rollouts, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    trainer = make_trainer(EvaluateFirst(), CompletionLogger(9, num_samples=1, terminal=False))
    module = LoggingModule()
    better = copy.copy(rollouts)
    better.rewards = torch.tensor([1.0, 1.0, 1.0, 1.0])
    rollouts.rewards = torch.tensor([0.0, 0.0, 1.0, 0.0])
    trainer.fit(module, Loader([rollouts] * 2), Loader([rollouts, better, better]))
    run = read_run(tmp_path)
    # all three batches before training too: (0.25 + 1 + 1) / 3
    assert run.metrics["eval/reward"] == pytest.approx({-1: 0.75, 1: 0.75})
    assert [(r["step"], r["phase"]) for r in run.samples] == [(-1, "eval")] * 12 + [(1, "eval")] * 12
    page = report(tmp_path).read_text()
    assert "before training" in page and "after rollout 2" in page


def test_a_trajectory_of_two_rows_is_one_sample() -> None:
    rollouts = make_rollouts(["ab"], [["cd", "efg", "h"]], [[1.0, 1.0, 0.0]])
    rollouts.trajectory_ids = torch.tensor([0, 0, 1])
    rollouts.turn_ids = torch.tensor([[-1, -1, 0, 0, -1], [-1, -1, 1, 1, 1], [-1, -1, 0, -1, -1]])
    rollouts.stop_reasons = ["turns", "turns", "stop"]
    rollouts.messages = [[{"role": "user", "content": "ab"}]] * 3
    records = sample_records(rollouts, 5)
    assert [(r["num_tokens"], r["turns"], r["stop_reason"]) for r in records] == [(5, 2, "turns"), (1, 1, "stop")]
    log = CompletionLogger(1, terminal=False)
    advantages = torch.tensor([[0, 0, 1, 1, 0], [0, 0, 3, 2, 3], [0, 0, 7, 0, 0]], dtype=torch.float)
    experience = as_experience(rollouts, advantages=advantages, trajectory_ids=rollouts.trajectory_ids)
    log.on_rollout_scored(None, None, rollouts)  # type: ignore[arg-type]
    log.on_experience_made(None, None, experience)  # type: ignore[arg-type]
    assert log._advantages is not None and log._advantages.tolist() == [2.0, 2.0, 7.0]


def test_loggers_that_take_tables_or_text_get_them(
    rollouts: Rollouts, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    class TableLogger(CSVLogger):
        """A logger with W&B's method."""

        log_table = mock.Mock()

    loggers = [CSVLogger(tmp_path / "a"), TableLogger(tmp_path / "b"), TensorBoardLogger(tmp_path / "c")]
    trainer = make_trainer(CompletionLogger(1, num_samples=1, terminal=False), logger=loggers)
    with mock.patch.object(loggers[2].experiment, "add_text") as add_text:
        trainer.fit(LoggingModule(), Loader([rollouts]))
    TableLogger.log_table.assert_called_once_with(
        "samples/train",
        columns=["prompt", "completion", "reward", "advantage", "num_tokens"],
        data=[["1+1=", "2", 1.0, 4.0, 1]],
        step=0,
    )
    assert add_text.call_args.args[0] == "samples/train" and "| 1+1= | 2 | 1 | 4 | 1 |" in add_text.call_args.args[1]


CHAT = [
    {"role": "system", "content": "You are a helpful AI assistant named SmolLM"},
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "an answer"},
    {"role": "user", "content": "What is 47 + 98?"},
]


@pytest.mark.parametrize(
    ("raw", "want"),
    [
        (CHAT, "What is 47 + 98?"),
        ([*CHAT, {"role": "assistant", "content": "It is"}], "What is 47 + 98?"),
        ([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}], "[image]\nWhat?"),
        ([{"role": "system", "content": "Only a system prompt"}], "Only a system prompt"),
        ("few-shot text", "few-shot text"),
        (None, "<|im_start|>system..."),
    ],
)  # fmt: skip
def test_the_table_shows_the_last_user_message(raw: Any, want: str) -> None:
    rollouts = make_rollouts(["<|im_start|>system..."], [["145", "1"]], [[1.0, 0.0]])
    rollouts.raw_prompts = [] if raw is None else [raw, raw]
    records = sample_records(rollouts, 1)
    assert records[0]["question"] == want and records[0]["prompt"] == "<|im_start|>system..."
    for full, shown in ((False, want), (True, "<|im_start|>system...")):
        out = io.StringIO()
        Console(file=out, width=200).print(samples_table(records, "x", 300, full))
        assert shown.replace("\n", "↵") in out.getvalue()
