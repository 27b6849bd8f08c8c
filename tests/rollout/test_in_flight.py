"""Weights that change within completions: which version sampled what, and runs that repeat and resume bit for bit."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightrl.algorithms import GRPOLightningModule
from lightrl.callbacks import RolloutCheckpoint, TrajectoryLogprobCheck
from lightrl.data.prompts import PromptSource
from lightrl.engines import ServerEngine
from lightrl.engines.transformers.decoding import Generation
from lightrl.engines.vllm.special_requests import joined
from lightrl.environments.episodes import Episode, Task, one_turn
from lightrl.models.spec import LoraSpec, ModelSpec
from lightrl.records import Completion, CompletionGroup, GenerationRequest, Rollouts, SamplingParams, Trajectory
from lightrl.rollout import Ahead, Evaluation, InFlight
from lightrl.rollout.learner import RLCallback
from tests.models.test_routing import saved
from tests.rollout.test_staleness import Watch, run, sgd, staleness
from tests.toys import KeptEngine, ThreadEngine, digits_reward, quickstart_model, sums_data
from tests.waiting import until

FIRST = 4
"""Tokens after which a completion waits for the next weights, where the engine is `Scripted`."""

VARIED = SamplingParams(max_new_tokens=24)
ORDERED = PromptSource(rows=[{"prompt": f"{a:02d}+{b:02d}="} for a in range(8) for b in range(8)], shuffle=False)


class Gated:
    """A `Generation` for each rollout, which leaves off after so many tokens until the weights change, unless it is
    the rollout that is due."""

    def __init__(self, engine: Scripted) -> None:
        self.engine = engine
        self.due = engine.learnt
        self.parts: list[Generation] = []
        self.numbers: list[int] = []
        self.steps: list[int] = []

    @property
    def jobs(self) -> dict[Any, Any]:
        return {request: job for part in self.parts for request, job in part.jobs.items()}

    @property
    def open(self) -> list[int]:
        numbered = enumerate(zip(self.parts, self.numbers, self.steps, strict=True))
        return [i for i, (p, number, n) in numbered if p.jobs and (n < FIRST or number <= self.due)]

    def add(self, requests: list[GenerationRequest]) -> None:
        for number, own in itertools.groupby(requests, lambda r: int(r.name.rpartition(" ")[2].rstrip(")")) // 8):
            self.parts.append(ThreadEngine._new_generation(self.engine))
            self.numbers.append(number)
            self.steps.append(0)
            self.parts[-1].add(list(own))

    def step(self) -> list[CompletionGroup]:
        groups = []
        for i in self.open or [None]:
            if i is None:
                time.sleep(0.002)
            else:
                groups += self.parts[i].step()
                self.steps[i] += 1
        return groups

    def abort(self, requests: list[GenerationRequest]) -> None:
        for part in self.parts:
            part.abort([request for request in requests if request in part.jobs])

    def partials(self) -> list[CompletionGroup]:
        return [group for part in self.parts for group in part.partials()]

    def changed(self, version: int, *, keep_cache: bool) -> None:
        for part in self.parts:
            part.changed(version, keep_cache=keep_cache)
        self.due, self.steps = self.engine.learnt, [0] * len(self.steps)


class Scripted(ThreadEngine):
    """Samples as `Gated` does."""

    def __init__(self, learnt: int = 0) -> None:
        super().__init__()
        self.learnt = learnt

    def _new_generation(self) -> Any:
        return Gated(self)

    def waits(self) -> bool:
        gated: Any = self._generation
        return set(self._asked) <= (set(gated.jobs) if gated else set()) and not (gated and gated.open)


class Count(RLCallback):
    """Counts rollouts learnt from; an update begins when all completions have come to where they leave off."""

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        engine = trainer.datamodule.engine
        if isinstance(engine, Scripted):
            trainer.datamodule._sampler.loop.run(asyncio.sleep(0.01))  # episodes that were started have begun
            until(engine.waits, 10)

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        engine = trainer.datamodule.engine
        if isinstance(engine, Scripted):
            engine.learnt += 1


def in_flight(path: str, *callbacks: Any, **data: Any) -> tuple[Any, Watch]:
    common = {"sampling": VARIED, "prompts": ORDERED, "rollouts_per_epoch": 5, "schedule": InFlight()}
    return run(path, Count(), *callbacks, **{"engine": Scripted(), **common, **data})


def versions(rollouts: Rollouts) -> torch.Tensor:
    if rollouts.policy_versions is not None:
        return rollouts.policy_versions
    return torch.where(rollouts.response_mask, rollouts.policy_version, -1)


def worst(module: Any, watch: Watch, rollouts: Rollouts, version: int, of: int) -> float:
    """Largest difference between recorded log-probs of tokens of one version and those by the weights of another."""
    module.actor.load_state_dict(watch.weights[version])
    with torch.no_grad():
        out = module.actor(rollouts)
    return float((out.logprobs - rollouts.engine_logprobs)[versions(rollouts) == of].abs().max())


def same(one: list[Rollouts], other: list[Rollouts]) -> bool:
    pairs = list(zip(one, other, strict=True))
    names = ("token_ids", "engine_logprobs", "rewards")
    return all(torch.equal(getattr(a, n), getattr(b, n)) for a, b in pairs for n in names) and all(
        torch.equal(versions(a), versions(b)) for a, b in pairs
    )


@pytest.mark.parametrize("bound", [1, 2])
def test_each_token_is_of_the_version_that_it_names(bound: int, side_model: str) -> None:
    module, watch = in_flight(side_model, schedule=InFlight(bound))
    for number, (rollouts, metrics) in enumerate(zip(watch.rollouts, watch.metrics, strict=True)):
        sampled = versions(rollouts)
        begun = max(number - bound, 0)
        assert metrics["rollout/staleness"] == number - begun == metrics["rollout/staleness_updates"]
        for row in sampled:
            row = row[row >= 0]
            assert row.tolist() == [min(begun + i // FIRST, number) for i in range(len(row))]
        lags = number - sampled[sampled >= 0].float()
        assert metrics["rollout/staleness_mean"] == pytest.approx(float(lags.mean()))
        if number:
            assert metrics["rollout/switched"] > 0.5
            assert (
                worst(module, watch, rollouts, number, number) < 1e-4 < 1e-2 < worst(module, watch, rollouts, 0, number)
            )
        assert worst(module, watch, rollouts, begun, begun) < 1e-4
    assert watch.metrics[1]["off_policy/kl"] > 1e-6


def test_a_kept_cache_is_that_of_the_old_weights(side_model: str) -> None:
    module, watch = in_flight(side_model, schedule=InFlight(cache="keep"))
    for number, rollouts in enumerate(watch.rollouts[1:], 1):
        for row in versions(rollouts):
            row = row[row >= 0]
            assert row.tolist() == [number - 1] * min(FIRST, len(row)) + [number] * (len(row) - FIRST)
        assert worst(module, watch, rollouts, number - 1, number - 1) < 1e-4
        assert worst(module, watch, rollouts, number, number) > 1e-3  # what a fresh prefill does not give


def test_a_resumed_run_is_the_one_that_went_on(side_model: str, tmp_path: Path) -> None:
    checkpoint = RolloutCheckpoint(every_n_rollouts=2, dirpath=str(tmp_path), save_top_k=-1)
    first, whole = in_flight(side_model, checkpoint, schedule=InFlight(2))
    (saved,) = [path for path in tmp_path.glob("*.ckpt") if torch.load(path, weights_only=True)["global_step"] == 2]
    flights = torch.load(saved, weights_only=True)["RolloutDataModule"]["schedule"]
    assert [flight["behind"] for flight in flights] == [2, 1]
    resumed, rest = in_flight(side_model, schedule=InFlight(2), engine=Scripted(learnt=2), ckpt_path=str(saved))
    assert same(whole.rollouts[2:], rest.rollouts)
    assert [m["rollout/staleness"] for m in rest.metrics] == [m["rollout/staleness"] for m in whole.metrics[2:]]
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), resumed.parameters(), strict=True))


def test_an_evaluation_in_between_is_of_the_newest_policy_and_waits_for_nothing(side_model: str) -> None:
    evaluation = {"evaluation": Evaluation([{"prompt": "1+1="}], SamplingParams(6))}
    module, watch = in_flight(side_model, rollouts_per_epoch=2, max_epochs=2, **evaluation)
    assert [version for version, _ in watch.evaluated] == [2, 4]
    for version, rows in watch.evaluated:
        assert rows.policy_version == version and watch.gap(module, version, rows) < 1e-4
    # What was under way stayed where it was, and went on with the weights that were evaluated.
    assert sorted(set(versions(watch.rollouts[2]).flatten().tolist())) == [-1, 1, 2]
    assert worst(module, watch, watch.rollouts[2], 2, 2) < 1e-4


def test_an_adapter_changes_within_completions(side_model: str) -> None:
    spec = ModelSpec(side_model, lora=LoraSpec(r=4))
    module, watch = in_flight(side_model, module=GRPOLightningModule(spec, kl=None, optimizer=sgd))
    for number, rollouts in enumerate(watch.rollouts[1:], 1):
        assert watch.metrics[number]["rollout/switched"] > 0.5
        for version in (number - 1, number):
            assert worst(module, watch, rollouts, version, version) < 1e-4
        assert worst(module, watch, rollouts, 0, number) > 1e-2


def test_experts_are_replayed_over_a_change_of_weights_and_a_resume(tmp_path: Path) -> None:
    path = saved("Mixtral", tmp_path / "model")

    def learner() -> Any:
        return GRPOLightningModule(ModelSpec(path, freeze=["*gate.weight"]), kl=None, optimizer=sgd)

    checkpoint = RolloutCheckpoint(every_n_rollouts=2, dirpath=str(tmp_path), save_top_k=-1)
    module, whole = in_flight(path, checkpoint, module=learner(), rollouts_per_epoch=4)
    for number, rollouts in enumerate(whole.rollouts):
        lengths = rollouts.attention_mask.sum(1)
        assert [len(routes) for routes in rollouts.routes] == [int(n) - 1 for n in lengths]  # type: ignore[arg-type]
        for version in {max(number - 1, 0), number}:
            assert worst(module, whole, rollouts, version, version) < 1e-4
        free = replace(rollouts, routes=[None] * len(rollouts.routes))
        assert worst(module, whole, free, number, number) > 1e-2
    assert whole.metrics[1]["rollout/switched"] > 0.5
    (middle,) = [file for file in tmp_path.glob("*.ckpt") if torch.load(file, weights_only=True)["global_step"] == 2]
    resumed = {"engine": Scripted(learnt=2), "ckpt_path": str(middle)}
    _, rest = in_flight(path, module=learner(), rollouts_per_epoch=4, **resumed)
    assert same(whole.rollouts[2:], rest.rollouts)


class Again(Episode):
    """Asks with one seed for two prompts, as an attempt that is made again does where its environment differs."""

    async def run(self, task: Task, ask: Any) -> list[Trajectory]:
        first = task.prompt.request(0, task.sampling, task.seed, len(task.attempts))
        await ask(first)
        return one_turn(await ask(replace(first, token_ids=[*first.token_ids, first.token_ids[0]])))


def test_what_was_sampled_of_one_prompt_is_not_taken_for_anothers_with_the_same_seed(side_model: str) -> None:
    module, watch = in_flight(side_model, engine=ThreadEngine(), episode=Again(), rollouts_per_epoch=2)
    assert worst(module, watch, watch.rollouts[0], 0, 0) < 1e-4


LONG = SamplingParams(max_new_tokens=320, ignore_eos=True)
"""Which vLLM samples ten times as long as the policy learns."""


def with_vllm(folder: Path, lora: LoraSpec | None) -> tuple[KeptEngine, Any]:
    """An engine, and what runs over it."""
    shape = {"num_hidden_layers": 1, "intermediate_size": 64, "max_position_embeddings": 512}
    path, engine = quickstart_model(folder, **shape), KeptEngine(in_process=False)
    # Few completions, so that an update is over long before them, on a busy machine too.
    few = {"engine": engine, "sampling": LONG, "prompts_per_rollout": 4, "group_size": 2, "rollouts_per_epoch": 4}

    def learn(*callbacks: Any, **data: Any) -> tuple[Any, Watch]:
        module = GRPOLightningModule(ModelSpec(path, lora=lora), kl=None, optimizer=sgd)
        schedule = data.get("schedule")
        engine._keeps_cache = schedule is not None and schedule.keeps_cache  # a shared engine starts once
        return in_flight(path, *callbacks, module=module, **few, **data)

    return engine, learn


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Runs of all weights over one engine."""
    engine, learn = with_vllm(tmp_path_factory.mktemp("plain"), None)
    yield learn
    engine.end()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("cache", ["recompute", "keep"])
