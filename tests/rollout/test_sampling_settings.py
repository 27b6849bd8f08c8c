"""The trainer scores what each token was drawn from, leaves the token out, or the run does not start."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything

from lightrl.algorithms import GRPOLightningModule
from lightrl.callbacks import WeightSync
from lightrl.data.prompts import PromptSource
from lightrl.engines import ServerEngine, VLLMEngine
from lightrl.engines.transformers.engine import TransformersEngine
from lightrl.environments.episodes import Episode, Task, one_turn
from lightrl.records import Prompts, Rollouts, SamplingParams, Trajectory, TrajectoryRow
from lightrl.rollout import Ahead, Evaluation, InFlight, Schedule
from lightrl.rollout.collector import ScoredGroup, collate
from lightrl.rollout.learner import RLCallback
from tests.rollout.conftest import ScriptedEngine
from tests.toys import Keep, ThreadEngine, model_fixture, quiet_trainer, sgd, sums_data

PLAIN = SamplingParams(max_new_tokens=6)
WRONG: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.0},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "regex": {"regex": "[0-9]+"},
    "json_schema": {"json_schema": {"type": "integer"}},
}


model = model_fixture()


class Scores(Keep):
    """Compares the log-probs of the engine with those of the policy, before it changes, at each rollout's temperature.

    Attributes:
        gaps: largest difference of each rollout that the policy sampled which scores it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gaps: list[float] = []

    @torch.no_grad()
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Rollouts, batch_idx: int) -> None:
        if batch.policy_version != module.policy_version:
            return
        out = module.actor(batch)
        self.gaps.append(float((out.logprobs - batch.engine_logprobs)[batch.response_mask].abs().max()))


class Changes(RLCallback):
    """Samples in another way after the first rollout; with no settings, cooler after each."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        data = trainer.datamodule
        cooler = {"temperature": data.sampling.temperature * 0.7}
        data.sampling = replace(data.sampling, **(self.settings or cooler))


def run(model: str, *callbacks: Any, **data: Any) -> Scores:
    seed_everything(0, verbose=False)
    scores = Scores()
    module = GRPOLightningModule(model, kl=None, optimizer=sgd)
    trainer = quiet_trainer(callbacks=[WeightSync(), scores, *callbacks])
    trainer.fit(module, sums_data(**{"sampling": PLAIN, "rollouts_per_epoch": 2, **data}))
    return scores


@pytest.mark.parametrize(
    ("setting", "count"), [({"fire_temperature": 10.0}, 1), ({"min_new_tokens": 3}, 3), ({"temperature": 0.6}, 0)]
)
def test_tokens_of_another_distribution_are_masked_and_counted(model: str, setting: Any, count: int) -> None:
    scores = run(model, sampling=replace(PLAIN, **setting))
    assert len(scores.gaps) == 2 and max(scores.gaps) < 1e-4
    for rollouts, metrics in zip(scores.rollouts, scores.metrics, strict=True):
        sampled = rollouts.attention_mask.sum(1) - len(rollouts.prompts[0])  # a token for each character
        assert rollouts.response_mask.sum(1).tolist() == (sampled - count).clamp(min=0).tolist()
        assert metrics.get("rollout/masked_tokens", 0.0) == float(sampled.clamp(max=count).sum())


@pytest.mark.parametrize("name", WRONG)
def test_settings_that_nothing_scores_are_rejected(model: str, name: str) -> None:
    with pytest.raises(ValueError, match=rf"sampling\.{name}="):
        run(model, sampling=replace(PLAIN, **WRONG[name]))
    with pytest.raises(ValueError, match=rf"sampling\.{name}="):  # also if a callback sets it during the run
        run(model, Changes(**WRONG[name]))


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p"])
def test_a_cut_needs_an_engine_that_records_it(model: str, name: str) -> None:
    cut = replace(PLAIN, **{name: {"top_p": 0.8, "top_k": 3, "min_p": 0.1}[name]})
    assert max(run(model, sampling=cut).gaps) < 1e-4
    for engine in (VLLMEngine(), ScriptedEngine()):
        with pytest.raises(ValueError, match=rf"sampling\.{name}="):
            run(model, sampling=cut, engine=engine)


def test_extra_settings_of_engines_are_rejected_in_training(model: str) -> None:
    sampling = replace(PLAIN, extra={"logit_bias": 1})
    sglang = ServerEngine(["http://127.0.0.1:9"], kind="sglang", shared_folder="/nowhere")
    vllm = ServerEngine(["http://127.0.0.1:9"], shared_folder="/nowhere")
    for engine in (VLLMEngine(), vllm, sglang, ScriptedEngine(), TransformersEngine()):
        with pytest.raises(ValueError, match=r"sampling\.extra"):
            engine.check_sampling(sampling, trained=True)
    with pytest.raises(ValueError, match=r"sampling\.extra\.logit_bias"):
        run(model, sampling=sampling, engine=VLLMEngine())


@pytest.mark.parametrize("argument", ["logits_processors", "logprobs_mode"])
def test_engine_arguments_that_change_the_distribution_are_rejected(model: str, argument: str) -> None:
    with pytest.raises(ValueError, match=rf"engine_args\.{argument}="):
        run(model, engine=VLLMEngine(engine_args={argument: ["raw_logprobs"]}))


def test_evaluation_samples_as_it_likes_and_counts_all_tokens(model: str) -> None:
    own = replace(PLAIN, fire_temperature=5.0, repetition_penalty=1.3, min_new_tokens=4, ignore_eos=True)

    class Evaluated(RLCallback):
        batches: list[Rollouts] = []  # noqa: RUF012

        def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
            self.batches.append(batch)

    seen = Evaluated()
    prompts = PromptSource(rows=[{"prompt": "11+22="}])
    scores = run(model, seen, evaluation=Evaluation(prompts, own), rollouts_per_epoch=1)
    assert seen.batches and max(scores.gaps) < 1e-4
    assert all(int(batch.response_mask.sum()) == 6 * len(batch) for batch in seen.batches)


def test_evaluation_samples_do_not_depend_on_the_size_of_batches(model: str) -> None:
    class Completions(RLCallback):
        def __init__(self) -> None:
            self.found: list[str] = []

        def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
            self.found += batch.completions

    found = []
    for size in (2, 5):
        seen, rows = Completions(), [{"prompt": f"{a}+{a}="} for a in range(5)]
        data = sums_data(evaluation=Evaluation(rows, PLAIN, group_size=2, batch_size=size))
        quiet_trainer(callbacks=[seen]).validate(GRPOLightningModule(model), data, verbose=False)
        found.append(seen.found)
    assert found[0] == found[1] and len(set(found[0])) > 5


@pytest.mark.parametrize("schedule", [Ahead(2), InFlight()])
def test_a_rollout_has_the_temperature_it_was_sampled_with(model: str, schedule: Schedule) -> None:
    seed_everything(0, verbose=False)
    scores = Scores()
    module = GRPOLightningModule(model, kl=None, optimizer=lambda params: torch.optim.SGD(params, lr=0.0))
    data = sums_data(sampling=PLAIN, rollouts_per_epoch=5, engine=ThreadEngine(), schedule=schedule)
    quiet_trainer(callbacks=[WeightSync(), scores, Changes()]).fit(module, data)
    assert [r.temperature for r in scores.rollouts] != [1.0] * 5
    for rollouts in scores.rollouts:  # the weights never change
        with torch.no_grad():
            out = module.actor(rollouts)
        assert float((out.logprobs - rollouts.engine_logprobs)[rollouts.response_mask].abs().max()) < 1e-4


def test_a_resumed_rollout_keeps_the_settings_it_began_with() -> None:
    cold, asked = replace(PLAIN, temperature=0.5), list[Any]()

    class Sampler:
        data = SimpleNamespace(prompts_per_rollout=1, host=SimpleNamespace(checks=list))

        def ready(self, first: int) -> float:
            return 0.0

        def begin(self, first: int, *, sampling: Any, collection: Any) -> Any:
            asked.append(sampling)
            raise StopIteration

    schedule = InFlight()
    schedule.attach(Sampler())  # type: ignore[arg-type]
    schedule.load_state_dict([{"behind": 0, "sampled": {}, "sampling": {**vars(cold)}}])
    with pytest.raises(StopIteration):
        schedule.next(0, 1)
    assert asked == [cold]


class Hotter(Episode):
    """Asks at another temperature than the run's."""

    multi_turn = False
    setting: dict[str, Any] = {"temperature": 2.0}  # noqa: RUF012

    async def run(self, task: Task, ask: Any) -> list[Trajectory]:
        sampling = replace(task.sampling, **self.setting)
        return one_turn(await ask(task.prompt.request(0, sampling, task.seed, len(task.attempts))))


