"""The pipeline with a scripted engine: turns, retries, time limits, errors, and who waits for what."""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from lightrl.engines.base import EngineDiedError
from lightrl.environments.episodes import Ask, Episode, SingleTurn, Task, one_turn
from lightrl.environments.multi_turn import Attempt, MultiTurn
from lightrl.records import (
    Completion,
    CompletionGroup,
    GenerationRequest,
    Prompts,
    SamplingParams,
    Trajectory,
    TrajectoryRow,
)
from lightrl.rewards.base import RewardError
from lightrl.rewards.scorer import RewardScorer
from lightrl.rollout.collector import RolloutStalledError, collate, trajectory_metrics
from lightrl.rollout.overlap import RecordedCollection
from lightrl.rollout.sampler import RolloutSampler
from tests.rollout.conftest import ScriptedEngine
from tests.waiting import no_thread_left, until

PROMPTS = Prompts(token_ids=[[1, 2], [3]], texts=["p", "q"], columns={"answer": ["x", "y"]}, indices=[7, 9])


def tasks(group_size: int = 2) -> list[Task]:
    return [
        Task(
            PROMPTS[[i]],
            tuple(range(group_size)),
            10 + i,
            SamplingParams(max_new_tokens=4),
            None,
            64,
            name=f"prompt {i}",
        )
        for i in range(2)
    ]


class TwoTurns(Episode):
    """Each attempt samples twice; between the turns the environment says token 99. Attempts may be told to fail."""

    max_retries = 2

    def __init__(self, fails: Callable[[Task, int], bool] = lambda task, attempt: False) -> None:
        self.fails = fails
        self.seen: list[Task] = []
        self.closed = False

    async def run(self, task: Task, ask: Ask) -> list[Trajectory]:
        self.seen.append(task)
        return list(await asyncio.gather(*(self.attempt(task, ask, attempt) for attempt in task.attempts)))

    async def attempt(self, task: Task, ask: Ask, attempt: int) -> Trajectory:
        ids, turns, versions = list(task.prompt.token_ids[0]), [-1] * len(task.prompt.token_ids[0]), []
        versions = [-1] * len(ids)
        for turn in range(2):
            request = GenerationRequest(list(ids), task.sampling, task.turn_seed(attempt, turn), name=task.name)
            group = await ask(request)
            await self.step(request)
            sampled = group.completions[0].token_ids
            ids, turns = ids + sampled + [99], turns + [turn] * len(sampled) + [-1]
            versions += [group.policy_version] * len(sampled) + [-1]
        if self.fails(task, attempt):
            return task.failed("the sandbox is gone")
        row = TrajectoryRow(ids, turns, [-0.5 if t >= 0 else 0.0 for t in turns], versions)
        said = [{"role": "user", "content": task.prompt.texts[0]}, {"role": "assistant", "content": str(attempt)}]
        return Trajectory([row], f"answer {attempt}", "turns", said, [0.25, 0.5], metrics={"turns": 2.0})

    async def step(self, request: GenerationRequest) -> None:
        """What the environment does with the reply to a request."""

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def collector() -> Iterator[Callable[..., RolloutSampler]]:
    made: list[RolloutSampler] = []

    def make(engine: Any = None, episode: Any = None, rewards: Any = (), stall_timeout: Any = 30.0) -> RolloutSampler:
        scorer = RewardScorer(list(rewards)) if rewards else None
        sizes = {"group_size": 2, "prompts_per_rollout": 2, "dynamic_sampling_rounds": 0, "seed": 0}
        data = SimpleNamespace(
            engine=engine or ScriptedEngine(),
            episode=episode or SingleTurn(),
            scorer=scorer,
            stall_timeout=stall_timeout,
            **sizes,
        )
        made.append(RolloutSampler(data, None))
        return made[-1]

    with no_thread_left("lightrl-sampling", "lightrl-episodes"):
        yield make
        for one in made:
            one.close(5.0)
            if one.data.scorer is not None:
                one.data.scorer.close()


