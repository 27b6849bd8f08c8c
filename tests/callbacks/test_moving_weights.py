"""EMA and moving reference by hand, and that a resumed run with every moving part goes on exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightrl.algorithms import GRPOLightningModule, PPOLightningModule
from lightrl.algorithms.module import ExtraLosses, Updates
from lightrl.callbacks import EMA, AdaptiveEntropy, HFExport, ReferenceSync, WeightSync
from lightrl.data.sft import PTXSource
from lightrl.models.spec import LoraSpec, ModelSpec
from lightrl.objectives import KLInLoss
from lightrl.rollout import Evaluation
from tests.toys import SMALL, adam, model_fixture, quiet_trainer, sgd, some_flat, sums_data

model_path = model_fixture(**SMALL)


def flat(model: Any) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class Trace(Callback):
    """Weights of actor and reference, at the start and after each rollout; what evaluation ran with."""

    def __init__(self) -> None:
        self.actor: list[Tensor] = []
        self.reference: list[Tensor] = []
        self.evaluated: list[Tensor] = []
        self.engine: list[Tensor] = []
        self.sampled: list[Tensor] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.actor.append(flat(module.actor).clone())
        self.reference.append(flat(module.reference).clone() if module.reference is not None else torch.zeros(0))

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.sampled.append(flat(trainer.datamodule.engine._model).clone())

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.on_train_start(trainer, module)

    def on_validation_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.evaluated.append(flat(module.actor).clone())
        self.engine.append(flat(trainer.datamodule.engine._model).clone())


def fit(
    module: PPOLightningModule, callbacks: list[Any], *, rollouts: int = 3, trainer: Any = None, **data: Any
) -> Any:
    seed_everything(0, verbose=False)
    trainer = quiet_trainer(callbacks=[WeightSync(), *callbacks], **(trainer or {}))
    trainer.fit(module, sums_data(rollouts_per_epoch=rollouts, prompts_per_rollout=2, **data))
    return trainer


def test_ema_is_the_running_average_and_evaluation_samples_from_it(model_path: str, tmp_path: Path) -> None:
    ema, trace = EMA(decay=0.75), Trace()
    export = HFExport(dirpath=str(tmp_path / "ema"), ema=True)
    module = GRPOLightningModule(model_path, kl=None, optimizer=sgd)
    fit(module, [ema, export, trace], rollouts=2, evaluation=Evaluation([{"prompt": "01+02="}]))
    w0, w1, w2 = trace.actor
    average = 0.75 * (0.75 * w0 + 0.25 * w1) + 0.25 * w2
    (evaluated,), (engine,) = trace.evaluated, trace.engine
    torch.testing.assert_close(evaluated, average)
    torch.testing.assert_close(engine, average)
    assert torch.equal(flat(module.actor), w2), "the policy is back"
    assert torch.equal(trace.sampled[1], w1), "training samples from the policy"
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "ema", dtype=torch.float32)
    torch.testing.assert_close(flat(exported), average)


def test_the_policy_comes_back_after_an_error_in_evaluation(model_path: str) -> None:
    class Breaks(Callback):
        def on_validation_batch_end(self, *_: Any) -> None:
            raise KeyError("broken")

    trace = Trace()
    module = GRPOLightningModule(model_path, kl=None, optimizer=sgd)
    with pytest.raises(KeyError):
        fit(module, [EMA(0.5), trace, Breaks()], evaluation=Evaluation([{"prompt": "01+02="}]))
    assert torch.equal(flat(module.actor), trace.actor[-1])


def test_the_reference_moves_every_n_rollouts(model_path: str) -> None:
    trace = Trace()
    module = GRPOLightningModule(model_path, kl=KLInLoss(coef=0.1), optimizer=sgd)
    fit(module, [ReferenceSync(every_n_rollouts=2, alpha=0.25), trace], rollouts=4)
    r0, r1, r2, r3, r4 = trace.reference
    assert torch.equal(r0, r1) and torch.equal(r2, r3) and torch.equal(r0, trace.actor[0])
    torch.testing.assert_close(r2, 0.25 * trace.actor[2] + 0.75 * r0)
    torch.testing.assert_close(r4, 0.25 * trace.actor[4] + 0.75 * r2)


def test_a_lora_policy_moves_a_reference_of_its_own(model_path: str) -> None:
    pytest.importorskip("peft")
    spec = ModelSpec(model_path, lora=LoraSpec(r=2))
    with pytest.raises(ValueError, match="ReferenceSync with actor.lora and reference=None"):
        fit(GRPOLightningModule(spec), [ReferenceSync()])
    module = GRPOLightningModule(spec, reference=model_path, optimizer=adam)
    fit(module, [ReferenceSync(every_n_rollouts=3, alpha=1.0)])
    merged = {name: tensor.clone() for name, tensor in module.named_policy_weights()}
    for name, parameter in module.reference.lm.named_parameters():  # type: ignore[union-attr]
        torch.testing.assert_close(parameter, merged[name])


@pytest.mark.parametrize("lora", [False, True])
def test_a_resumed_run_with_every_moving_part_goes_on_exactly(lora: bool, model_path: str, tmp_path: Path) -> None:
    if lora:
        pytest.importorskip("peft")
    rows = [{"prompt": f"{a:02d}+01=", "completion": str(a + 1)} for a in range(10)]
    data = {"ptx": PTXSource(rows=rows, batch_size=4), "rewards": [some_flat], "dynamic_sampling_rounds": 3}

    def parts() -> tuple[PPOLightningModule, list[Any]]:
        spec = ModelSpec(model_path, lora=LoraSpec(r=2)) if lora else model_path
        reference = model_path if lora else None
        module = PPOLightningModule(
            spec,
            reference=reference,
            optimizer=adam,
            extra_losses=ExtraLosses(ptx_coef=0.1),
            updates=Updates(minibatch_size=4),
        )
        return module, [EMA(decay=0.9), ReferenceSync(every_n_rollouts=1, alpha=0.3), AdaptiveEntropy(target=10.0)]

    whole, callbacks = parts()
    through = fit(whole, callbacks, rollouts=2, trainer={"max_epochs": 2}, **data)
    first, before = parts()
    stopped = fit(first, before, rollouts=2, **data)
    stopped.save_checkpoint(tmp_path / "half.ckpt")
    second, after = parts()
    seed_everything(0, verbose=False)
    trainer = quiet_trainer(callbacks=[WeightSync(), *after], max_epochs=2)
    resumed_data = sums_data(rollouts_per_epoch=2, prompts_per_rollout=2, **data)
    trainer.fit(second, resumed_data, ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert not torch.equal(flat(whole.actor), flat(first.actor))
    assert torch.equal(flat(whole.actor), flat(second.actor))
    assert torch.equal(flat(whole.reference), flat(second.reference))
    assert torch.equal(flat(whole.critic), flat(second.critic))
    assert whole.entropy_coef == second.entropy_coef > 0
    for name, value in callbacks[0]._average.items():
        assert torch.equal(value, after[0]._average[name])
    assert resumed_data.state_dict() == through.datamodule.state_dict()


def test_a_checkpoint_of_other_settings_is_refused(model_path: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    adapter = GRPOLightningModule(ModelSpec(model_path, lora=LoraSpec(r=2)), kl=None)
    fit(adapter, [], rollouts=1).save_checkpoint(tmp_path / "lora.ckpt")
    trainer = quiet_trainer(max_epochs=2)
    full = GRPOLightningModule(model_path, kl=None)
    with pytest.raises(ValueError, match="lacks .* trained parameters of this module"):
        trainer.fit(full, sums_data(prompts_per_rollout=2), ckpt_path=tmp_path / "lora.ckpt")
