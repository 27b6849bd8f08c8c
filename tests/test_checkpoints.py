"""What is written to a checkpoint by every strategy, and which checkpoint a run goes on from."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy

from lightrl.algorithms.checkpoints import description
from lightrl.distributed.fsdp2 import FSDP2Strategy, ZeROStrategy
from lightrl.export import export
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


def test_a_plain_checkpoint_made_of_another_holds_no_secret(tmp_path: Path) -> None:
    torch.save(with_secrets(), tmp_path / "old.ckpt")
    export(str(tmp_path / "old.ckpt"), str(tmp_path / "plain.ckpt"), "checkpoint")
    assert SECRET.encode() not in (tmp_path / "plain.ckpt").read_bytes()


def test_how_models_are_built_is_said_without_secrets() -> None:
    """Lightning's own sharding strategies write what the module gives them."""
    said = description("Module", {"actor": ModelSpec("org/model", kwargs={"token": SECRET})}, None)
    assert said["models"]["actor"]["kwargs"] == {"token": "***"}