def test_a_single_turn_asks_once_per_prompt_with_the_prompts_own_seed(collector: Any) -> None:
    engine = ScriptedEngine()
    groups = collector(engine).collect(tasks()).finish()
    assert [(r.token_ids, r.seed, r.num_completions) for r in engine.asked] == [([1, 2], 10, 2), ([3], 11, 2)]
    rows = collate(groups, 0, 1.0)
    assert rows.token_ids.tolist() == [[1, 2, 49, 50]] * 2 + [[3, 49, 50, 0]] * 2
    assert rows.trajectory_ids.tolist() == [0, 1, 2, 3] and rows.group_ids.tolist() == [0, 0, 1, 1]
    assert rows.turn_ids is None and rows.policy_versions is None and rows.policy_version == 3
    assert rows.stop_reasons == ["stop"] * 4 and not rows.truncated.any() and rows.messages == []


def test_a_turn_is_asked_for_while_others_run(collector: Any) -> None:
    """The second turn of prompt 1 is asked for before the first of prompt 0 is answered."""
    engine = ScriptedEngine()
    engine.hold = lambda request: request.token_ids == [1, 2] and len(engine.asked) < 6
    rows = collate(collector(engine, TwoTurns()).collect(tasks()).finish(), 0, 1.0)
    assert [r.token_ids for r in engine.asked[2:6]] == [[3], [3], [3, 49, 50, 99], [3, 49, 50, 99]]
    assert rows.token_ids[2].tolist() == [3, 49, 50, 99, 49, 50, 99, 0]
    assert rows.turn_ids is not None and rows.turn_ids[2].tolist() == [-1, 0, 0, -1, 1, 1, -1, -1]
    assert rows.response_mask[2].tolist() == [False, True, True, False, True, True, False, False]
    assert rows.turn_rewards["environment"][2].tolist() == [0, 0, 0.25, 0, 0, 0.5, 0, 0]
    assert rows.rewards.tolist() == [0.75] * 4 and rows.stop_reasons == ["turns"] * 4 and bool(rows.truncated.all())
    assert len({r.seed for r in engine.asked}) == 8, "each attempt and turn has a seed of its own"


def test_rewards_get_messages_and_copies_of_the_token_ids(collector: Any) -> None:
    def spoils(completion_ids: list[list[int]], messages: list[Any], answer: list[str], **_: Any) -> list[float]:
        for ids, said in zip(completion_ids, messages, strict=True):
            assert ids == [49, 50, 49, 50] and said[1]["role"] == "assistant"
            ids.clear()
            said[1]["content"] = "spoilt"
            said.clear()
        return [float(i) for i in range(len(answer))]

    rows = collate(collector(episode=TwoTurns(), rewards=[spoils]).collect(tasks()).finish(), 0, 1.0)
    assert rows.token_ids[2].tolist()[:7] == [3, 49, 50, 99, 49, 50, 99]
    assert rows.rewards.tolist() == [0.75, 1.75, 0.75, 1.75]
    assert rows.messages[1][1] == {"role": "assistant", "content": "1"}


def test_failed_attempts_are_made_again_with_the_same_seeds(collector: Any) -> None:
    episode = TwoTurns(fails=lambda task, attempt: attempt == 1 and task.retry == 0)
    engine = ScriptedEngine()
    collection = collector(engine, episode).collect(tasks())
    groups = collection.finish()
    assert (collection.retried, collection.failed) == (2, 0)
    assert [task.attempts for task in episode.seen] == [(0, 1), (0, 1), (1,), (1,)]
    seeds = [r.seed for r in engine.asked if r.token_ids == [3]]
    assert len(seeds) == 3 and seeds[2] == seeds[1] != seeds[0]
    assert [t.stop_reason for group in groups for t in group.trajectories] == ["turns"] * 4


def test_what_failed_for_good_has_no_reward_and_is_not_scored(collector: Any) -> None:
    scored: list[str] = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        scored.extend(completions)
        return [1.0] * len(completions)

    episode = TwoTurns(fails=lambda task, attempt: task.seed == 11 and attempt == 0)
    collection = collector(episode=episode, rewards=[reward]).collect(tasks())
    groups = collection.finish()
    rows = collate(groups, 0, 1.0)
    assert (collection.retried, collection.failed) == (2, 1)
    assert sorted(scored) == ["answer 0", "answer 1", "answer 1"]
    assert [math.isnan(r) for r in rows.rewards.tolist()] == [False, False, True, False]
    assert [math.isnan(r) for r in rows.reward_parts["reward"].tolist()] == [False, False, True, False]
    assert rows.stop_reasons == ["turns", "turns", "failure", "turns"] and not rows.response_mask[2].any()
    metrics = trajectory_metrics(groups)
    assert metrics["rollout/stop_turns"] == 0.75 and metrics["rollout/stop_failure"] == 0.25
    assert metrics["rollout/turns"] == 2.0, "a mean over those that measured it"