def test_vllm_changes_weights_within_completions(cache: Any, plain: Any) -> None:
    module, watch = plain(schedule=InFlight(cache=cache))
    assert [m["rollout/staleness"] for m in watch.metrics] == [0, 1, 1, 1]
    # Rollouts 0 and 1 are sampled beside each other, 2 begins while the policy learns from 1 and ends after that.
    assert watch.metrics[2]["rollout/switched"] > 0.5 and watch.metrics[2]["rollout/staleness_mean"] < 1
    for number, rollouts in enumerate(watch.rollouts):
        first = max(number - 1, 0)
        for version in {int(versions(rollouts).max()), first}:
            gap = worst(module, watch, rollouts, version, version)
            assert gap < 1e-4 if version == first or cache == "recompute" else gap > 1e-3


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_samples_the_next_rollout_during_the_update(plain: Any) -> None:
    scored: list[int] = []

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        scored.append(len(prompts))
        return digits_reward(prompts, completions)

    class Waits(RLCallback):
        def on_experience_made(self, trainer: Any, module: Any, experience: Any) -> None:
            groups = 4 * min(module.policy_version + 2, 4)
            assert until(lambda: len(scored) >= groups), "the next rollout waits for the update"

    module, watch = plain(Waits(), schedule=Ahead(), rewards=[reward])
    assert staleness(watch) == [0, 1, 1, 1]
    for number in (1, 3):
        assert watch.gap(module, number - 1, watch.rollouts[number]) < 1e-4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dynamic_sampling_rounds": 2}, "dynamic_sampling_rounds=2"),
        ({"engine": ServerEngine(["http://127.0.0.1:1"], shared_folder="/tmp")}, "engine=ServerEngine"),
    ],
)
def test_what_cannot_work_is_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sums_data(**{"engine": ThreadEngine(), "schedule": InFlight(), **arguments})


