"""Rollouts sampled ahead: how old their policy is, what it is corrected by, and everything that may come in between."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything

from lightrl.algorithms import GRPOLightningModule
from lightrl.algorithms.module import Updates
from lightrl.callbacks import EMA, RolloutCheckpoint, WeightSync
from lightrl.data.curriculum import PromptCurriculum
from lightrl.data.prompts import PromptSource
from lightrl.engines import VLLMEngine
from lightrl.engines.transformers.engine import TransformersEngine
from lightrl.models.policy import PolicyModel
from lightrl.records import Rollouts
from lightrl.rewards.base import RewardError
from lightrl.rollout import Ahead, Evaluation, InFlight, OnPolicy, Schedule
from lightrl.rollout.learner import RLCallback
from tests.rows import as_rows
from tests.toys import ThreadEngine, digits_reward, quiet_trainer, some_flat, sums_data


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5)


class Watch(RLCallback):
    """Keeps every policy's weights, and the rollouts."""

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.rollouts: list[Rollouts] = []
        self.evaluated: list[tuple[int, Rollouts]] = []
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.weights[module.policy_version] = {k: v.clone() for k, v in module.actor.state_dict().items()}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.rollouts.append(batch)
        self.metrics.append(outputs)
        self.weights[module.policy_version] = {k: v.clone() for k, v in module.actor.state_dict().items()}

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        self.evaluated.append((module.policy_version, batch))

    def gap(self, module: Any, version: int, rows: Rollouts) -> float:
        """Largest difference between the engine's log-probs of some rows and those of one version's weights."""
        model: PolicyModel = module.actor
        model.load_state_dict(self.weights[version])
        with torch.no_grad():
            out = model(as_rows(rows.token_ids, rows.attention_mask, rows.response_mask, group_ids=rows.group_ids))
        return float((out.logprobs - rows.engine_logprobs)[rows.response_mask].abs().max())


def run(path: str, *callbacks: Any, module: Any = None, ckpt_path: str | None = None, **data: Any) -> tuple[Any, Watch]:
    seed_everything(0, verbose=False)
    module = module or GRPOLightningModule(path, kl=None, optimizer=sgd)
    watch = Watch()
    trainer = quiet_trainer(
        callbacks=[WeightSync(), watch, *callbacks],
        max_epochs=data.pop("max_epochs", 1),
        enable_checkpointing=any(isinstance(callback, RolloutCheckpoint) for callback in callbacks),
        **data.pop("trainer", {}),
    )
    trainer.fit(module, sums_data(**{"engine": ThreadEngine(), **data}), ckpt_path=ckpt_path)
    return module, watch


def staleness(watch: Watch) -> list[float]:
    return [m["rollout/staleness"] for m in watch.metrics]


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name in ("lightrl-sampling", "lightrl-ahead"):
            thread.join(60)  # a run does not wait for a step of the engine that takes longer than its bound
            assert not thread.is_alive()


@pytest.mark.parametrize(("bound", "expected"), [(1, [0, 1, 1, 1, 1]), (2, [0, 1, 2, 1, 2])])
def test_rollouts_are_of_the_policy_they_say(bound: int, expected: list[int], side_model: str) -> None:
    module, watch = run(side_model, schedule=Ahead(bound), rollouts_per_epoch=5)
    assert staleness(watch) == [m["rollout/staleness_updates"] for m in watch.metrics] == expected
    for number, (rollouts, behind) in enumerate(zip(watch.rollouts, expected, strict=True)):
        assert rollouts.policy_version == number - behind
        assert watch.gap(module, number - behind, rollouts) < 1e-4
        if behind:
            assert watch.gap(module, number, rollouts) > 1e-2


