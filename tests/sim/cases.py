"""Runs of `Trainer.fit` on the simulated device: `python -m tests.sim OUT [NAME...]`.

In a process of their own, since torch keeps such a device until the process ends. OUT gets a line of JSON per case: its
name, what it raised (or null), host reads during training steps by line, and how many micro-batches had a backward.
"""

from __future__ import annotations

import collections
import functools
import inspect
import json
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback, seed_everything

from lightrl import algorithms, callbacks, objectives
from lightrl.algorithms import (
    CriticSpec,
    GRPOLightningModule,
    PPOLightningModule,
    RewardLightningModule,
    SFTLightningModule,
)
from lightrl.algorithms.module import ExtraLosses, Shaping, Updates
from lightrl.data.preferences import PreferenceDataModule, PreferenceSource
from lightrl.data.prompts import PromptSource
from lightrl.data.sft import SFTDataModule, SFTSource
from lightrl.models.reward import RewardModelSpec
from lightrl.models.spec import LoraSpec, ModelSpec
from lightrl.rollout import Evaluation
from tests.sim.device import HOST_READS, on_sim
from tests.sim.names import KINDS, NAMED
from tests.toys import SMALL, adam, quickstart_model, quiet_trainer, sums_data

CASES: dict[str, Callable[[Path], None]] = {}


class Reads(Callback):
    """Host reads between the start and the end of training steps, and backward passes in between."""

    reads: ClassVar[collections.Counter[str]] = collections.Counter()
    micro_batches = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.before = HOST_READS.copy()

    def on_before_backward(self, *_: Any) -> None:
        type(self).micro_batches += 1

    def on_train_batch_end(self, *_: Any) -> None:
        for (kind, where), count in (HOST_READS - self.before).items():
            self.reads[f"{where} ({kind})"] += count

    def on_train_end(self, trainer: Any, module: Any) -> None:
        assert {p.device.type for p in module.parameters()} == {"sim"}
        assert all(bool(p.isfinite().all()) for p in module.parameters())


@functools.cache
def model_path() -> str:
    return quickstart_model(Path(tempfile.mkdtemp()), **SMALL)


def half_right(completions: list[str], **_: Any) -> list[float]:
    """Success in every other completion: all groups have spread."""
    return [float(i % 2 == 0) for i in range(len(completions))]


def fit(module: Any, data: Any = None, more: Any = (), sync: bool = True, **options: Any) -> Any:
    """Fits on the device and makes sure that the module was there and learned."""
    seed_everything(0, verbose=False)
    own = [callbacks.WeightSync()] if sync else []
    trainer = quiet_trainer(**on_sim(), callbacks=[*own, Reads(), *more], **options)
    data = data or sums_data(prompts_per_rollout=4, rollouts_per_epoch=1, rewards=[half_right])
    trainer.fit(module, data)
    assert trainer.global_step > 0
    return trainer


