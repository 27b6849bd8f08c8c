"""Logs samples of prompts, completions, and rewards to the terminal, to loggers, and to a file."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from lightrl.algorithms.evaluation import question, trajectory_record
from lightrl.algorithms.experience import TrajectoryLayout, first_rows, trajectory_lengths
from lightrl.callbacks.run_files import describe, run_folder
from lightrl.callbacks.traces import log_traces
from lightrl.checkpoints.files import append_lines
from lightrl.ops.progress import count
from lightrl.records import Experience, Rollouts
from lightrl.rollout.learner import RLCallback

WIDTH_WITHOUT_TERMINAL = 120
COLUMNS = ("prompt", "completion", "reward", "advantage", "num_tokens")
HIDDEN = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, bidirectional formatting characters, and surrogates."""
EVALUATED = 32
"""Minimum number of completions per evaluation in the file, for the report's before/after comparison."""


class CompletionLogger(RLCallback):
    """Logs a few completions every N rollouts, and of the first prompts at each evaluation.

    Prints a table in the terminal (rank 0) and logs it to loggers with tables (W&B, MLflow) or text
    (TensorBoard). Loggers with a trace view (MLflow, Weave, trackio) also receive conversations; see `log_traces`. The
    full records are appended to `samples.jsonl` in the run directory, which `lightrl report` reads. A new run replaces
    this file, and a resumed run appends to it.

    Each line contains `step` (-1 before training, see `EvaluateFirst`), `phase` (`train` or `eval`), `prompt` (as sent
    to the engine), `question` (the last user message), `completion`, `reward`, `reward_parts` (by function), `extra`
    (from `log_extra`), `num_tokens`, and `truncated`. Training adds `advantage` (mean over sampled tokens),
    environments add `turns`, `stop_reason`, and `messages`, and media add `media` (a description). `RolloutWriter`
    saves the media.

    Put `CompletionLogger` before `RewardNormalization` to log raw rewards.

    Args:
        every_n_rollouts: Number of rollouts between training tables. Every evaluation is logged.
        num_samples: Number of completions per table, from different prompts if possible. The file contains at least 32
            per evaluation.
        max_characters: Maximum length of a text in the terminal. Longer texts keep their start and end.
        terminal: Whether to print tables in the terminal.
        full_prompts: Whether to print full prompts with the chat template instead of the last user message.
    """

    reads_old_logprobs = False
    reads_all_rows = False

    def __init__(
        self,
        every_n_rollouts: int = 10,
        num_samples: int = 4,
        max_characters: int = 300,
        terminal: bool = True,
        full_prompts: bool = False,
    ) -> None:
        self.every_n_rollouts = every_n_rollouts
        self.num_samples = num_samples
        self.max_characters = max_characters
        self.terminal = terminal
        self.full_prompts = full_prompts
        self._path = Path("samples.jsonl")
        self._replaces = False  # whether to replace an earlier run's file
        self._rewards: Tensor | None = None
        self._advantages: Tensor | None = None
        self._evaluated: list[dict[str, Any]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Determines the run directory. Collective."""
        super().setup(trainer, pl_module, stage)
        self._path, self._replaces = run_folder(trainer) / "samples.jsonl", False

    def on_rollout_scored(self, trainer: Trainer, pl_module: LightningModule, rollouts: Rollouts) -> None:
        """Stores the rewards before later callbacks change them."""
        self._rewards = rollouts.rewards

    def on_experience_made(self, trainer: Trainer, pl_module: LightningModule, experience: Experience) -> None:
        """Stores the (B,) mean advantage of each trajectory, equal in all its sequences."""
        layout = TrajectoryLayout(experience.trajectory_ids, experience.response_mask)
        total = layout.join(experience.advantages * experience.response_mask).sum(1)
        self._advantages = layout.split(total / layout.mask.sum(1).clamp(min=1))

    def on_fit_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Marks an existing file for replacement, unless the run is resumed."""
        self._replaces = trainer.is_global_zero and trainer.ckpt_path is None and not trainer.fast_dev_run

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._begin()
        done = trainer.fit_loop.total_batch_idx + 1
        if isinstance(batch, Rollouts) and trainer.is_global_zero and done % self.every_n_rollouts == 0:
            kept = {"rewards": self._rewards, "advantages": self._advantages, "tokenizer": _tokenizer(trainer)}
            self._log(trainer, "train", sample_records(batch, self.num_samples, **kept), f"rollout {done}")
        self._rewards = self._advantages = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._evaluated = []

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        missing = max(self.num_samples, EVALUATED) - len(self._evaluated)
        if isinstance(batch, Rollouts) and trainer.is_global_zero and missing > 0 and dataloader_idx == 0:
            self._evaluated += sample_records(batch, missing, tokenizer=_tokenizer(trainer))

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._evaluated:
            done = trainer.fit_loop.total_batch_idx + 1
            title = f"evaluation after {count(done, 'rollout')}" if done else "evaluation"
            title = "evaluation before training" if trainer.sanity_checking else title
            self._log(trainer, "eval", self._evaluated, title)

    on_test_start = on_validation_start
    on_test_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end

    def _begin(self) -> None:
        """Removes an earlier run's file once there are new samples."""
        if self._replaces:
            self._path.unlink(missing_ok=True)
            self._replaces = False

    def _log(self, trainer: Any, phase: str, records: list[dict[str, Any]], title: str) -> None:
        self._begin()
        step = -1 if trainer.sanity_checking else max(trainer.fit_loop.total_batch_idx, 0)
        if not trainer.fast_dev_run:
            lines = [json.dumps({"step": step, "phase": phase, **r}, default=str, ensure_ascii=False) for r in records]
            append_lines(self._path, lines)
        records = records[: self.num_samples]
        for logger in trainer.loggers:
            log_samples(logger, f"samples/{phase}", records, step)
            log_traces(logger, f"samples/{phase}", records, step)
        if self.terminal:
            print_table(trainer, samples_table(records, title, self.max_characters, self.full_prompts))


def _tokenizer(trainer: Any) -> Any:
    return getattr(trainer.datamodule, "tokenizer", None)


def log_samples(logger: Any, name: str, records: list[dict[str, Any]], step: int) -> None:
    """Logs records of `sample_records` to a logger that supports tables or text."""
    shown = [*COLUMNS, *(column for column in ("media", "messages") if any(column in record for record in records))]
    parts = list(dict.fromkeys(name for record in records for name in _several(record)))
    extra = list(dict.fromkeys(name for record in records for name in record.get("extra", ())))
    rows = [
        [
            *(_cell(record.get(column)) for column in shown),
            *(record["reward_parts"].get(name) for name in parts),
            *(record.get("extra", {}).get(name) for name in extra),
        ]
        for record in records
    ]
    shown = [*shown, *(f"reward/{name}" for name in parts), *extra]
    if isinstance(logger, MLFlowLogger):
        columns = {"step": [step] * len(rows), **dict(zip(shown, map(list, zip(*rows, strict=True)), strict=True))}
        logger.experiment.log_table(logger.run_id, columns, f"{name}.json")  # appends rows
    elif hasattr(logger, "log_table"):
        logger.log_table(name, columns=shown, data=rows, step=step)
    elif isinstance(logger, TensorBoardLogger):
        logger.experiment.add_text(name, markdown_table(rows, shown), step)


def _cell(value: Any) -> Any:
    """Converts a conversation to JSON. Returns other values unchanged."""
    return json.dumps(value, default=str, ensure_ascii=False) if isinstance(value, list) else value


def sample_records(
    rollouts: Rollouts,
    num_samples: int,
    *,
    rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    tokenizer: Any = None,
) -> list[dict[str, Any]]:
    """Returns up to `num_samples` records: the first trajectory of each prompt, then the second, and so on.

    The (B,) `rewards` default to `rollouts.rewards`. `advantages` are (B,) means.
    """

    seen: Counter[int] = Counter()
    rank_in_group: dict[int, int] = {}
    for row in first_rows(rollouts.trajectory_ids).tolist():
        group = int(rollouts.group_ids[row])
        rank_in_group[row] = seen[group]
        seen[group] += 1
    lengths = trajectory_lengths(rollouts.response_mask, rollouts.trajectory_ids)
    records = []
    for row in sorted(rank_in_group, key=lambda i: (rank_in_group[i], i))[:num_samples]:
        record = trajectory_record(rollouts, row, tokenizer, rewards=rewards, digits=6)
        record |= {"question": question(rollouts, row), "num_tokens": int(lengths[row])}
        logged = [name for name in rollouts.columns if name.rpartition("/")[0] in rollouts.reward_parts]  # `log_extra`
        extra = {name: rollouts.columns[name][row] for name in logged}
        if any(value is not None for value in extra.values()):
            record["extra"] = extra
        if rollouts.messages:
            own = rollouts.trajectory_ids == rollouts.trajectory_ids[row]
            record["turns"] = 1 if rollouts.turn_ids is None else int(rollouts.turn_ids[own].max()) + 1
        if rollouts.media and rollouts.media[row]:
            record["media"] = describe(rollouts.media[row])
        if advantages is not None:
            record["advantage"] = round(float(advantages[row]), 6)
        records.append(record)
    return records


def shorten(text: str, length: int) -> str:
    """Escapes control characters and shortens a text to its start and end, at most `length` characters."""
    text = text.replace("\r\n", "\n").replace("\n", "↵")
    text = "".join(c.encode("unicode_escape").decode() if HIDDEN.match(c) else c for c in text)
    if len(text) <= length:
        return text
    tail = (length - 3) // 2
    return f"{text[: length - 3 - tail]} … {text[len(text) - tail :]}"


def samples_table(records: list[dict[str, Any]], title: str, max_characters: int, full_prompts: bool = False) -> Table:
    """Returns a table of the records, with `log_extra` values below completions and components below rewards."""
    with_advantage = any("advantage" in record for record in records)
    table = Table(title=Text(f"Samples: {title}"), title_justify="left", title_style="bold", expand=True)
    table.add_column("prompt", ratio=2, overflow="fold")
    table.add_column("completion", ratio=3, overflow="fold")
    for name in ("reward", *(["advantage"] if with_advantage else []), "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    for record in records:
        reward = [_number(record["reward"]), *(f"{name} {_number(value)}" for name, value in _several(record).items())]
        extra = [f"{name}: {value}" for name, value in record.get("extra", {}).items() if value is not None]
        said = [record["completion"], *extra]
        media = f"[{record['media']}]\n" if "media" in record else ""
        table.add_row(
            Text(media + shorten(record["prompt" if full_prompts else "question"], max_characters)),
            Text("\n".join(shorten(text, max_characters) for text in said)),
            Text("\n".join(reward)),
            *([_number(record["advantage"])] if with_advantage else []),
            f"{record['num_tokens']}{' cut' if record['truncated'] else ''}",
        )
    return table


def _several(record: dict[str, Any]) -> dict[str, float | None]:
    """Returns the rewards by function if there are several functions."""
    parts: dict[str, float | None] = record["reward_parts"]
    return parts if len(parts) > 1 else {}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def print_table(trainer: Trainer, table: Table) -> None:
    """Prints a table above the progress bar."""
    bar = trainer.progress_bar_callback
    if isinstance(bar, RichProgressBar) and bar.is_enabled:
        from rich import get_console

        get_console().print(table)  # the progress bar's console
        return
    out, tty = StringIO(), sys.stdout.isatty()
    width = shutil.get_terminal_size((WIDTH_WITHOUT_TERMINAL, 24)).columns
    Console(file=out, width=width, force_terminal=tty, no_color=not tty).print(table)
    printer = bar.print if bar is not None and getattr(bar, "is_enabled", True) else print
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # not every terminal's has all characters
    printer(out.getvalue().rstrip("\n").encode(encoding, "replace").decode(encoding))


def markdown_table(rows: list[list[Any]], columns: Sequence[str] = COLUMNS) -> str:
    """Returns the rows as a Markdown table, for TensorBoard."""

    def cell(value: Any) -> str:
        text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
        return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;").replace("\n", "<br>")

    lines = [columns, ["---"] * len(columns), *([cell(value) for value in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
