"""Any estimator with any loss, aggregation and KL placement: one training step each, or a refusal with both names."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything

from lightrl.algorithms import CriticSpec, PPOLightningModule
from lightrl.algorithms.module import Updates
from lightrl.callbacks import WeightSync
from lightrl.objectives import RLOO, AdvantageEstimator, GroupRelative, KLInLoss, KLInReward, KLPenalty
from lightrl.records import Rollouts
from tests.pairs import features
from tests.toys import quickstart_model, quiet_trainer, sums_data

ESTIMATORS = [*features.ESTIMATORS.values(), lambda: GroupRelative("none"), lambda: RLOO(normalize=True)]
LOSSES = [make for name, make in features.LOSSES.items() if name != "RolloutRatio"]  # which takes no old log-probs
AGGREGATIONS = [*features.AGGREGATIONS.values()]
KLS = [*features.KLS.values(), lambda: KLInLoss("k3")]


def allowed(advantage: AdvantageEstimator, kl: KLPenalty | None) -> bool:
    return not (isinstance(kl, KLInReward) and (advantage.needs_binary_scores or advantage.credit == "parts"))


class Walk(PPOLightningModule):
    """Takes one step for each `every`-th combination from the same weights, and writes down what each did."""

    every: int
    steps: list[tuple[str, float]]

    def training_step(self, rollouts: Rollouts, batch_idx: int) -> dict[str, float]:
        self.steps = []
        turn = itertools.count()
        start = copy.deepcopy(self.actor.state_dict())
        optimizer = self.optimizers().param_groups[0]["params"]  # type: ignore[union-attr]
        for make_advantage in ESTIMATORS:
            for make_kl in KLS:
                self.advantage, self.kl = make_advantage(), make_kl()
                if not allowed(self.advantage, self.kl):
                    continue
                experience = self.make_experience(copy.deepcopy(rollouts))
                for name in self._steps(experience, turn):
                    norm = sum(float(p.grad.norm() ** 2) for p in optimizer if p.grad is not None) ** 0.5
                    self.apply_gradients(finite=True)
                    self.steps.append((name, norm))
                    self.actor.load_state_dict(start)
        return {}

    def _steps(self, experience: Any, turn: Iterator[int]) -> Iterator[str]:
        for make_loss in LOSSES:
            for make_aggregation in AGGREGATIONS:
                if next(turn) % self.every:
                    continue
                self.loss, self.aggregation = make_loss(), make_aggregation()
                with self.gradients.window():
                    for micro in self.micro_batches(experience):
                        losses, _ = self.compute_loss(micro.rows)  # type: ignore[arg-type]
                        self.manual_backward(micro.total(losses))
                parts = (self.advantage, self.loss, self.aggregation, self.kl)
                yield " ".join(type(part).__name__ for part in parts)


def zero_or_one(completions: list[str], **_: Any) -> list[float]:
    """Success in the first completion of every group: whatever the model says, groups have spread."""
    return [float(i == 0) for i in range(len(completions))]


def test_every_pair_of_parts_takes_a_step(tmp_path_factory: pytest.TempPathFactory) -> None:
    every = 7  # divides no number of losses, aggregations or KLs: each meets each of the others
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    path = quickstart_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1, **sizes)
    seed_everything(0, verbose=False)
    module = Walk(
        path, whiten_advantages=False, ppo_epochs=1, updates=Updates(minibatch_size=None),
        optimizer=lambda params: torch.optim.SGD(params, lr=1e-3),
    )  # fmt: skip
    module.every = every
    trainer = quiet_trainer(callbacks=[WeightSync()])
    trainer.fit(module, sums_data(prompts_per_rollout=2, rollouts_per_epoch=1, rewards=[zero_or_one]))
    refused = sum(not allowed(a(), k()) for a in ESTIMATORS for k in KLS)
    assert refused == 3
    combinations = (len(ESTIMATORS) * len(KLS) - refused) * len(LOSSES) * len(AGGREGATIONS)
    assert len(module.steps) == -(-combinations // every)
    names = [name.split() for name, _ in module.steps]
    for i, j in itertools.combinations(range(3), 2):  # estimator, loss, aggregation
        pairs = {(name[i], name[j]) for name in names}
        assert len(pairs) == len({first for first, _ in pairs}) * len({second for _, second in pairs})
    still = [name for name, norm in module.steps if not 0 < norm < float("inf")]
    assert not still, still[:10]
    assert module.num_skipped_updates == 0


@pytest.mark.parametrize("make_advantage", ESTIMATORS, ids=lambda f: type(f()).__name__)
def test_what_does_not_combine_is_refused_with_both_names(make_advantage: Callable[[], AdvantageEstimator]) -> None:
    advantage = make_advantage()
    name = type(advantage).__name__
    rest: dict[str, Any] = {"advantage": advantage, "critic": CriticSpec() if advantage.needs_critic else None}
    for make_kl in KLS:
        kl = make_kl()
        if allowed(advantage, kl):
            PPOLightningModule("folder", kl=kl, whiten_advantages=False, **rest)
        else:
            with pytest.raises(ValueError, match=f"advantage={name} with kl=KLInReward"):
                PPOLightningModule("folder", kl=kl, whiten_advantages=False, **rest)
    if advantage.normalizes:
        with pytest.raises(ValueError, match=f"advantage={name} with whiten_advantages=True"):
            PPOLightningModule("folder", kl=None, whiten_advantages=True, **rest)
    wrong = "needs a critic but critic=None" if advantage.needs_critic else "doesn't use values"
    with pytest.raises(ValueError, match=f"advantage={name}.* {wrong}"):
        PPOLightningModule("folder", advantage=advantage, critic=None if advantage.needs_critic else CriticSpec())


def test_a_batch_of_an_ordinary_data_loader_is_refused() -> None:
    with pytest.raises(TypeError, match="`Rollouts`.*not dict"):
        PPOLightningModule("folder").training_step({"prompt": ["a"]}, 0)  # type: ignore[arg-type]
