"""Checkpoints that are damaged, of another kind, or of another run."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from lightning.pytorch import seed_everything

from lightrl.algorithms import GRPOLightningModule, PPOLightningModule, SFTLightningModule
from lightrl.callbacks import AdaptiveKL, WeightSync
from lightrl.checkpoints.guard import RunGuard
from lightrl.checkpoints.plugin import CheckedCheckpointIO
from lightrl.checkpoints.reading import read_checkpoint
from lightrl.cli import users_error
from lightrl.data.sft import SFTDataModule, SFTSource
from lightrl.records import SamplingParams
from tests.fuzz.verdicts import ERROR, WORKS
from tests.toys import quickstart_model, quiet_trainer, sgd, sums_data


@functools.cache
def place() -> Path:
    """A folder with a tiny model."""
    folder = Path(tempfile.mkdtemp(prefix="lightrl-fuzz-"))
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    quickstart_model(folder / "model", num_hidden_layers=1, max_position_embeddings=1024, **sizes)
    return folder


def _adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def _fit(kind: str, epochs: int = 1, ckpt: str | None = None) -> tuple[Any, Any]:
    seed_everything(0, verbose=False)
    model = str(place() / "model")
    if kind == "sft":
        rows = SFTSource(rows=[{"prompt": "1+1=", "completion": "2"}] * 2)
        module: Any = SFTLightningModule(model)
        data: Any = SFTDataModule(rows, tokenizer=model, batch_size=2)
    else:
        make = PPOLightningModule if kind == "ppo" else GRPOLightningModule
        module = make(model, optimizer=_adam if kind == "adam" else sgd)
        sizes: dict[str, Any] = {"prompts_per_rollout": 2, "group_size": 2, "rollouts_per_epoch": 1}
        data = sums_data(sampling=SamplingParams(max_new_tokens=2), **sizes)
    callbacks = [RunGuard(), *([WeightSync(), AdaptiveKL(target=1.0)] if kind != "sft" else [])]
    trainer = quiet_trainer(callbacks=callbacks, plugins=[CheckedCheckpointIO()], max_epochs=epochs)
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(module, data, ckpt_path=ckpt)
    return trainer, module


@functools.cache
def saved(kind: str) -> Path:
    """A checkpoint after one rollout of a GRPO, a PPO or a supervised run, or of GRPO with another optimizer."""
    path = place() / f"{kind}.ckpt"
    _fit(kind)[0].save_checkpoint(path)
    return path


CHECKPOINTS = st.one_of(
    st.tuples(st.just("cut"), st.floats(0, 1)),
    st.tuples(st.just("flip"), st.floats(0, 1), st.integers(1, 255)),
    st.tuples(st.just("flip, no sum"), st.floats(0, 1), st.integers(1, 255)),
    st.tuples(st.just("instead"), st.one_of(st.binary(max_size=40), st.sampled_from(["folder", "missing", "model"]))),
    st.tuples(st.just("kind"), st.sampled_from(["ppo", "sft", "adam", "grpo"])),
    st.tuples(st.just("pickle"), st.sampled_from(["list", "tensor", "function", "empty", "module"])),
)


PICKLES: dict[str, Callable[[], Any]] = {
    "list": lambda: [1, 2],
    "tensor": lambda: torch.zeros(2),
    "function": lambda: print,
    "empty": lambda: {},
    "module": lambda: torch.nn.Linear(1, 1),
}


def _write(case: tuple[Any, ...], path: Path) -> None:
    kind, source = case[0], saved("grpo")
    content, sums = source.read_bytes(), source.with_name(source.name + ".sha256")
    if kind in ("cut", "flip", "flip, no sum"):
        at = int(case[1] * (len(content) - 1))
        broken = bytearray(content)
        if kind == "cut":
            del broken[at:]
        else:
            broken[at] ^= case[2]
        path.write_bytes(broken)
        if kind == "flip":
            shutil.copy(sums, path.with_name(path.name + ".sha256"))
    elif kind == "instead":
        if isinstance(case[1], bytes):
            path.write_bytes(case[1])
        elif case[1] == "folder":
            path.mkdir()
        elif case[1] == "model":
            shutil.copytree(place() / "model", path)
    elif kind == "kind":
        shutil.copy(saved(case[1]), path)
    else:
        torch.save(PICKLES[case[1]](), path)


def judge_checkpoints(case: tuple[Any, ...]) -> str:
    """Goes on from it; what only the file's bytes decide is read, which is much quicker."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "x.ckpt"
        _write(case, path)
        before = hashlib.sha256(path.read_bytes()).digest() if path.is_file() else None
        try:
            if case[0] in ("cut", "flip", "flip, no sum", "instead"):
                state = CheckedCheckpointIO().load_checkpoint(path, weights_only=True)
                assert read_checkpoint(path).keys() == state.keys()
                expected = torch.load(saved("grpo"), weights_only=True)["state_dict"]
                assert all(torch.equal(value, state["state_dict"][name]) for name, value in expected.items()), "damaged"
                return WORKS
            trainer, module = _fit("grpo", epochs=2, ckpt=str(path))
        except Exception as error:
            message = users_error(error)
            if message is None:
                raise
            assert len(message.splitlines()) <= 12, message
            return ERROR
        assert path.is_file() and hashlib.sha256(path.read_bytes()).digest() == before
        assert trainer.global_step == 2, "silently started over"
        assert all(bool(torch.isfinite(p).all()) for p in module.actor.parameters()), "went on with NaN"
        return WORKS