def test_too_many_failures_stop_the_run_with_the_cause(collector: Any) -> None:
    episode = TwoTurns(fails=lambda task, attempt: task.seed == 11 or attempt == 0)
    with pytest.raises(RuntimeError, match=r"max_failed=0.5 .TwoTurns.: 3 of 4 .* each 3 times.*sandbox is gone"):
        collector(episode=episode).collect(tasks()).finish()


def test_the_run_stops_with_the_failure_that_is_one_too_many_and_does_not_wait_for_the_group(collector: Any) -> None:
    """Nine of ten attempts of a group fail at once; the tenth takes for ever."""

    class Slow(MultiTurn):
        async def play(self, attempt: Attempt) -> Trajectory:
            if attempt.name.startswith("attempt 9 "):
                await asyncio.sleep(3600)
            return tasks()[0].failed("killed")

        def check_prompts(self, prompts: Any) -> None: ...

    begin = time.monotonic()
    raw = replace(PROMPTS, raw=list(PROMPTS.texts))
    with pytest.raises(RuntimeError, match=r"6 of 10 trajectories of a rollout failed, each 1 times.*killed"):
        collector(episode=Slow(max_retries=0)).collect([replace(tasks(10)[0], prompt=raw[[0]])]).finish()
    assert time.monotonic() - begin < 60


def test_the_end_of_a_run_lets_environments_close(collector: Any) -> None:
    """Closing takes a moment of awaiting; the run's end cancels attempts, and waits for that."""
    freed: list[int] = []

    class Holds(Episode):
        async def run(self, task: Task, ask: Ask) -> list[Trajectory]:
            try:
                await ask(task.prompt.request(0, task.sampling, task.seed, 1))
            finally:
                await asyncio.sleep(0.2)
                freed.append(task.seed)
            raise AssertionError

    engine = ScriptedEngine()
    engine.hold = lambda request: True
    made = collector(engine, Holds())
    made.collect(tasks())
    assert until(lambda: len(engine.asked) > 1)
    made.close(5.0)
    assert sorted(freed) == [10, 11]


def test_a_time_limit_cancels_the_request(collector: Any) -> None:
    class Limited(Episode):
        async def run(self, task: Task, ask: Ask) -> list[Trajectory]:
            request = task.prompt.request(0, task.sampling, task.seed, len(task.attempts))
            asked = asyncio.ensure_future(ask(request))
            while request.token_ids not in [taken.token_ids for taken in engine.asked]:
                await asyncio.sleep(0.005)
            try:
                return one_turn(await asyncio.wait_for(asked, 0.1 if request.token_ids == [3] else 60))
            except TimeoutError:
                return [Trajectory(task.failed("").rows, "", "time") for _ in task.attempts]

    engine = ScriptedEngine()
    engine.hold = lambda request: request.token_ids == [3]
    groups = collector(engine, Limited()).collect(tasks()).finish()
    assert [t.stop_reason for group in groups for t in group.trajectories] == ["stop", "stop", "time", "time"]
    assert [r.token_ids for r in engine.cancelled] == [[3]]


def test_an_error_of_a_reward_function_ends_generation_at_once(collector: Any) -> None:
    def raises(**_: Any) -> list[float]:
        raise KeyError("oops")

    engine = ScriptedEngine()
    engine.hold = lambda request: request.token_ids == [3]  # for ever
    begin = time.monotonic()
    with pytest.raises(RewardError, match="raises.*oops"):
        collector(engine, rewards=[raises]).collect(tasks()).finish()
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize("kind", [SystemExit, asyncio.CancelledError])
def test_an_episode_that_leaves_ends_the_rollout_and_does_not_hang_it(
    kind: type[BaseException], collector: Any
) -> None:
    class Leaves(Episode):
        async def run(self, task: Task, ask: Ask) -> list[Trajectory]:
            async def leave() -> None:
                raise kind(3)

            await asyncio.gather(leave())
            raise AssertionError

    with pytest.raises((SystemExit, concurrent.futures.CancelledError)):
        collector(episode=Leaves(), stall_timeout=20.0).collect(tasks()).finish()


