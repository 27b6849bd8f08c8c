"""`lightrl export` of what one process saved, and what it refuses; other strategies' checkpoints: tests/distributed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from lightrl.algorithms import CriticSpec, PPOLightningModule, RewardLightningModule, SFTLightningModule
from lightrl.algorithms.module import Updates
from lightrl.cli import main
from lightrl.cli.export import export
from lightrl.data.sft import SFTDataModule, SFTSource
from lightrl.engines import EngineContext, VLLMEngine
from lightrl.models.loading import load_causal_lm
from lightrl.models.spec import LoraSpec, ModelSpec
from tests.toys import SMALL, quickstart_model, quiet_trainer, sums_data

IDS = [list(range(3, 23)), list(range(22, 2, -1))]


def logprobs(folder: Path) -> torch.Tensor:
    ids = torch.tensor(IDS)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder).eval()(ids).logits[:, :-1]
    return logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}  # vLLM on CPU serves heads of 32 and more
    return quickstart_model(folder, **SMALL, **heads)


@pytest.fixture(scope="module")
def lora(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of PPO with an adapter and a critic on the same backbone."""
    file = tmp_path_factory.mktemp("lora") / "run.ckpt"
    module = PPOLightningModule(
        ModelSpec(model, lora=LoraSpec(r=4)),
        critic=CriticSpec(shared=True),
        optimizer=sgd,
        updates=Updates(max_grad_norm=None),
    )
    trainer = quiet_trainer()
    trainer.fit(module, sums_data(rollouts_per_epoch=1))
    trainer.save_checkpoint(file)
    return file


def test_a_checkpoint_is_loaded_and_saved_without_a_trainer(lora: Path, model: str, tmp_path: Path) -> None:
    spec = ModelSpec(model, lora=LoraSpec(r=4))
    loaded = PPOLightningModule.load_from_checkpoint(lora, actor=spec, critic=CriticSpec(shared=True))
    stored = torch.load(lora, weights_only=True)["state_dict"]
    assert stored.keys() == loaded.state_dict().keys() and any("lora" in name for name in stored)
    assert all(torch.equal(value, stored[name]) for name, value in loaded.state_dict().items())
    loaded.save_pretrained(tmp_path / "saved")
    main(["export", "--checkpoint", str(lora), "--output", str(tmp_path / "exported")])
    exported = logprobs(tmp_path / "exported")
    assert torch.equal(logprobs(tmp_path / "saved"), exported)
    assert (exported - logprobs(Path(model))).abs().max() > 1e-3
    assert AutoTokenizer.from_pretrained(tmp_path / "exported").get_vocab()
    trainer = quiet_trainer(max_steps=1)
    trainer.fit(loaded, sums_data(rollouts_per_epoch=1))  # takes the models that are there
    before = stored["actor.value_head.weight"]
    assert trainer.global_step == 2 and 0 < float((loaded.actor.value_head.weight - before).abs().max()) < 1e-3
    with pytest.raises(ValueError, match="lacks .* trained parameters"):
        PPOLightningModule.load_from_checkpoint(lora, actor=model)
    with pytest.raises(ValueError, match="written by PPOLightningModule"):
        SFTLightningModule.load_from_checkpoint(lora, actor=model)


@pytest.mark.vllm
def test_exports_give_the_same_logprobs_in_vllm(lora: Path, tmp_path: Path) -> None:
    export(str(lora), str(tmp_path / "model"))
    engine = VLLMEngine(max_model_len=32)
    engine.start(EngineContext(str(tmp_path / "model"), dtype="float32"))
    try:
        theirs = torch.tensor(engine.logprobs(IDS))
    finally:
        engine.close()
    torch.testing.assert_close(theirs, logprobs(tmp_path / "model"), atol=2e-5, rtol=1e-4)


