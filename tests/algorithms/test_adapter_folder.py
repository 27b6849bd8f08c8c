"""Runs that begin with an adapter folder of peft: actor and reference are peft's own model, to the last digits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

from lightrl.algorithms import CriticSpec, GRPOLightningModule, PPOLightningModule
from lightrl.callbacks import ReferenceSync, WeightSync
from lightrl.cli.export import export
from lightrl.models.loading import load_causal_lm
from lightrl.models.lora import keep_reference
from lightrl.models.policy import PolicyModel, ValueModel
from lightrl.models.spec import LoraSpec, ModelSpec
from lightrl.objectives import KLInReward
from tests.toys import Keep, quickstart_model, quiet_trainer, sums_data

peft = pytest.importorskip("peft")
IDS = torch.tensor([list(range(3, 15)), list(range(14, 2, -1))])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32}
    return quickstart_model(tmp_path_factory.mktemp("model"), **sizes, num_attention_heads=2, num_key_value_heads=2)


def write_adapter(base: str, folder: Path, **config: Any) -> str:
    torch.manual_seed(1)
    settings = {"r": 3, "lora_alpha": 7, "lora_dropout": 0.1, "target_modules": ["q_proj", "down_proj"], **config}
    wrapped = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), peft.LoraConfig(**settings))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    wrapped.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def adapter(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_adapter(model, tmp_path_factory.mktemp("adapter"))


def pefts(base: str, adapter: str | Path) -> Tensor:
    """Log-probs of all tokens but the first, from peft's own wrapper."""
    wrapped = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
    return of_logits(wrapped(IDS).logits)


def of_logits(logits: Tensor) -> Tensor:
    return logits[:, :-1].log_softmax(-1).gather(2, IDS[:, 1:, None])[..., 0].detach()


def ours(policy: PolicyModel) -> Tensor:
    mask = torch.ones_like(IDS, dtype=torch.bool)
    response = mask.clone()
    response[:, 0] = False
    return policy(IDS, mask, response).logprobs[:, 1:].detach()


@pytest.mark.parametrize("trainable", [True, False])
def test_the_model_is_pefts(model: str, adapter: str, trainable: bool) -> None:
    bare = of_logits(AutoModelForCausalLM.from_pretrained(model)(IDS).logits)
    for spec in (ModelSpec(adapter), ModelSpec(model, lora=LoraSpec(adapter=adapter))):
        policy = PolicyModel(load_causal_lm(spec, trainable=trainable))
        torch.testing.assert_close(ours(policy), pefts(model, adapter), atol=1e-6, rtol=0)
        assert (ours(policy) - bare).abs().max() > 0.1
        trained = {name for name, p in policy.named_parameters() if p.requires_grad}
        assert len(trained) == (8 if trainable else 0) and all(".lora_" in name for name in trained)


def test_a_critic_begins_with_the_adapter_too(model: str, adapter: str) -> None:
    backbone = ValueModel.from_spec(ModelSpec(adapter)).backbone
    wrapped = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter).eval()
    theirs = wrapped(IDS, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(backbone(IDS).last_hidden_state, theirs, atol=1e-5, rtol=1e-5)
    bare = AutoModel.from_pretrained(model)(IDS).last_hidden_state
    assert (theirs - bare).abs().max() > 0.1


def test_the_kept_reference_leaves_what_is_trained_as_it_was(adapter: str) -> None:
    spec = ModelSpec(adapter, freeze=["layers.0"])
    policy = PolicyModel(load_causal_lm(spec, trainable=True))
    before, trained = ours(policy), {name for name, p in policy.named_parameters() if p.requires_grad}
    assert spec.lora is not None and len(trained) == 4
    keep_reference(policy.lm, spec.lora)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name in trained:
                parameter.mul_(2)
    moved = ours(policy)
    with policy.as_reference():
        assert ours(policy).equal(before)
    assert ours(policy).equal(moved) and not moved.equal(before)
    assert trained == {name for name, p in policy.named_parameters() if p.requires_grad}


def run(actor: str, epochs: int = 2, resume: Path | None = None, save: Path | None = None) -> tuple[Any, Keep]:
    module = PPOLightningModule(
        actor,
        critic=CriticSpec(shared=True),
        kl=KLInReward(coef=0.1),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.2),
    )
    keep = Keep()
    trainer = quiet_trainer(callbacks=[WeightSync(), keep], max_epochs=epochs)
    torch.manual_seed(0)
    trainer.fit(module, sums_data(rollouts_per_epoch=1), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return module, keep


def test_a_run_moves_the_adapter_from_where_it_was_and_goes_on(model: str, adapter: str, tmp_path: Path) -> None:
    first, last = tmp_path / "first.ckpt", tmp_path / "last.ckpt"
    run(adapter, 1, save=first)
    module, keep = run(adapter, save=last)  # the canary of WeightSync compares engine and trainer before each rollout
    begin, later = keep.experiences
    assert begin.old_logprobs is not None and begin.ref_logprobs is not None
    assert begin.old_logprobs.equal(begin.ref_logprobs) and begin.old_logprobs.abs().max() > 0.1  # KL exactly 0
    assert later.old_logprobs is not None and later.ref_logprobs is not None
    assert (later.old_logprobs - later.ref_logprobs).abs().max() > 1e-4

    start = dict(load_causal_lm(ModelSpec(adapter), trainable=True).named_parameters())
    now = {name: p for name, p in module.actor.lm.named_parameters() if ".reference." not in name}
    assert now.keys() == start.keys()
    assert {n for n, p in now.items() if not p.equal(start[n])} == {n for n in start if ".lora_" in n}
    with module.actor.as_reference():
        torch.testing.assert_close(ours(module.actor), pefts(model, adapter), atol=1e-6, rtol=0)
    assert not any(".reference." in name for name in torch.load(last, weights_only=False)["state_dict"])

    resumed, kept = run(adapter, resume=first)
    assert all(p.equal(q) for p, q in zip(resumed.parameters(), module.parameters(), strict=True))
    assert kept.experiences[-1].ref_logprobs is not None and kept.experiences[-1].ref_logprobs.equal(later.ref_logprobs)

    sent = {name: tensor.clone() for name, tensor in module.policy_adapter()[0]}  # what vLLM gets in a push
    assert sent.keys() == load_file(Path(adapter, "adapter_model.safetensors")).keys()

    export(str(last), str(tmp_path / "merged"))
    merged = of_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(IDS).logits)
    torch.testing.assert_close(merged, ours(module.actor), atol=1e-5, rtol=0)
    export(str(last), str(tmp_path / "adapter"), "adapter")
    torch.testing.assert_close(pefts(model, tmp_path / "adapter"), ours(module.actor), atol=1e-6, rtol=0)
    again = PolicyModel(load_causal_lm(ModelSpec(str(tmp_path / "adapter")), trainable=True))
    assert ours(again).equal(ours(module.actor))  # what is exported begins the next run


def test_a_reference_of_its_own(model: str, adapter: str) -> None:
    module = GRPOLightningModule(model, reference=adapter)
    quiet_trainer().fit(module, sums_data(rollouts_per_epoch=1))
    assert module.reference is not None and not any(p.requires_grad for p in module.reference.parameters())
    torch.testing.assert_close(ours(module.reference), pefts(model, adapter), atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="ReferenceSync with reference.lora"):
        quiet_trainer(callbacks=[WeightSync(), ReferenceSync()]).fit(
            GRPOLightningModule(model, reference=adapter), sums_data(rollouts_per_epoch=1)
        )
