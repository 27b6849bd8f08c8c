"""Saves full trajectories: tokens, masks, log-probs, advantages, rewards, and texts."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightrl.algorithms.evaluation import question, trajectory_record
from lightrl.callbacks.run_files import run_folder, type_name, write_once
from lightrl.checkpoints.files import atomic_write
from lightrl.records import Experience, Media, Rollouts
from lightrl.rewards.encoding import png
from lightrl.rollout.datamodule import RolloutDataModule
from lightrl.rollout.learner import RLCallback

TENSORS = (
    *("token_ids", "attention_mask", "response_mask", "group_ids", "trajectory_ids", "turn_ids"),
    *("engine_logprobs", "old_logprobs", "ref_logprobs"),
    *("advantages", "rewards", "valid", "values", "returns", "entropy"),
)
OF_TOKENS = ("advantages", "engine_logprobs", "old_logprobs", "ref_logprobs", "values", "entropy")
"""Per-token fields of a record, if they have been computed."""


class RolloutWriter(RLCallback):
    """Saves the trajectories of every Nth rollout before its update.

    Each rank writes `DIR/rollout=000010/rank0.pt`, with the tensors of `Experience`, raw reward components, and model
    inputs such as pixels. It also writes `rank0.jsonl`, with one trajectory per line, for `lightrl view`:

    - `prompt`, `question` (the last user message), `completion`, `messages`, `columns`, `stop_reason`, `reward`,
      `reward_parts`, `group`, `trajectory`, and `trained` (false without a reward)
    - `turns`: rewards, mean advantage, number of tokens, and state key of each turn
    - `rows`: `token_ids`, `tokens` (texts), `special` (positions of special tokens), and `turns` (-1 for context) of
      each sequence, and per token (0 for context) `advantages`, `engine_logprobs`, `policy_versions`, `old_logprobs`
      and `entropy` (before the update), `new_logprobs` (after it), and `ref_logprobs` and `values` if available

    Decoded media are in `DIR/rollout=000010/media`, as PNG files and NumPy arrays, and a trajectory's `media` lists its
    files. Load a rollout with `load_rollouts(DIR / "rollout=000010")`. A full disk stops the run.

    Args:
        every_n_rollouts: Number of rollouts between saves.
        dirpath: Directory. Defaults to `rollouts/` in the run directory.
        evaluate: Whether to run the policy on each saved rollout after the update, and before it if necessary. False
            saves only values that training computes.
    """

    reads_old_logprobs = False
    reads_all_rows = False

    def __init__(self, every_n_rollouts: int = 10, dirpath: str | None = None, evaluate: bool = True) -> None:
        self.every_n_rollouts = every_n_rollouts
        self.dirpath = dirpath
        self.evaluate = evaluate
        self._folder = Path()
        self._rollouts: Rollouts | None = None
        self._saved: tuple[Path, Experience, list[dict[str, Any]]] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Determines the run directory. Collective."""
        super().setup(trainer, pl_module, stage)
        self._folder = Path(self.dirpath or run_folder(trainer) / "rollouts")

    def on_rollout_scored(self, trainer: Trainer, pl_module: LightningModule, rollouts: Rollouts) -> None:
        self._rollouts = rollouts

    def on_experience_made(self, trainer: Trainer, pl_module: Any, experience: Experience) -> None:
        rollouts, self._rollouts = self._rollouts, None
        done = trainer.fit_loop.total_batch_idx + 1
        if rollouts is None or done % self.every_n_rollouts:
            return
        folder = self._folder / f"rollout={done:06d}"
        path = folder / f"rank{trainer.global_rank}.jsonl"
        sampled = replace(experience, response_mask=rollouts.response_mask)  # also of failed trajectories
        if self.evaluate and (experience.old_logprobs is None or experience.entropy is None):
            now = pl_module.evaluate_policy(sampled)
            old = now["logprobs"] if experience.old_logprobs is None else experience.old_logprobs
            experience = replace(experience, old_logprobs=old, entropy=now["entropy"])
        tensors = {name: getattr(experience, name) for name in TENSORS}
        stored: dict[str, Any] = {name: value.cpu() for name, value in tensors.items() if value is not None}
        stored |= {f"reward/{name}": part.cpu() for name, part in rollouts.reward_parts.items()}
        stored |= {"truncated": rollouts.truncated.cpu(), "temperature": rollouts.temperature}
        stored |= {"policy_version": rollouts.policy_version}
        if any(support is not None for support in experience.supports):
            stored["supports"] = [None if s is None else (s.counts, s.ids) for s in experience.supports]
        if any(routes is not None for routes in experience.routes):
            stored["routes"] = [None if r is None else r.experts for r in experience.routes]
        if any(rollouts.inputs):
            stored["inputs"] = [{k: v.cpu() for k, v in inputs.items()} for inputs in rollouts.inputs]
        with atomic_write(path.with_suffix(".pt")) as binary:
            torch.save(stored, binary)
        saved = {key: save_media(media, folder) for key, media in {id(x): x for x in rollouts.media}.items()}
        data = trainer.datamodule  # type: ignore[attr-defined]
        tokenizer = data.tokenizer if isinstance(data, RolloutDataModule) else None
        records = []
        for row, record in trajectory_records(rollouts, experience, tokenizer):
            place = {"rollout": done, "rank": trainer.global_rank}
            media = {"media": saved[id(rollouts.media[row])]} if rollouts.media else {}
            records.append({**place, **media, **record})
        _write(path, records)
        if self.evaluate:
            self._saved = path, sampled, records

    def on_policy_updated(self, trainer: Trainer, pl_module: Any, metrics: dict[str, float]) -> None:
        if self._saved is None:
            return
        (path, experience, records), self._saved = self._saved, None
        logprobs = pl_module.evaluate_policy(experience)["logprobs"].cpu()
        for record, numbers in zip(records, _rows_of(experience).values(), strict=True):
            for row, i in zip(record["rows"], numbers, strict=True):
                row["new_logprobs"] = [_number(x) for x in logprobs[i, : len(row["token_ids"])].tolist()]
        _write(path, records)