def case(name: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    def keep(run: Callable[[Path], None]) -> Callable[[Path], None]:
        CASES[name] = run
        return run

    return keep


def ppo(actor: Any = None, **arguments: Any) -> PPOLightningModule:
    arguments["updates"] = replace(arguments.get("updates", Updates()), minibatch_size=8)
    return PPOLightningModule(actor or model_path(), optimizer=adam, **arguments)


def grpo(actor: Any = None, **arguments: Any) -> GRPOLightningModule:
    return GRPOLightningModule(actor or model_path(), optimizer=adam, **arguments)


# ---- everything that has a name ------------------------------------------------------------------------------------


def with_algorithm(folder: Path, name: str) -> None:
    teachers = {"teachers": {"one": model_path()}} if name == "DistillLightningModule" else {}
    fit(getattr(algorithms, name)(model_path(), optimizer=adam, updates=Updates(minibatch_size=8), **teachers))


def made(kind: type) -> Any:
    """A loss or an estimator with as few arguments as it takes: a loss inside, a k of 2."""
    needed = [
        p for p in inspect.signature(kind).parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD
    ]
    return kind(*(objectives.PPOClip() if "loss" in str(p.annotation).lower() else 2 for p in needed))


def with_loss(folder: Path, kind: type) -> None:
    fit(grpo(loss=made(kind), updates=Updates(minibatch_size=8)))


def with_estimator(folder: Path, kind: type) -> None:
    advantage = made(kind)
    arguments = {"advantage": advantage, "critic": CriticSpec() if advantage.needs_critic else None}
    fit(ppo(kl=objectives.KLInLoss(), whiten_advantages=False, **arguments))


def with_aggregation(folder: Path, kind: type) -> None:
    fit(grpo(aggregation=kind(6) if kind is objectives.ConstantLength else kind()))


def with_layout(folder: Path, layout: str) -> None:
    fit(ppo(ModelSpec(model_path(), layout=layout), updates=Updates(micro_batch_tokens=64)))


RUNS = {"loss": with_loss, "advantage": with_estimator, "aggregation": with_aggregation}
for _name in sorted({*NAMED} - {"RewardLightningModule", "SFTLightningModule"}):
    CASES[_name] = functools.partial(with_algorithm, name=_name)
for _name, _kind in KINDS.items():
    CASES[_name] = functools.partial(RUNS[_name.split()[0]], kind=_kind)
for _layout in ("padded", "packed", "shared_prefix"):
    CASES[f"layout {_layout}"] = functools.partial(with_layout, layout=_layout)

# ---- models --------------------------------------------------------------------------------------------------------


SHAPING = Shaping(advantage_clip=1.0, reward_clip=1.0, mask_truncated=True, top_entropy_fraction=0.5)
CASES |= {
    "lora": lambda _: fit(grpo(ModelSpec(model_path(), lora=LoraSpec(r=2)))),
    "gradient checkpointing": lambda _: fit(ppo(ModelSpec(model_path(), gradient_checkpointing=True))),
    "shared critic": lambda _: fit(ppo(critic=CriticSpec(shared=True))),
    "frozen reference in bfloat16": lambda _: fit(grpo(reference=ModelSpec(model_path(), dtype="bfloat16"))),
    "bf16-mixed": lambda _: fit(ppo(), precision="bf16-mixed"),
    "bf16-true": lambda _: fit(grpo(ModelSpec(model_path(), dtype="bfloat16")), precision="bf16-true"),
    "masks, clips and an entropy bonus": lambda _: fit(
        ppo(extra_losses=ExtraLosses(entropy_coef=0.01), shaping=SHAPING, updates=Updates(max_grad_norm=0.1))
    ),
    "adaptive KL": lambda _: fit(ppo(kl=objectives.KLInReward("k1")), more=[callbacks.AdaptiveKL()]),
    "linear KL": lambda _: fit(grpo(kl=objectives.KLInLoss()), more=[callbacks.LinearKL(0.1, 0.0, 4)]),
}


@case("critic and reference of their own")
def _(folder: Path) -> None:
    spec = ModelSpec(quickstart_model(folder, seed=1, **SMALL))
    fit(ppo(critic=CriticSpec(spec), reference=spec, kl=objectives.KLInReward("k1")))


@case("vision")
def _(folder: Path) -> None:
    from tests.vision.conftest import picture
    from tests.vision.models import build

    rows = [{"prompt": f"see {i}", "images": [picture(16, 16, i)]} for i in range(2)] + [{"prompt": "no", "images": []}]
    path = str(build("idefics3", folder / "vlm"))
    data = sums_data(prompts=PromptSource(rows=rows), prompts_per_rollout=3, rollouts_per_epoch=1, rewards=[half_right])
    fit(grpo(path), data)


# ---- callbacks and checkpoints -------------------------------------------------------------------------------------


@case("callbacks that take part")
def _(folder: Path) -> None:
    c = callbacks
    more = [c.RewardNormalization(), c.EMA(), c.AdaptiveEntropy(), c.ThroughputMonitor(progress_bar=False)]
    more += [
        c.ReferenceSync(every_n_rollouts=1),
        c.EvaluateFirst(),
        c.CompletionLogger(every_n_rollouts=1, terminal=False),
    ]
    more += [c.RolloutWriter(every_n_rollouts=1), c.OffloadOptimizer()]
    data = {"evaluation": Evaluation([{"prompt": "01+02="}] * 2), "prompts_per_rollout": 4}
    fit(
        ppo(kl=objectives.KLInReward("k1")), sums_data(rollouts_per_epoch=2, **data), more, default_root_dir=str(folder)
    )
    assert list(folder.rglob("samples.jsonl")) and list(folder.rglob("rollouts"))


@case("an environment of several turns")
def _(folder: Path) -> None:
    from tests.rollout.tasks import Letters, chat_model, make_data

    more = [callbacks.TrajectoryLogprobCheck(num_trajectories=2), callbacks.LogprobMonitor()]
    data = make_data(Letters, rollouts_per_epoch=1, prompts_per_rollout=2)
    module = grpo(chat_model(folder), advantage=objectives.TurnReturns(), kl=None)
    fit(module, data, more)


@case("models leave the device while the engine samples")
def _(folder: Path) -> None:
    seen: dict[str, set[str]] = {}

    def note(phase: str, *models: Any) -> None:
        seen.setdefault(phase, set()).update(p.device.type for model in models for p in model.parameters())

    class Places(callbacks.WeightSync):
        """Where the models are, by phase."""

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            note("updated", module.actor, module.critic)
            note("not updated", module.reference, module.reward_models)

        def on_validation_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            note("evaluated", module.reward_models)

    def run(*more: Any) -> PPOLightningModule:
        def sampled(completions: list[str], **_: Any) -> list[float]:
            note("sampled", module.critic, module.reference, module.reward_models)
            return half_right(completions)

        module = ppo(kl=objectives.KLInReward("k1"), reward_models=[RewardModelSpec("judge", judge)])
        data = {"evaluation": Evaluation([{"prompt": "01+02="}] * 2), "prompts_per_rollout": 4}
        own = [Places(), callbacks.EvaluateFirst(), callbacks.ReferenceSync(every_n_rollouts=2), *more]
        seed_everything(0, verbose=False)
        quiet_trainer(**on_sim(), callbacks=own).fit(module, sums_data(rollouts_per_epoch=3, rewards=[sampled], **data))
        return module

    judge = quickstart_model(folder, head="ForSequenceClassification", num_labels=1, **SMALL)
    plain = run()
    assert seen == {phase: {"sim"} for phase in ("sampled", "updated", "not updated", "evaluated")}
    seen.clear()
    moved = run(callbacks.OffloadModels())
    assert seen == {"sampled": {"cpu"}, "updated": {"sim"}, "not updated": {"cpu"}, "evaluated": {"sim"}}
    for a, b in zip(plain.parameters(), moved.parameters(), strict=True):
        assert torch.equal(a.cpu(), b.cpu())


@case("checkpoint and resume")
def _(folder: Path) -> None:
    def run(epochs: int, **more: Any) -> PPOLightningModule:
        module = ppo()
        seed_everything(0, verbose=False)
        save = callbacks.RolloutCheckpoint(every_n_rollouts=1, dirpath=str(folder), save_top_k=-1)
        export = callbacks.HFExport(dirpath=str(folder / "model"))
        own = [callbacks.WeightSync(), save, export] if not more else [callbacks.WeightSync()]
        trainer = quiet_trainer(**on_sim(), callbacks=own, max_epochs=epochs, enable_checkpointing=not more)
        trainer.fit(module, sums_data(prompts_per_rollout=4, rollouts_per_epoch=1), **more)
        return module

    through = run(2)
    first = min(folder.glob("rollout*.ckpt"), key=lambda path: path.name)
    assert (folder / "model" / "model.safetensors").is_file()
    resumed = run(2, ckpt_path=str(first), weights_only=False)
    for a, b in zip(through.actor.parameters(), resumed.actor.parameters(), strict=True):
        assert torch.equal(a.cpu(), b.cpu())


@case("the same update as on the CPU")
def _(folder: Path) -> None:
    ends = []
    for device in (on_sim(), {}):
        module = ppo(updates=Updates(max_grad_norm=0.5))
        seed_everything(0, verbose=False)
        quiet_trainer(**device).fit(module, sums_data(prompts_per_rollout=4, rollouts_per_epoch=1))
        ends.append([p.detach().cpu() for p in module.actor.parameters()])
    for a, b in zip(*ends, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-4)  # AdamW's first steps have the size of the rate, 1e-3


# ---- without rollouts ----------------------------------------------------------------------------------------------


@case("SFTLightningModule")
def _(folder: Path) -> None:
    rows = [{"prompt": f"{a}+1=", "completion": str(a + 1)} for a in range(6)]
    data = SFTDataModule(train=SFTSource(rows=rows), batch_size=3)
    fit(SFTLightningModule(model_path(), optimizer=adam), data, sync=False)


@case("RewardLightningModule")
def _(folder: Path) -> None:
    rows = [{"prompt": f"{a}+1=", "chosen": f"{a + 1}.", "rejected": "7"} for a in range(6)]
    data = PreferenceDataModule(PreferenceSource(rows=rows), PreferenceSource(rows=rows[:2]), batch_size=3)
    fit(RewardLightningModule(model_path(), optimizer=adam), data, sync=False)


# ---- budgets of host reads -----------------------------------------------------------------------------------------


def budget(folder: Path, tokens: int, algorithm: str) -> None:
    make = ppo if algorithm == "ppo" else grpo
    fit(make(ModelSpec(model_path(), layout="packed"), updates=Updates(micro_batch_tokens=tokens)))


for _algorithm in ("ppo", "grpo"):
    CASES[f"budget {_algorithm} few"] = functools.partial(budget, tokens=4096, algorithm=_algorithm)
    CASES[f"budget {_algorithm} many"] = functools.partial(budget, tokens=32, algorithm=_algorithm)


@case("a planted mix-up")
def _(folder: Path) -> None:
    class Wrong(GRPOLightningModule):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            losses, metrics = super().compute_loss(*args, **kwargs)
            with pytest.raises(RuntimeError, match="found sim and cpu"):
                losses["policy"] + torch.zeros(1, 1)
            return losses, metrics

    fit(Wrong(model_path(), optimizer=adam))


def main(out: str, names: list[str]) -> None:
    with open(out, "w") as lines:
        for name in names or CASES:
            Reads.reads, Reads.micro_batches, error = collections.Counter(), 0, None
            with tempfile.TemporaryDirectory() as folder:
                try:
                    CASES[name](Path(folder))
                except Exception as raised:
                    error = (
                        f"{type(raised).__name__}: {raised}\n{''.join(traceback.format_tb(raised.__traceback__)[-12:])}"
                    )
            found = {"name": name, "error": error, "reads": Reads.reads, "micro_batches": Reads.micro_batches}
            lines.write(json.dumps(found) + "\n")
            lines.flush()
