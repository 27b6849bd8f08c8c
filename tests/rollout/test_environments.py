"""Environments in whole training runs: rewards, failures, seeds, limits, and the proof of every trained token."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrl.algorithms import GRPOLightningModule
from lightrl.callbacks.logprob_checks import LedgerMismatchError
from lightrl.data.prompts import PromptSource
from lightrl.objectives import GroupRelative
from lightrl.records import SamplingParams
from lightrl.rollout import Ahead, Evaluation
from tests.rollout.tasks import Letters, Numbered, chat_model, fit, make_data, sgd
from tests.toys import ThreadEngine, quiet_trainer
from tests.waiting import no_thread_left


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Any:
    with no_thread_left("lightrl-sampling", "lightrl-episodes"):
        yield
    assert Letters.alive == 0, "an environment was not closed"


def test_a_run_plays_turns_scores_them_and_trains_what_was_sampled(path: str) -> None:
    _, keep = fit(path)  # the canary looks at every row of it
    rollouts, metrics = keep.rollouts[0], keep.metrics[0]
    assert rollouts.turn_ids is not None and int(rollouts.turn_ids.max()) == 2
    assert torch.equal(rollouts.response_mask, rollouts.turn_ids >= 0)
    assert len(keep.rollouts) == 2 and bool(rollouts.rewards.isfinite().all())
    assert set(rollouts.stop_reasons) == {"stop", "turns"}
    assert rollouts.messages[0][0]["content"].startswith("say ")
    fractions = [metrics[f"rollout/stop_{r}"] for r in ("stop", "length", "turns", "tokens", "time", "failure")]
    assert sum(fractions) == pytest.approx(1) and fractions[5] == 0
    assert 1 < metrics["rollout/turns"] <= 3 and metrics["rollout/retried"] == 0
    # The trainer's own log-probs of the assembled rows, before the update, are those of sampling.
    assert len(keep.gaps) == 2 and max(keep.gaps) < 1e-5
    seeds: dict[Any, set[int]] = {}
    for prompt, seed in Letters.seen[:16]:
        seeds.setdefault(prompt, set()).add(seed)
    assert len(Letters.seen) == 32 and len(seeds) == 4, "a group resets with one seed and one row"
    assert all(len(of_group) == 1 for of_group in seeds.values()) and len(set.union(*seeds.values())) == 4


@pytest.mark.parametrize("how", ["raise", "step"])
def test_a_failed_row_is_not_in_the_baseline_and_not_in_the_loss(how: str, path: str) -> None:
    """Rewards 1, 0, 0, and one row that failed for good: advantages 2/3, -1/3, -1/3, none."""
    rewards = [1.0, None, 0.0, 0.0, None]
    module = GRPOLightningModule(path, kl=None, optimizer=sgd, advantage=GroupRelative(scale="none"))
    _, keep = fit(
        path, module=module, environment=lambda: Numbered(rewards, how), prompts_per_rollout=1, rollouts_per_epoch=1
    )
    e, r, metrics = keep.experiences[0], keep.rollouts[0], keep.metrics[0]
    assert Numbered.made == 6  # four attempts, and the failed one twice again
    assert sorted(r.stop_reasons) == ["failure", "stop", "stop", "stop"]
    failed = r.stop_reasons.index("failure")  # threads make the environments in any order
    assert bool(r.rewards[failed].isnan())
    for row in {*range(4)} - {failed}:
        wanted = 2 / 3 if r.rewards[row] == 1 else -1 / 3
        assert torch.allclose(e.advantages[row][e.response_mask[row]], torch.tensor(wanted))
    assert not e.advantages[failed].any() and not bool(e.response_mask[failed].any())
    assert metrics["rollout/stop_failure"] == 0.25 and metrics["rollout/retried"] == 2
    assert metrics["reward/mean"] == pytest.approx(1 / 3) and metrics["reward/scored_fraction"] == 0.75


def test_group_statistics_count_trajectories_and_not_rows(tmp_path: Path) -> None:
    """Thoughts that the template drops fork rows; the mean reward and the baseline do not notice."""
    path = chat_model(tmp_path, "deepseek")
    module = GRPOLightningModule(path, kl=None, optimizer=sgd, advantage=GroupRelative(scale="none"))
    _, keep = fit(path, module=module, rollouts_per_epoch=1)
    r, e = keep.rollouts[0], keep.experiences[0]
    firsts = [r.trajectory_ids.tolist().index(t) for t in range(16)]
    assert len(r) > 16 and r.trajectory_ids.unique().tolist() == list(range(16))
    rewards = r.rewards[firsts]
    assert keep.metrics[0]["reward/mean"] == pytest.approx(float(rewards.mean()), abs=1e-6)
    wanted = (rewards.view(4, 4) - rewards.view(4, 4).mean(1, keepdim=True)).flatten()
    for row, trajectory in enumerate(r.trajectory_ids.tolist()):
        assert torch.allclose(e.advantages[row][e.response_mask[row]], wanted[trajectory], atol=1e-6)


class Straggler(Letters):
    """One environment of a run hangs in its first step."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        Straggler.made += 1
        self.delay = 3600.0 if Straggler.made == 2 else 0.0


