"""What others wrote is read as data: a model folder's code and a checkpoint's pickled calls do not run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightrl.checkpoints.checkpoint_io import CheckedCheckpointIO, read_checkpoint
from lightrl.models.loading import load_causal_lm
from lightrl.models.spec import ModelSpec
from tests.toys import SMALL, quickstart_model


class Calls:
    """Pickled, it makes a folder when it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("read", [read_checkpoint, CheckedCheckpointIO().load_checkpoint])
def test_a_checkpoint_that_calls_something_is_refused(read: Any, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": {"weight": torch.ones(1)}, "callbacks": Calls(tmp_path / "called")}, path)
    with pytest.raises(ValueError, match=r"last.ckpt': it can't be read"):
        read(path)
    assert not (tmp_path / "called").exists()
    torch.load(path, weights_only=False)
    assert (tmp_path / "called").exists(), "the toy must be dangerous"


@pytest.mark.parametrize("read", [read_checkpoint, CheckedCheckpointIO().load_checkpoint])
def test_numbers_and_arrays_of_numpy_are_read(read: Any, tmp_path: Path) -> None:
    """A user's schedule computes rates with NumPy, a callback its statistics."""
    numbers = [np.float64(0.25), np.float32(1), np.int64(3), np.bool_(True), np.arange(3), np.ones((2, 2), np.float16)]
    torch.save({"state_dict": {}, "lr_schedulers": numbers}, tmp_path / "last.ckpt")
    for given, found in zip(numbers, read(tmp_path / "last.ckpt")["lr_schedulers"], strict=True):
        assert type(found) is type(given) and np.array_equal(found, given)


def test_the_code_of_a_model_folder_does_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    quickstart_model(folder, **SMALL)
    config = json.loads((folder / "config.json").read_text())
    own = {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}}
    (folder / "config.json").write_text(json.dumps(config | own))
    (folder / "theirs.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'called')!r})\n")
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_causal_lm(ModelSpec(str(folder)), trainable=True)
    assert not (tmp_path / "called").exists()