def test_runs_repeat_and_staleness_matters(side_model: str) -> None:
    ends = [list(run(side_model, schedule=s)[0].actor.parameters()) for s in (Ahead(), Ahead(), OnPolicy())]
    assert all(torch.equal(a, b) for a, b in zip(ends[0], ends[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(ends[0], ends[2], strict=True))


def test_evaluation_in_between_is_of_the_newest_policy(side_model: str) -> None:
    evaluation = {"evaluation": Evaluation([{"prompt": f"{a}+{a}="} for a in range(6)], batch_size=4)}
    module, watch = run(side_model, schedule=Ahead(2), rollouts_per_epoch=2, max_epochs=2, **evaluation)
    assert staleness(watch) == [0, 1, 2, 1]
    assert [version for version, _ in watch.evaluated] == [2, 2, 4, 4]
    for version, rows in watch.evaluated:
        assert rows.policy_version == version and watch.gap(module, version, rows) < 1e-4
    assert watch.gap(module, 0, watch.rollouts[2]) < 1e-4  # sampled before the evaluation, learnt from after it


def test_an_average_that_evaluates_does_not_reach_the_training_samples(side_model: str) -> None:
    evaluation = {"evaluation": Evaluation([{"prompt": "1+1="}])}
    module, watch = run(side_model, EMA(0.9), schedule=Ahead(), rollouts_per_epoch=2, max_epochs=2, **evaluation)
    assert staleness(watch) == [0, 1, 1, 1]
    for number, behind in enumerate((0, 1, 1, 1)):
        assert watch.gap(module, number - behind, watch.rollouts[number]) < 1e-4


def test_a_resumed_run_samples_anew_what_was_under_way(side_model: str, tmp_path: Path) -> None:
    checkpoint = RolloutCheckpoint(every_n_rollouts=2, dirpath=str(tmp_path), save_top_k=-1)
    _, whole = run(side_model, checkpoint, schedule=Ahead())
    (saved,) = [path for path in tmp_path.glob("*.ckpt") if torch.load(path, weights_only=True)["global_step"] == 2]
    assert torch.load(saved, weights_only=True)["RolloutDataModule"]["prompt_cursor"] == 16
    module, rest = run(side_model, schedule=Ahead(), ckpt_path=str(saved))
    assert [r.prompts for r in rest.rollouts] == [r.prompts for r in whole.rollouts[2:]]
    assert staleness(rest) == [0, 1] and rest.gap(module, 2, rest.rollouts[0]) < 1e-4


@pytest.fixture(scope="module")
def serial(side_model: str) -> list[list[str]]:
    """The prompts of rollouts that are sampled on-policy."""
    return [rollouts.prompts for rollouts in run(side_model)[1].rollouts]


@pytest.mark.parametrize("schedule", [Ahead(3), InFlight()], ids=["ahead", "in-flight"])
def test_every_schedule_samples_the_same_prompts_and_no_more(
    schedule: Schedule, side_model: str, serial: list[list[str]]
) -> None:
    """No prompt is dropped or put last, whatever the lengths of its completions, and none is sampled for nothing."""
    calls: list[int] = []

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        calls.append(len(prompts))
        return digits_reward(prompts, completions)

    _, watch = run(side_model, schedule=schedule, rewards=[reward])
    assert [rollouts.prompts for rollouts in watch.rollouts] == serial
    assert len(calls) == 4 * 8


def test_refills_go_on_in_the_background(side_model: str) -> None:
    _, ahead = run(side_model, schedule=Ahead(), dynamic_sampling_rounds=8, rewards=[some_flat])
    _, serial = run(side_model, dynamic_sampling_rounds=8, rewards=[some_flat])
    assert all(m["rollout/flat_groups"] == 0 for m in ahead.metrics)
    assert any(m["rollout/dropped_groups"] > 0 for m in ahead.metrics)
    assert [r.prompts for r in ahead.rollouts] == [r.prompts for r in serial.rollouts]


def test_an_error_in_the_background_stops_the_run(side_model: str) -> None:
    calls: list[int] = []

    def breaks(completions: list[str], **_: Any) -> list[float]:
        calls.append(0)
        if len(calls) > 20:
            raise KeyError("oops")
        return [float(i) for i in range(len(completions))]

    with pytest.raises(RewardError, match="breaks"):
        run(side_model, schedule=Ahead(), rewards=[breaks])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engine": TransformersEngine()}, "engine=TransformersEngine"),
        ({"engine": VLLMEngine(in_process=False, sleep_level=1)}, "sleep_level"),
        ({"prompts": PromptCurriculum(PromptSource(rows=[{"prompt": "1"}]))}, "PromptCurriculum"),
    ],
)
@pytest.mark.parametrize("schedule", [Ahead(), InFlight()])
def test_what_cannot_work_is_refused_at_once(arguments: dict[str, Any], message: str, schedule: Schedule) -> None:
    with pytest.raises(ValueError, match=message):
        sums_data(**{"engine": ThreadEngine(), "schedule": schedule, **arguments})


def test_the_correction_is_on_unless_switched_off(side_model: str) -> None:
    few: dict[str, Any] = {"rollouts_per_epoch": 2}
    corrected, watch = run(side_model, schedule=Ahead(), **few)
    assert "off_policy/kl" not in watch.metrics[0] and watch.metrics[1]["off_policy/kl"] > 1e-4
    plain = GRPOLightningModule(side_model, kl=None, optimizer=sgd, updates=Updates(off_policy_correction=False))
    plain, watch = run(side_model, module=plain, schedule=Ahead(), **few)
    assert "off_policy/kl" not in watch.metrics[1]
    assert any(not torch.equal(a, b) for a, b in zip(corrected.parameters(), plain.parameters(), strict=True))
    assert "off_policy/kl" not in run(side_model, **few)[1].metrics[1]


class Pairs(Schedule):
    """Samples two rollouts at once, and declares nothing: the second is of older weights than learn from it."""

    def __init__(self) -> None:
        self.waiting: list[Any] = []

    def next(self, cursor: int, left: int) -> Any:
        if not self.waiting:
            self.sampler.ready(cursor)
            first = self.sampler.begin(cursor)
            self.waiting = [first, self.sampler.begin(cursor + self.sampler.data.prompts_per_rollout)]
        return self.sampler.finish(self.waiting.pop(0), cursor)


def test_a_users_schedule_that_declares_nothing_is_corrected(side_model: str, serial: list[list[str]]) -> None:
    module, watch = run(side_model, schedule=Pairs())
    assert [rollouts.prompts for rollouts in watch.rollouts] == serial
    for number, rollouts in enumerate(watch.rollouts):
        assert rollouts.policy_version == number - number % 2
        assert watch.gap(module, number - number % 2, rollouts) < 1e-4
        assert ("off_policy/kl" in watch.metrics[number]) == (number % 2 == 1)