def test_one_straggler_is_ended_by_its_time_limit_and_scored(path: str) -> None:
    Straggler.made = 0
    began = time.perf_counter()
    _, keep = fit(path, environment=Straggler, episode={"max_seconds": 4.0}, rollouts_per_epoch=2)
    assert time.perf_counter() - began < 200
    assert [r.stop_reasons.count("time") for r in keep.rollouts] == [1, 0]
    assert bool(keep.rollouts[0].rewards.isfinite().all())


def test_prediction_plays_environments_too(path: str) -> None:
    rows = PromptSource(rows=[{"prompt": f"say {i}", "word": "x"} for i in range(3)])
    module = GRPOLightningModule(path, kl=None, optimizer=sgd)
    data = make_data(evaluation=Evaluation(predict_prompts=rows))
    records = [record for batch in quiet_trainer().predict(module, data) or [] for record in batch]
    assert len(records) == 3 and all(record["reward"] is not None for record in records)


@pytest.mark.parametrize("way", [{}, {"schedule": Ahead()}])
def test_the_canary_stops_the_run_before_a_token_that_was_not_sampled_is_trained(
    way: dict[str, Any], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightrl.environments.ledger import Ledger

    answer = Ledger.answer

    def tokenised_again(self: Ledger, messages: Any) -> list[int]:
        ids = answer(self, messages)
        row = self._rows[-1]
        turn = row.turn_ids.index(0)
        row.token_ids[turn] = (row.token_ids[turn] + 1) % 200  # after it was sampled
        return ids

    monkeypatch.setattr(Ledger, "answer", tokenised_again)
    module = GRPOLightningModule(path, kl=None, optimizer=sgd, advantage=GroupRelative(scale="none"))
    with pytest.raises(LedgerMismatchError, match=r"row 0, turn 0, token \d+: sampled with log-prob.*") as error:
        fit(path, module=module, engine=ThreadEngine(), compare=False, **way)
    assert "Text before the token: '" in str(error.value) and "Text of the turn: '" in str(error.value)
    assert module.policy_version == 0, "no update was made"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": PromptSource(rows=[{"prompt": "a"}], system_prompt="s")}, "prompts.system_prompt: has no effect"),
        ({"sampling": SamplingParams(max_new_tokens=4, top_p=0.5)}, "TrajectoryLogprobCheck with sampling.top_p=0.5"),
        (
            {"sampling": SamplingParams(max_new_tokens=4, temperature=0.5)},
            "TrajectoryLogprobCheck with sampling.temperature=0.5",
        ),
    ],
)
def test_what_would_have_no_effect_is_refused_by_name(arguments: dict[str, Any], message: str, path: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit(path, **arguments)
