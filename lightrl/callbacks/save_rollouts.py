"""Saves whole trajectories: tokens, masks, log-probs, advantages, rewards and texts.

Letters: B sequences, T tokens.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightrl.callbacks.thumbnails import fingerprint
from lightrl.types import Experience, Media, Rollouts

__all__ = ["SaveRollouts", "load_rollouts"]

TENSORS = (
    *("token_ids", "attention_mask", "response_mask", "group_ids", "engine_logprobs", "old_logprobs", "ref_logprobs"),
    *("advantages", "rewards", "valid", "values", "returns"),
)


class SaveRollouts(Callback):
    """Saves the trajectories of every N-th rollout before the update that they lead to.

    Each rank writes `DIR/rollout=000010/rank0.pt` (every tensor of `Experience` that is there, the raw reward parts and
    extra model inputs such as pixels) and `rank0.jsonl` (prompt, completion and data-set columns of each row). What
    prompts show is in `DIR/rollout=000010/media`, as it was decoded: images as PNG files, frames of videos and samples
    of sounds as NumPy arrays; `media` of a row names its files. Read it all with
    `load_rollouts(DIR / "rollout=000010")`. It is written before the update, so the trajectories behind a failed update
    are on disk too.

    Args:
        every_n_rollouts: rollouts between two that are saved, at least 1.
        dirpath: folder; `rollouts/` in the trainer's `log_dir` where None.
    """

    def __init__(self, every_n_rollouts: int = 10, dirpath: str | None = None) -> None:
        if every_n_rollouts < 1:
            raise ValueError(f"SaveRollouts.every_n_rollouts={every_n_rollouts}: must be at least 1.")
        self.every_n_rollouts, self.dirpath = every_n_rollouts, dirpath
        self._folder = Path()
        self._rollouts: Rollouts | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Finds the folder; every rank asks, because Lightning answers with rank 0's."""
        self._folder = Path(self.dirpath or Path(trainer.log_dir or trainer.default_root_dir) / "rollouts")

    def on_rollout_scored(self, trainer: Trainer, pl_module: LightningModule, rollouts: Rollouts) -> None:
        """Keeps the rollout, for its texts and reward parts."""
        self._rollouts = rollouts

    def on_experience_made(self, trainer: Trainer, pl_module: LightningModule, experience: Experience) -> None:
        """Writes every N-th rollout."""
        rollouts, self._rollouts = self._rollouts, None
        done = trainer.fit_loop.total_batch_idx + 1
        if rollouts is None or done % self.every_n_rollouts:
            return
        folder = self._folder / f"rollout={done:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: getattr(experience, name) for name in TENSORS}
        stored: dict[str, Any] = {name: value.cpu() for name, value in tensors.items() if value is not None}
        stored |= {f"reward/{name}": part.cpu() for name, part in rollouts.reward_parts.items()}
        stored |= {"truncated": rollouts.truncated.cpu(), "temperature": rollouts.temperature}
        stored |= {"policy_version": rollouts.policy_version}
        if any(rollouts.inputs):
            stored["inputs"] = [{k: _on_cpu(v) for k, v in inputs.items()} for inputs in rollouts.inputs]
        torch.save(stored, folder / f"rank{trainer.global_rank}.pt")
        saved = {
            key: save_media(media, folder) for key, media in {id(media): media for media in rollouts.media}.items()
        }
        with (folder / f"rank{trainer.global_rank}.jsonl").open("w", encoding="utf-8") as file:
            for row, (prompt, completion) in enumerate(zip(rollouts.prompts, rollouts.completions, strict=True)):
                columns = {name: values[row] for name, values in rollouts.columns.items()}
                record = {"prompt": prompt, "completion": completion, "columns": columns}
                if rollouts.media:
                    record["media"] = saved[id(rollouts.media[row])]
                file.write(json.dumps(record, default=lambda x: f"<{type(x).__name__}>", ensure_ascii=False) + "\n")


def save_media(media: Media, folder: Path) -> dict[str, list[str]]:
    """Writes what a prompt shows, without loss, into `folder/media`; kind -> names relative to `folder`.

    Files are named after their contents, so what several prompts or ranks show is there once.
    """
    names: dict[str, list[str]] = {}
    for kind, suffix in (("images", "png"), ("videos", "npy"), ("audios", "npy")):
        for value in getattr(media, kind):
            buffer = io.BytesIO()
            if kind == "images":
                value.save(buffer, format="PNG")
            else:
                np.save(buffer, value)
            path = folder / "media" / f"{fingerprint(buffer.getvalue())}.{suffix}"
            if not path.exists():
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(buffer.getvalue())
            names.setdefault(kind, []).append(str(path.relative_to(folder)))
    return names


def load_rollouts(folder: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Reads one saved rollout, the rows of all ranks one after another.

    Args:
        folder: one `rollout=...` folder written by `SaveRollouts`.

    Returns:
        name -> (B,) or (B, T) tensor, right-padded with 0 to the longest rank's T (plus the scalars `temperature` and
        `policy_version`, and `inputs` where there are any); B dictionaries with `prompt`, `completion`, `columns`, and
        where prompts can show something `media` (kind -> files). Group ids of different ranks are made different by an
        offset.

    Raises:
        ValueError: nothing was saved in the folder.
    """
    shards = sorted(Path(folder).glob("rank*.pt"), key=lambda path: int(path.stem.removeprefix("rank")))
    if not shards:
        raise ValueError(f"folder={str(folder)!r}: no rank*.pt in it; give one rollout=... folder of SaveRollouts.")
    parts = [torch.load(path, weights_only=True) for path in shards]
    offset = 0
    for part in parts:
        part["group_ids"] += offset
        offset = int(part["group_ids"].max()) + 1
    merged: dict[str, Any] = {}
    for name, first in parts[0].items():
        if isinstance(first, Tensor):
            width = max(part[name].shape[-1] for part in parts)
            merged[name] = torch.cat([_pad(part[name], width) if first.ndim == 2 else part[name] for part in parts])
        else:
            merged[name] = [x for part in parts for x in part[name]] if isinstance(first, list) else first
    texts = [json.loads(line) for path in shards for line in path.with_suffix(".jsonl").open(encoding="utf-8")]
    for record in texts:
        if "media" in record:
            record["media"] = {kind: [str(Path(folder) / n) for n in names] for kind, names in record["media"].items()}
    return merged, texts


def _on_cpu(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _pad(rows: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]))