def test_a_check_of_old_weights_is_refused(side_model: str) -> None:
    with pytest.raises(ValueError, match="callback TrajectoryLogprobCheck"):
        in_flight(side_model, TrajectoryLogprobCheck())


@pytest.mark.parametrize(
    ("least", "tokens", "text"),
    [(0, "a##b##", "a##b##"), (0, "ab#", "ab##"), (5, "ab#", "ab##c##"), (0, "abc", "abc##")],
)
def test_a_stop_string_ends_a_completion_across_an_interruption(least: int, tokens: str, text: str) -> None:
    """vLLM, which continues the tokens, would end only at a stop string within the new ones. A token is a letter."""

    def part(text: str, reason: Any) -> Completion:
        return Completion([ord(c) for c in text], [-1.0] * len(text), text, reason, policy_versions=[0] * len(text))

    new = {"a##b##": "", "ab#": "#c##", "abc": "##"}[tokens]
    sampling = SamplingParams(max_new_tokens=9, min_new_tokens=least, stop=["##"])
    request = GenerationRequest([1], sampling, 0, begun=[part(tokens, "suspended")])
    found = joined(part(new, "stop"), request, 0, [1] * len(new), lambda ids: "".join(map(chr, ids)))
    assert found.text == text == "".join(map(chr, found.token_ids))
    assert found.finish_reason == "stop" and len(found.logprobs) == len(found.policy_versions) == len(text)
