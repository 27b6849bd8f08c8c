"""What is written to a checkpoint by every strategy, and which checkpoint a run goes on from."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy

from lightrl.algorithms.run_record import description
from lightrl.callbacks import RolloutCheckpoint
from lightrl.checkpoints.files import atomic_write
from lightrl.distributed.fsdp2 import FSDP2Strategy, ZeROStrategy
from lightrl.models.spec import ModelSpec

SECRET = "open-sesame-Zq"


def with_secrets() -> dict[str, Any]:
    """What a version that did not redact wrote."""
    actor = {"path": "org/model", "kwargs": {"token": SECRET}}
    return {
        "state_dict": {"actor.weight": torch.zeros(1)},
        "lightrl": {"models": {"actor": actor}},
        "hyper_parameters": {"url": f"http://me:{SECRET}@host"},
    }


@pytest.mark.parametrize(("own", "base"), [(FSDP2Strategy, ModelParallelStrategy), (ZeROStrategy, DeepSpeedStrategy)])
def test_no_part_of_a_sharded_checkpoint_holds_a_secret(
    own: Any, base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(self: Any, checkpoint: Any, folder: Path, options: Any = None) -> None:
        folder.mkdir()
        torch.save(checkpoint, folder / "meta.pt")

    monkeypatch.setattr(base, "save_checkpoint", save)
    for name, value in {"broadcast": lambda self, x, src=0: x, "barrier": lambda self, *a: None}.items():
        monkeypatch.setattr(own, name, value)
    monkeypatch.setattr(own, "is_global_zero", True)
    monkeypatch.setattr(own, "lightning_module", SimpleNamespace(named_parameters=list))
    own().save_checkpoint(with_secrets(), tmp_path / "last.ckpt")
    assert SECRET.encode() not in (tmp_path / "last.ckpt" / "meta.pt").read_bytes()


def test_how_models_are_built_is_said_without_secrets() -> None:
    """Lightning's own sharding strategies write what the module gives them."""
    said = description("Module", {"actor": ModelSpec("org/model", kwargs={"token": SECRET})}, None)
    assert said["models"]["actor"]["kwargs"] == {"token": "***"}


# ---- the one to go on from -------------------------------------------------------------------------------------------


def lightnings(path: Path) -> Path:
    entries = {"pytorch-lightning_version": "2.6", "state_dict": {}, "epoch": 0, "global_step": 1}
    entries |= {"loops": {}, "optimizer_states": []}
    with atomic_write(path, checksum=True) as file:
        torch.save(entries, file)
    return path


def with_others_beside(folder: Path) -> Path:
    """A checkpoint, and newer than it what its folder may hold, too."""
    good = lightnings(folder / "last.ckpt")
    torch.save({"weights": torch.zeros(1)}, folder / "weights.ckpt")
    torch.save({"module": torch.nn.Linear(1, 1)}, folder / "module.ckpt")
    (folder / "moved.ckpt").symlink_to("/nonexistent/x.ckpt")
    (folder / "backup.ckpt").mkdir()
    os.utime(good, (0, 0))
    return good


OTHERS = ("weights.ckpt", "module.ckpt", "moved.ckpt", "backup.ckpt")


def test_last_skips_files_of_others_and_says_so(tmp_path: Path) -> None:
    good = with_others_beside(tmp_path)
    trainer = Trainer(logger=False, default_root_dir=tmp_path, accelerator="cpu")
    with pytest.warns(UserWarning, match="resumes from .*last.ckpt and skips") as told:
        assert RolloutCheckpoint(dirpath=str(tmp_path)).last_checkpoints(trainer) == {str(good)}
    assert all(name in str(told[0].message) for name in OTHERS)
    good.unlink()
    with pytest.raises(ValueError, match="ckpt_path=last: "):
        RolloutCheckpoint(dirpath=str(tmp_path)).last_checkpoints(trainer)


def test_last_skips_weights_alone_where_something_whole_lies_beside(tmp_path: Path) -> None:
    whole, last = lightnings(tmp_path / "step=1.ckpt"), tmp_path / "last.ckpt"
    stored = torch.load(whole)
    torch.save({name: stored[name] for name in stored if name not in ("loops", "optimizer_states")}, last)
    os.utime(whole, (0, 0))
    trainer = Trainer(logger=False, default_root_dir=tmp_path, accelerator="cpu")
    callback = RolloutCheckpoint(dirpath=str(tmp_path))
    with pytest.warns(UserWarning, match="resumes from .*step=1.ckpt and skips .*last.ckpt: .*only weights"):
        assert callback.last_checkpoints(trainer) == {str(whole)}
    whole.unlink()
    with pytest.raises(ValueError, match="only weights"):
        callback.last_checkpoints(trainer)