def test_an_episode_that_asks_for_another_distribution_is_rejected(model: str) -> None:
    with pytest.raises(ValueError, match=r"sampling\.temperature=2\.0"):
        run(model, episode=Hotter())
    hot = Hotter()
    hot.setting = {"fire_temperature": 3.0}
    with pytest.raises(ValueError, match=r"sampling\.fire_temperature=3\.0"):
        run(model, episode=hot)
    hot.setting = {"max_new_tokens": 2, "stop": ["1"]}
    assert max(run(model, episode=hot).gaps) < 1e-4


def test_masked_tokens_by_hand() -> None:
    """Two turns of three and one tokens: the first of each becomes context, and the reward stays on the last."""
    row = TrajectoryRow(
        token_ids=[5, 6, 7, 8, 9, 10],
        turn_ids=[-1, 0, 0, 0, -1, 1],
        logprobs=[0.0, -1.0, -2.0, -3.0, 0.0, -4.0],
        policy_versions=[-1, 2, 2, 3, -1, 3],
    )
    trajectory = Trajectory([row], "x", turn_rewards=[0.5, 0.25])
    rows = collate([ScoredGroup(Prompts([[5]], ["a"]), [trajectory], None)], 0, 1.0, masked_tokens=1)
    assert rows.response_mask.tolist() == [[False, False, True, True, False, False]]
    assert rows.engine_logprobs.tolist() == [[0.0, 0.0, -2.0, -3.0, 0.0, 0.0]]
    assert rows.turn_ids is None and rows.rewards.tolist() == [0.75]
    assert rows.policy_versions is not None and rows.policy_versions.tolist() == [[-1, -1, 2, 3, -1, -1]]
    assert rows.turn_rewards["environment"].tolist() == [[0.0, 0.0, 0.0, 0.5, 0.0, 0.0]]
    assert rows.token_ids.tolist() == [row.token_ids] and rows.metrics["rollout/masked_tokens"] == 2
    assert trajectory.sampled_ids == [6, 7, 8, 10], "reward functions see what was sampled"
