"""A live model with its tokenizer as `actor`: trained itself, as its folder is; what is none is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lightrl.algorithms import GRPOLightningModule, PPOLightningModule, SFTLightningModule
from lightrl.cli.export import export
from lightrl.data.sft import SFTDataModule, SFTSource
from lightrl.models.spec import LoraSpec, ModelSpec
from tests.toys import adam, model_fixture, quiet_trainer, sums_data

SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32}


path = model_fixture(**SIZES, num_attention_heads=2, num_key_value_heads=2, pad_token_id=0)


def live(path: str) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)


def fit(module: Any, **data: Any) -> Any:
    trainer = quiet_trainer(limit_train_batches=2)
    torch.manual_seed(0)
    trainer.fit(module, sums_data(**data))
    return trainer


def equal(ours: Any, others: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours.parameters(), others.parameters(), strict=True))


def test_a_live_model_learns_what_its_folder_learns_and_is_itself_trained(path: str) -> None:
    """PPO: the critic and the reference begin as the model was; the canary holds the engine to it."""
    model, tokenizer = live(path)
    module = PPOLightningModule(actor=ModelSpec.of(model, tokenizer), optimizer=adam)
    fit(module)
    plain = PPOLightningModule(path, optimizer=adam)
    fit(plain)
    assert module.actor.lm is model and equal(module, plain)
    begun = AutoModelForCausalLM.from_pretrained(path)
    assert not equal(model, begun) and module.reference is not None and equal(module.reference.lm, begun)
    ids = torch.tensor([[3, 4, 5]])
    torch.testing.assert_close(model(ids).logits, plain.actor.lm(ids).logits)


def test_checkpoints_of_a_live_model_are_given_it_again(path: str, tmp_path: Path) -> None:
    model, tokenizer = live(path)
    module = GRPOLightningModule(actor=ModelSpec.of(model, tokenizer), optimizer=adam)
    checkpoint = tmp_path / "live.ckpt"
    fit(module).save_checkpoint(checkpoint)
    again, _ = live(path)
    assert GRPOLightningModule.load_from_checkpoint(checkpoint, actor=ModelSpec.of(again, tokenizer)).actor.lm is again
    assert equal(again, model)
    with pytest.raises((OSError, ValueError), match="live"):
        export(str(checkpoint), str(tmp_path / "out"))
    export(str(checkpoint), str(tmp_path / "out"), model=path)
    assert equal(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), model)
    module.save_pretrained(tmp_path / "saved")
    assert equal(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), model)


def test_a_live_model_takes_an_adapter_and_keeps_what_is_frozen(path: str) -> None:
    model, tokenizer = live(path)
    embedding = model.get_input_embeddings().weight
    begun = embedding.clone()
    fit(GRPOLightningModule(ModelSpec.of(model, tokenizer, lora=LoraSpec(r=2)), optimizer=adam))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    with pytest.raises(ValueError, match="model="):
        ModelSpec.of(model, tokenizer)
    model, tokenizer = live(path)
    model.get_input_embeddings().weight.requires_grad_(False)
    fit(GRPOLightningModule(ModelSpec.of(model, tokenizer), optimizer=adam))
    assert torch.equal(model.get_input_embeddings().weight, begun)


def test_sft_trains_a_live_model(path: str) -> None:
    rows = [{"prompt": f"{a}+1=", "completion": str(a + 1)} for a in range(8)]
    model, tokenizer = live(path)
    for module in (plain := SFTLightningModule(path), SFTLightningModule(ModelSpec.of(model, tokenizer))):
        quiet_trainer(callbacks=[]).fit(module, SFTDataModule(SFTSource(rows=rows), batch_size=4))
    assert equal(plain.actor.lm, model) and not equal(model, live(path)[0])


@pytest.mark.parametrize("lora", [None, LoraSpec(r=2)])
def test_rl_after_a_warm_start_begins_with_its_weights(lora: Any, path: str) -> None:
    """The reference, the critic, and an adapter are those of the policy after SFT."""
    rows = [{"prompt": f"{a}+1=", "completion": str(a + 1)} for a in range(8)]
    model, tokenizer = live(path)
    spec = ModelSpec.of(model, tokenizer, lora=lora)
    warm = SFTLightningModule(spec, optimizer=adam)
    quiet_trainer(callbacks=[]).fit(warm, SFTDataModule(SFTSource(rows=rows), batch_size=4))
    begun = [p.detach().clone() for p in model.parameters()]
    module = PPOLightningModule(spec, optimizer=lambda params: torch.optim.SGD(params, lr=0.0))
    fit(module)
    assert all(torch.equal(a, b) for a, b in zip(begun, model.parameters(), strict=True))
    if lora is None:
        assert module.reference is not None and module.critic is not None
        assert equal(module.reference.lm, model) and equal(module.critic.backbone, model.model)
