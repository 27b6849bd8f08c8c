"""The exported folder: transformers loads it and computes what the trainer does, LoRA merged; when it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrl.algorithms import PPOLightningModule
from lightrl.callbacks import HFExport, WeightSync
from lightrl.cli.export import export
from lightrl.models.spec import LoraSpec, ModelSpec
from tests.toys import model_fixture, quiet_trainer, sums_data

model = model_fixture(num_hidden_layers=2, hidden_size=64, intermediate_size=64)


def fit(spec: ModelSpec, export: HFExport, **kwargs: Any) -> PPOLightningModule:
    seed_everything(0, verbose=False)
    module = PPOLightningModule(spec, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))
    quiet_trainer(callbacks=[WeightSync(), export], **kwargs).fit(module, sums_data(rollouts_per_epoch=2))
    return module


def logprobs(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return lm(tokens).logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


@pytest.mark.parametrize("lora", [None, LoraSpec(r=4)])
def test_transformers_computes_the_same(model: str, tmp_path: Path, lora: LoraSpec | None) -> None:
    module = fit(ModelSpec(model, lora=lora), HFExport(dirpath=str(tmp_path)))
    tokens = torch.arange(20).view(2, 10) % 15
    ours = module.token_logprobs(tokens)[:, 1:]
    torch.testing.assert_close(logprobs(tmp_path, tokens), ours, atol=1e-5, rtol=0)
    assert float((logprobs(Path(model), tokens) - ours).abs().max()) > 1e-2, "nothing was learned"
    assert not list(tmp_path.glob("adapter*"))
    assert (
        AutoTokenizer.from_pretrained(tmp_path)("12+3=").input_ids
        == AutoTokenizer.from_pretrained(model)("12+3=").input_ids
    )


def test_every_n_rollouts_and_the_default_folder(model: str, tmp_path: Path) -> None:
    fit(ModelSpec(model), HFExport(every_n_rollouts=1), default_root_dir=tmp_path)
    folders = sorted(p.parent.relative_to(tmp_path) for p in tmp_path.rglob("model.safetensors"))
    assert folders == [Path("model"), Path("model/rollout=1"), Path("model/rollout=2")]
    tokens = torch.arange(10)[None]
    assert torch.equal(logprobs(tmp_path / "model", tokens), logprobs(tmp_path / "model/rollout=2", tokens))
    assert not torch.equal(logprobs(tmp_path / "model", tokens), logprobs(tmp_path / "model/rollout=1", tokens))


def test_a_fast_dev_run_leaves_a_real_runs_folder_alone(model: str, tmp_path: Path) -> None:
    fit(ModelSpec(model), HFExport(dirpath=str(tmp_path / "out")), fast_dev_run=True)
    assert not (tmp_path / "out").exists()


class Spoil(Callback):
    """Makes a weight infinite after the second rollout."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            with torch.no_grad():
                next(pl_module.actor.parameters()).fill_(float("inf"))


def test_weights_that_are_not_finite_take_no_good_exports_place(model: str, tmp_path: Path) -> None:
    seed_everything(0, verbose=False)
    module = PPOLightningModule(model, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))
    callbacks = [WeightSync(), Spoil(), HFExport(str(tmp_path), every_n_rollouts=1)]
    module_before = PPOLightningModule(model)
    quiet_trainer(callbacks=[WeightSync(), HFExport(str(tmp_path))]).fit(module_before, sums_data(rollouts_per_epoch=1))
    good = (tmp_path / "model.safetensors").read_bytes()
    trainer = quiet_trainer(callbacks=callbacks)
    with pytest.raises(ValueError, match="rollout=2' was not written.*embed_tokens"):
        trainer.fit(module, sums_data(rollouts_per_epoch=2))
    assert not (tmp_path / "rollout=2").exists()
    with pytest.raises(ValueError, match="weights are not finite"):
        module.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == good
    trainer.save_checkpoint(tmp_path / "bad.ckpt")
    with pytest.raises(ValueError, match="out' was not written.*not finite"):
        export(str(tmp_path / "bad.ckpt"), str(tmp_path / "out"))