def _write(path: Path, records: list[dict[str, Any]]) -> None:
    with atomic_write(path, "w") as file:
        file.writelines(json.dumps(record, default=type_name, ensure_ascii=False) + "\n" for record in records)


def _rows_of(rows: Rollouts | Experience) -> dict[int, list[int]]:
    """Returns the sequence indices by trajectory, in the order of the file."""
    found: dict[int, list[int]] = {}
    for number, trajectory in enumerate(rows.trajectory_ids.tolist()):
        found.setdefault(trajectory, []).append(number)
    return found


def trajectory_records(
    rollouts: Rollouts, experience: Experience, tokenizer: Any
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (index of its last sequence, record) per trajectory, as written by `RolloutWriter`.

    `experience` has the same sequences as `rollouts`. A `tokenizer` of None omits token texts.
    """
    rollouts, experience = rollouts.to("cpu"), experience.to("cpu")
    pieces: dict[int, str] = {}
    special: set[int] = set()
    if tokenizer is not None:
        found = experience.token_ids[experience.attention_mask].unique().tolist()
        pieces = {i: tokenizer.decode([i], clean_up_tokenization_spaces=False) for i in found}
        special = set(tokenizer.all_special_ids).intersection(found)
    mask = rollouts.response_mask
    turn_ids = torch.where(mask, 0, -1) if rollouts.turn_ids is None else rollouts.turn_ids
    trained = (experience.response_mask.any(1) & experience.valid).tolist()
    versions = rollouts.policy_versions
    if versions is None:
        versions = torch.where(mask, rollouts.policy_version, -1)
    of_tokens = {name: getattr(experience, name) for name in OF_TOKENS if getattr(experience, name) is not None}
    lengths = rollouts.attention_mask.sum(1).tolist()
    for trajectory, numbers in _rows_of(rollouts).items():
        first, rows = numbers[0], []
        for i in numbers:
            n = lengths[i]
            ids = experience.token_ids[i, :n].tolist()
            row: dict[str, Any] = {"token_ids": ids, "turns": turn_ids[i, :n].tolist()}
            if tokenizer is not None:
                row["tokens"] = texts_of_tokens(ids, pieces, tokenizer, row["turns"])
                row["special"] = [place for place, token in enumerate(ids) if token in special]
            row["policy_versions"] = versions[i, :n].tolist()
            row |= {name: [_number(x) for x in values[i, :n].tolist()] for name, values in of_tokens.items()}
            rows.append(row)
        states = rollouts.states[first] if rollouts.states else []
        yield (
            numbers[-1],
            {
                "group": int(rollouts.group_ids[first]),
                "trajectory": trajectory,
                "policy_version": rollouts.policy_version,
                **{"messages": [], **trajectory_record(rollouts, first, tokenizer, digits=5)},
                "question": question(rollouts, first),
                "columns": {name: values[first] for name, values in rollouts.columns.items()},
                "stop_reason": rollouts.stop_reasons[first] if rollouts.stop_reasons else None,
                "trained": any(trained[number] for number in numbers),
                "turns": _turns(rollouts, experience.advantages, turn_ids, numbers, states),
                "rows": rows,
            },
        )


def texts_of_tokens(ids: list[int], pieces: dict[int, str], tokenizer: Any, turns: list[int]) -> list[str]:
    """Returns token texts that concatenate to the decoded text.

    A character of several tokens is assigned to the last of them, and an incomplete one at the end of a turn to that
    turn. `pieces` has the text of each token ID decoded separately, which may lack a space or be part of an emoji.
    """
    alone = [pieces[token] for token in ids]
    if "".join(alone) == tokenizer.decode(ids, clean_up_tokenization_spaces=False):
        return alone
    texts, start, done = [], 0, 0  # difference of two windows, as in vLLM's detokenizer
    for place in range(1, len(ids) + 1):
        before = tokenizer.decode(ids[start:done], clean_up_tokenization_spaces=False)
        text = tokenizer.decode(ids[start:place], clean_up_tokenization_spaces=False)
        over = place == len(ids) or turns[place] != turns[place - 1] or place - done >= 8
        if text.endswith("\ufffd") and not over:  # bytes of a character
            texts.append("")
            continue
        texts.append(text[len(before) :])
        start, done = done, place
    return texts


def _turns(
    rollouts: Rollouts, advantages: Tensor, turn_ids: Tensor, rows: list[int], states: list[str]
) -> list[dict[str, Any]]:
    """Returns rewards, advantage, and token count of each turn of a trajectory."""
    ids = turn_ids[rows]
    turns = []
    for turn in ids[ids >= 0].unique().tolist():
        here = ids == turn
        turns.append(
            {
                "turn": turn,
                "rewards": {name: _number(float(x[rows][here].sum())) for name, x in rollouts.turn_rewards.items()},
                "advantage": _number(float(advantages[rows][here].mean())),
                "tokens": int(here.sum()),
                **({"state": states[turn]} if turn < len(states) else {}),
            }
        )
    return turns


def _number(value: float) -> float | None:
    """Rounds to five decimals. Returns None for values that JSON doesn't support."""
    return round(value, 5) if math.isfinite(value) else None


def save_media(media: Media, folder: Path) -> dict[str, list[str]]:
    """Writes media losslessly to `folder/media` and returns the relative file names by kind."""
    names: dict[str, list[str]] = {}
    for kind in ("images", "videos", "audios"):
        for value in getattr(media, kind):
            data, suffix = (png(value), "png") if kind == "images" else (_npy(value), "npy")
            names.setdefault(kind, []).append(f"media/{write_once(data, folder / 'media', suffix)}")
    return names


def _npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def load_rollouts(folder: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Loads a saved rollout and concatenates the sequences of all ranks.

    Args:
        folder: A `rollout=...` directory of `RolloutWriter`.

    Returns:
        Dictionary of (B,) or (B, T) tensors, right-padded with 0, with `inputs` and the scalars `temperature` and
        `policy_version`; and one record per trajectory, as in `RolloutWriter`, with `media` files by kind. Group and
        trajectory IDs of different ranks are distinct.

    Raises:
        ValueError: If the directory contains no rollout.
    """
    shards = sorted(Path(folder).glob("rank*.pt"), key=lambda path: int(path.stem.removeprefix("rank")))
    if not shards:
        raise ValueError(f"folder={str(folder)!r}: no rank*.pt found. Pass a rollout=... directory of RolloutWriter.")
    parts: list[dict[str, Any]] = [torch.load(path, weights_only=True) for path in shards]
    texts: list[dict[str, Any]] = []
    offsets = {"group": 0, "trajectory": 0}
    for path, part in zip(shards, parts, strict=True):
        records = [json.loads(line) for line in path.with_suffix(".jsonl").open(encoding="utf-8")]
        for name, offset in offsets.items():
            if f"{name}_ids" in part:
                part[f"{name}_ids"] += offset
                offsets[name] = int(part[f"{name}_ids"].max()) + 1
            for record in records:
                if name in record:
                    record[name] += offset
        texts += records
    merged: dict[str, Any] = {}
    for name, first in {name: value for part in parts for name, value in part.items()}.items():
        if isinstance(first, Tensor):
            width = max(part[name].shape[-1] for part in parts)
            merged[name] = torch.cat([_pad(part[name], width) if first.ndim == 2 else part[name] for part in parts])
        elif isinstance(first, list):  # absent on a rank without any, such as `inputs` of text only
            none: Any = {} if name == "inputs" else None
            merged[name] = [x for part in parts for x in part.get(name, [none] * len(part["token_ids"]))]
        else:
            merged[name] = first
    for record in texts:
        if "media" in record:
            record["media"] = {kind: [str(Path(folder) / n) for n in names] for kind, names in record["media"].items()}
    return merged, texts


def _pad(rows: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]))
