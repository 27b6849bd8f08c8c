"""The exported folder: transformers loads it and computes what the trainer does, LoRA merged; when it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrl.algorithms import PPOLightningModule
from lightrl.callbacks import EMA, HFExport, RolloutCheckpoint, WeightSync
from lightrl.cli.export import export
from lightrl.data.prompts import PromptSource
from lightrl.models.spec import LoraSpec, ModelSpec
from lightrl.rollout import Evaluation
from tests.toys import quickstart_model, quiet_trainer, sums_data


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    return quickstart_model(folder, num_hidden_layers=2, hidden_size=64, intermediate_size=64)


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
    with pytest.raises(ValueError, match="rollout=2' is not written.*embed_tokens"):
        trainer.fit(module, sums_data(rollouts_per_epoch=2))
    assert not (tmp_path / "rollout=2").exists()
    with pytest.raises(ValueError, match="weights are not finite"):
        module.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == good
    trainer.save_checkpoint(tmp_path / "bad.ckpt")
    with pytest.raises(ValueError, match="out' is not written.*not finite"):
        export(str(tmp_path / "bad.ckpt"), str(tmp_path / "out"))


class Scores(Callback):
    """Evaluates as 0, 9, 2, and keeps the weights that were evaluated."""

    def __init__(self) -> None:
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self.weights.append({name: value.clone() for name, value in module.actor.lm.state_dict().items()})
        module.log("eval/score", (0.0, 9.0, 2.0)[len(self.weights) - 1])


@pytest.mark.parametrize("average", [False, True])
def test_the_best_checkpoint_is_exported(average: bool, model: str, tmp_path: Path) -> None:
    """What was evaluated: with `EMA` the average. The module keeps its last weights."""
    seed_everything(0, verbose=False)
    module = PPOLightningModule(model, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))
    scores, saving = Scores(), RolloutCheckpoint(1, str(tmp_path / "c"), monitor="eval/score")
    callbacks = [WeightSync(), *([EMA(0.5)] if average else []), HFExport(str(tmp_path / "best"), best=True)]
    trainer = quiet_trainer(callbacks=[*callbacks, scores, saving], max_epochs=3, enable_checkpointing=True)
    rows = PromptSource(rows=[{"prompt": "01+02="}])
    trainer.fit(module, sums_data(rollouts_per_epoch=1, evaluation=Evaluation(rows)))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "best", dtype=torch.float32).state_dict()
    assert all(torch.equal(value, exported[name]) for name, value in scores.weights[1].items())
    assert any(not torch.equal(value, exported[name]) for name, value in module.actor.lm.state_dict().items())


def test_the_best_of_nothing_is_rejected(model: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="HFExport.best"):
        fit(ModelSpec(model), HFExport(str(tmp_path), best=True))


def test_zero_rollouts_between_exports_are_refused() -> None:
    with pytest.raises(ValueError, match="every_n_rollouts=0"):
        HFExport(every_n_rollouts=0)


def test_the_module_writes_itself(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = fit(ModelSpec(model), HFExport(dirpath=str(tmp_path / "by_callback")))
    module.save_pretrained(tmp_path / "own")
    tokens = torch.arange(20).view(2, 10) % 15
    assert torch.equal(logprobs(tmp_path / "own", tokens), logprobs(tmp_path / "by_callback", tokens))