def test_exports_sft_and_reward_models(model: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"{a:02d}+01=", "completion": str(a + 1)} for a in range(8)]
    trainer = quiet_trainer(callbacks=[])
    tuned = SFTLightningModule(ModelSpec(model, lora=LoraSpec(r=2)), optimizer=sgd)
    trainer.fit(tuned, SFTDataModule(SFTSource(rows=rows), batch_size=4))
    trainer.save_checkpoint(tmp_path / "sft.ckpt")
    export(str(tmp_path / "sft.ckpt"), str(tmp_path / "sft"))
    assert (logprobs(tmp_path / "sft") - logprobs(Path(model))).abs().max() > 1e-3
    module = RewardLightningModule(model)
    trainer = quiet_trainer(callbacks=[], max_epochs=0)
    trainer.fit(module, [0])
    trainer.save_checkpoint(tmp_path / "reward.ckpt")
    export(str(tmp_path / "reward.ckpt"), str(tmp_path / "reward"))
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward")
    assert torch.equal(exported.score.weight, module.reward_model.lm.score.weight)


def test_exports_hold_the_tokenizer_that_the_policy_is_trained_with(model: str, tmp_path: Path) -> None:
    own = AutoTokenizer.from_pretrained(model)
    own.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    own.save_pretrained(tmp_path / "own")
    module, trainer = SFTLightningModule(model, optimizer=sgd), quiet_trainer(callbacks=[])
    rows = [{"prompt": "01+01=", "completion": "2"}]
    trainer.fit(module, SFTDataModule(SFTSource(rows=rows), batch_size=1, tokenizer=str(tmp_path / "own")))
    module.save_pretrained(tmp_path / "live")
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    export(str(tmp_path / "run.ckpt"), str(tmp_path / "later"))
    loaded = SFTLightningModule.load_from_checkpoint(tmp_path / "run.ckpt", actor=model, optimizer=sgd)
    loaded.save_pretrained(tmp_path / "loaded")
    for folder in ("live", "later", "loaded"):
        assert AutoTokenizer.from_pretrained(tmp_path / folder).chat_template == own.chat_template


def touched(folder: Path, *names: str) -> str:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    return str(folder)


def test_refuses_what_is_no_checkpoint(lora: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    (tmp_path / "cut.ckpt").write_bytes(lora.read_bytes()[:2000])
    torch.save({"weights": 1}, tmp_path / "other.ckpt")
    cases = {
        str(tmp_path / "nowhere.ckpt"): "does not exist",
        touched(tmp_path / "empty", "notes.txt"): "not a checkpoint",
        touched(tmp_path / "fsdp2", "__0_0.distcp"): "incomplete",
        touched(tmp_path / "zero", "checkpoint/mp_rank_00_model_states.pt"): "incomplete",
        str(tmp_path / "zero" / "checkpoint"): "not a checkpoint",
        str(tmp_path / "cut.ckpt"): "can't be read",
        str(tmp_path / "other.ckpt"): "can't be read",
    }
    for path, message in cases.items():
        with pytest.raises(ValueError, match=message):
            export(path, out)
    assert not Path(out).exists()


def test_refuses_what_the_checkpoint_does_not_hold(model: str, tmp_path: Path) -> None:
    trainer = quiet_trainer(callbacks=[], max_epochs=0)
    trainer.fit(SFTLightningModule(model), [0])
    trainer.save_checkpoint(tmp_path / "sft.ckpt")
    plain, out = str(tmp_path / "sft.ckpt"), str(tmp_path / "out")
    with pytest.raises(ValueError, match="what=adapter"):
        export(plain, out, "adapter")
    wide = quickstart_model(tmp_path / "wide", num_hidden_layers=1, hidden_size=64, intermediate_size=32)
    with pytest.raises(ValueError, match="--model"):
        export(plain, out, model=wide)
    with pytest.raises(ValueError, match="output="):
        export(plain, plain)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_model_whose_weights_are_not_finite_is_refused(value: float, model: str, tmp_path: Path) -> None:
    lm = AutoModelForCausalLM.from_pretrained(model)
    lm.model.layers[0].mlp.up_proj.weight.data[1, 2] = value
    lm.save_pretrained(tmp_path)
    for trainable in (True, False):
        with pytest.raises(ValueError, match=r"weights are not finite \(model.layers.0.mlp.up_proj.weight\)"):
            load_causal_lm(ModelSpec(str(tmp_path)), trainable=trainable)