def test_an_error_of_an_episode_ends_the_run(collector: Any) -> None:
    class Breaks(Episode):
        async def run(self, task: Task, ask: Ask) -> list[Trajectory]:
            raise ZeroDivisionError("mistake")

    with pytest.raises(ZeroDivisionError, match="mistake"):
        collector(episode=Breaks()).collect(tasks()).finish()


class Answers(Episode):
    """Gives what it is told to for every task."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    async def run(self, task: Task, ask: Ask) -> list[Trajectory]:
        return self.answer  # type: ignore[no-any-return]


ROW = TrajectoryRow([1, 2, 5], [-1, -1, 0], [0.0, 0.0], [-1, -1, 3])
NAN = replace(ROW, logprobs=[0.0, 0.0, math.nan])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([Trajectory([], "")], "Answers.run: .*prompt 0"),
        ([Trajectory([ROW], "")] * 2, "Answers.run: .*prompt 0"),
        ([Trajectory([NAN], "")] * 2, "Answers.run: prompt 0: a log-prob is not finite"),
    ],
)
def test_an_episode_that_breaks_its_contract_is_named(answer: Any, message: str, collector: Any) -> None:
    with pytest.raises(ValueError, match=message):
        collector(episode=Answers(answer)).collect(tasks()).finish()


class Hangs(Episode):
    async def run(self, task: Task, ask: Ask) -> list[Trajectory]:
        await asyncio.sleep(3600)
        raise AssertionError


RELEASED = threading.Event()


def hangs(**_: Any) -> list[float]:
    RELEASED.wait(600)
    return []


def test_a_rollout_without_progress_says_what_it_waits_for(collector: Any) -> None:
    quick = {"stall_timeout": 0.5}
    with pytest.raises(RolloutStalledError, match=r"stall_timeout=0.5: .*Hangs \(2 groups, the first of prompt 0\)"):
        collector(episode=Hangs(), **quick).collect(tasks()).finish()
    try:
        with pytest.raises(RolloutStalledError, match=r"reward functions hangs \(2 groups"):
            collector(rewards=[hangs], **quick).collect(tasks()).finish()
    finally:
        RELEASED.set()


def test_an_engine_that_hangs_ends_the_rollout(collector: Any) -> None:
    engine = ScriptedEngine()
    engine.hold = lambda request: True
    with pytest.raises(RolloutStalledError, match=r"engine ScriptedEngine \(2 requests, the first for prompt 0"):
        collector(engine, stall_timeout=0.3).collect(tasks()).finish()


def test_slow_progress_is_no_stall(collector: Any) -> None:
    class Slow(Episode):
        async def run(self, task: Task, ask: Ask) -> list[Trajectory]:
            for turn in range(4):
                await asyncio.sleep(0.8)
                group = await ask(task.prompt.request(0, task.sampling, task.turn_seed(0, turn), len(task.attempts)))
            return one_turn(group)

    assert len(collector(episode=Slow(), stall_timeout=2.4).collect(tasks()).finish()) == 2


@pytest.mark.parametrize("dies", [False, True])
def test_what_was_sampled_so_far_is_there_for_a_checkpoint_also_of_an_engine_that_died(
    dies: bool, collector: Any
) -> None:
    class Paused(ScriptedEngine):
        def pause(self) -> list[CompletionGroup]:
            if dies:
                raise EngineDiedError("gone")
            part = Completion([49], [-0.5], "", "suspended", policy_versions=[3])
            return [CompletionGroup(r, [part] * r.num_completions, 3) for r in self.asked if self.hold(r)]

    engine = Paused()
    engine.hold = lambda request: request.token_ids == [3]
    made = collector(engine)
    collection = made.collect(tasks(), partial(RecordedCollection, begun={}))
    assert until(lambda: len(engine.asked) == 2 and collection._turns == 1)
    sampled = [[part.finish_reason for part in parts] for parts in collection.sampled().values()]
    assert sampled == [["stop", "stop"], *([] if dies else [["suspended", "suspended"]])]
    resumed = ScriptedEngine()
    again = collector(resumed).collect(tasks(), partial(RecordedCollection, begun=collection.sampled())).finish()
    assert len(again) == 2 and [request.token_ids for request in resumed.asked] == [[3]]
    assert [part.finish_reason for part in resumed.asked[0].begun] == ([] if dies else ["suspended"] * 2)
