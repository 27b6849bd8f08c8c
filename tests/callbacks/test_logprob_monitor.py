"""The gap between engine and trainer: what is measured, by hand, and what a bound does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightrl.algorithms import GRPOLightningModule
from lightrl.callbacks import LogprobMonitor, WeightSync
from lightrl.engines.transformers.engine import TransformersEngine
from lightrl.models.spec import ModelSpec
from lightrl.records import CompletionGroup, Rollouts
from tests.rows import as_experience
from tests.toys import quickstart_model, quiet_trainer, sums_data


class Module:
    """What the gate asks of a module, on one rank."""

    policy_version = 5
    actor_spec = ModelSpec("model")
    actor: Any = SimpleNamespace(stream=SimpleNamespace(layout="auto"))

    @staticmethod
    def all_sum(x: torch.Tensor) -> torch.Tensor:
        return x


class FakeTrainer:
    datamodule: Any = SimpleNamespace(engine=SimpleNamespace(dtype="float32"))
    precision = "32-true"


def measured(gate: LogprobMonitor, trainer: Any = None, module: Any = None) -> dict[str, float]:
    """A row: a prompt token, two tokens of turn 0, an answer, a token of turn 1, and one that older weights sampled."""
    sampled = torch.tensor([[False, True, True, False, True, True]])
    rollouts = Rollouts(
        token_ids=torch.zeros(1, 6, dtype=torch.long), attention_mask=torch.ones(1, 6, dtype=torch.bool),
        response_mask=sampled, engine_logprobs=torch.zeros(1, 6), group_ids=torch.zeros(1, dtype=torch.long),
        rewards=torch.zeros(1), reward_parts={}, truncated=torch.zeros(1, dtype=torch.bool), policy_version=3,
        turn_ids=torch.tensor([[-1, 0, 0, -1, 1, 1]]), policy_versions=torch.tensor([[-1, 5, 5, -1, 5, 3]]),
    )  # fmt: skip
    experience = as_experience(
        rollouts,
        engine_logprobs=torch.tensor([[9.0, -1.0, -2.0, 9.0, -3.0, -4.0]]),
        old_logprobs=torch.tensor([[0.0, -1.1, -1.8, 0.0, -3.6, -5.0]]),
    )
    trainer, module = trainer or FakeTrainer(), module or Module()
    gate.on_rollout_scored(trainer, module, rollouts)
    gate.on_experience_made(trainer, module, experience)
    metrics: dict[str, float] = {}
    gate.on_policy_updated(trainer, module, metrics)
    return metrics


def test_the_gap_is_measured_by_position_turn_and_version() -> None:
    # gaps 0.1, 0.2 (turn 0), 0.6 (turn 1) of the current weights, 1.0 of weights two updates older
    assert measured(LogprobMonitor(bound=1.0)) == pytest.approx(
        {
            "kl/engine_gap": 0.3, "kl/engine_gap_position_0": 0.1, "kl/engine_gap_position_1": 0.4,
            "kl/engine_gap_turn_0": 0.15, "kl/engine_gap_turn_1": 0.6, "kl/engine_gap_lag_2": 1.0,
        },
        abs=1e-6,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "precision", "policy", "bound"),
    [
        ("float32", "32-true", None, "0.001"),
        ("float16", "32-true", None, "0.02"),
        ("float32", "bf16-mixed", None, "0.05"),
        (None, "32-true", None, "0.05"),
    ],
)
def test_the_bound_is_the_coarsest_dtypes(
    engine: str | None, precision: str, policy: str | None, bound: str, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, module, gate = FakeTrainer(), Module(), LogprobMonitor(min_tokens=1)
    trainer.datamodule = SimpleNamespace(engine=SimpleNamespace(dtype=engine))
    trainer.precision, module.actor_spec = precision, ModelSpec("model", dtype=policy)
    measured(gate, trainer, module)
    assert f"by more than {bound} nats" in caplog.text


class Biased(TransformersEngine):
    """Reports log-probs that are off by 0.01 from the fourth token on."""

    async def generate(self, request: Any) -> CompletionGroup:
        group = await super().generate(request)
        for completion in group.completions:
            completion.logprobs[3:] = [x - 0.01 for x in completion.logprobs[3:]]
        return group


def fit(path: str, gate: LogprobMonitor, engine: TransformersEngine) -> dict[str, float]:
    trainer = quiet_trainer(callbacks=[WeightSync(), gate])
    trainer.fit(GRPOLightningModule(path, kl=None), sums_data(rollouts_per_epoch=1, engine=engine))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_an_exact_engine_passes_and_another_one_is_named_or_stops_the_run(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = quickstart_model(tmp_path)
    metrics = fit(path, LogprobMonitor(action="stop"), TransformersEngine())
    assert 0 < metrics["kl/engine_gap"] < 1e-4 and metrics["kl/engine_gap_position_1"] < 1e-4
    fit(path, LogprobMonitor(), Biased())
    assert "Biased differ from the trainer's (layout auto)" in caplog.text
    assert "more than 0.001 nats per token on average: all 0.00" in caplog.text and "position_1 0.00" in caplog.text
    with pytest.raises(RuntimeError, match="position_1"):
        fit(path, LogprobMonitor(action="stop"), Biased())
    fit(path, LogprobMonitor(bound=0.02, action="stop"), Biased())
