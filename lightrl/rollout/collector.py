"""Runs the episodes of a rollout on one event loop, scores each finished group, and collates the groups."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor

from lightrl.engines.background import all_of, release_threads
from lightrl.environments.episodes import EnvironmentFailedError, Task
from lightrl.records import (
    CompletionGroup,
    GenerationRequest,
    Media,
    Prompts,
    Rollouts,
    SamplingParams,
    Scores,
    StopReason,
    Trajectory,
    pad_rows,
)
from lightrl.rewards.base import MEDIA, mean

ENVIRONMENT = "environment"
"""Name of the turn rewards among the reward components."""
SWITCH_SECONDS = 5e-4
"""Thread switch interval during multi-turn episodes. Python's default of 5 ms is a third of a small model's step, and
each turn switches threads several times."""

log = logging.getLogger(__name__)


@dataclass
class ScoredGroup:
    """The G trajectories of one prompt and their scores, which are None without reward functions."""

    prompt: Prompts
    trajectories: list[Trajectory]
    scores: Scores | None

    @property
    def rewards(self) -> list[float]:
        """Weighted sum of function rewards plus turn rewards per trajectory; NaN if it failed or was not scored."""
        scored = [math.nan] * len(self.trajectories) if self.scores is None else self.scores.total
        return [_reward(t, total) for t, total in zip(self.trajectories, scored, strict=True)]


def _reward(trajectory: Trajectory, scored: float) -> float:
    if trajectory.failed:
        return math.nan
    if not trajectory.turn_rewards:
        return scored
    return math.fsum([0.0 if math.isnan(scored) else scored, *trajectory.turn_rewards])


def collate(groups: Sequence[ScoredGroup], pad_token_id: int, temperature: float, masked_tokens: int = 0) -> Rollouts:
    """Collates P groups into right-padded (B, T) sequences, ordered by group and trajectory.

    The first `masked_tokens` tokens of each turn, which a metric counts, are excluded from the response mask.
    """
    trajectories = [(number, trajectory) for number, group in enumerate(groups) for trajectory in group.trajectories]
    sequences = [(p, i, t, row) for i, (p, t) in enumerate(trajectories) for row in t.rows]
    of_group, of_trajectory, owners, rows = (list(column) for column in zip(*sequences, strict=True))
    prompts = [group.prompt for group in groups]
    rewards = [reward for group in groups for reward in group.rewards]
    scores = Scores.concat([group.scores for group in groups if group.scores is not None])
    assert len(scores.total) in (0, len(trajectories)), "either all groups are scored by functions, or none"
    turn_ids = pad_rows([row.turn_ids for row in rows], -1, torch.long)
    masked = _first_of_turns(turn_ids, masked_tokens)
    turn_ids[masked] = -1
    trained = turn_ids >= 0
    logprobs = pad_rows([row.logprobs for row in rows], 0.0, torch.float32)
    versions = sorted(set[int]().union(*(row.policy_versions for row in rows)) - {-1})
    return Rollouts(
        token_ids=pad_rows([row.token_ids for row in rows], pad_token_id, torch.long),
        attention_mask=pad_rows([[True] * len(row.token_ids) for row in rows], False, torch.bool),
        response_mask=trained,
        engine_logprobs=logprobs.masked_fill_(masked, 0.0),
        group_ids=torch.tensor(of_group),
        rewards=torch.tensor([rewards[i] for i in of_trajectory], dtype=torch.float32),
        reward_parts={
            name: torch.tensor([part[i] for i in of_trajectory], dtype=torch.float32)
            for name, part in scores.parts.items()
        },
        truncated=torch.tensor([owner.stop_reason != "stop" for owner in owners]),
        policy_version=versions[0] if versions else -1,
        trajectory_ids=torch.tensor(of_trajectory),
        turn_ids=turn_ids if bool((turn_ids > 0).any()) else None,
        turn_rewards=_turn_rewards(owners, turn_ids),
        policy_versions=(
            pad_rows([row.policy_versions for row in rows], -1, torch.long).masked_fill_(masked, -1)
            if len(versions) > 1
            else None
        ),
        stop_reasons=[owner.stop_reason for owner in owners],
        messages=[owner.messages for owner in owners] if any(owner.messages for owner in owners) else [],
        states=[owner.states for owner in owners] if any(owner.states for owner in owners) else [],
        temperature=temperature,
        supports=[row.support for row in rows],
        routes=[row.routes for row in rows],
        prompts=[prompts[p].texts[0] for p in of_group],
        raw_prompts=[prompts[p].raw[0] for p in of_group] if prompts[0].raw else [],
        completions=[owner.completion for owner in owners],
        columns={
            **{name: [prompts[p].columns[name][0] for p in of_group] for name in prompts[0].columns},
            **{name: [values[i] for i in of_trajectory] for name, values in scores.extra.items()},
        },
        inputs=_shown("inputs", dict, prompts, of_group, rows),
        media=_shown("media", Media, prompts, of_group, rows),
        metrics=dict(scores.metrics) | ({"rollout/masked_tokens": float(masked.sum())} if masked_tokens else {}),
    )


def _first_of_turns(turn_ids: Tensor, count: int) -> Tensor:
    """(B, T) mask of the first `count` tokens of each turn of (B, T) `turn_ids`."""
    places = torch.arange(turn_ids.shape[1])
    begins = torch.ones_like(turn_ids, dtype=torch.bool)
    begins[:, 1:] = turn_ids[:, 1:] != turn_ids[:, :-1]
    start = torch.where(begins, places, 0).cummax(1).values
    return (turn_ids >= 0) & (places - start < count)


def _turn_rewards(owners: Sequence[Trajectory], turn_ids: Tensor) -> dict[str, Tensor]:
    """Places each turn's reward on its last trained token. Empty if there are no turn rewards."""
    if not any(owner.turn_rewards for owner in owners):
        return {}
    rewards = torch.zeros(turn_ids.shape)
    for i, (owner, row) in enumerate(zip(owners, turn_ids.tolist(), strict=True)):
        last = {turn: t for t, turn in enumerate(row) if turn >= 0}
        for turn, t in last.items():
            rewards[i, t] = owner.turn_rewards[turn] if turn < len(owner.turn_rewards) else 0.0
    return {ENVIRONMENT: rewards}


def _shown(
    name: str, empty: Callable[[], Any], prompts: Sequence[Prompts], of_group: Sequence[int], rows: Sequence[Any]
) -> list[Any]:
    """Returns `inputs` or `media` of each sequence, or of its prompt. Empty if none has any."""
    if not getattr(prompts[0], name) and all(getattr(row, name) is None for row in rows):
        return []
    of_prompts = [found[0] if (found := getattr(prompt, name)) else empty() for prompt in prompts]
    own = [getattr(row, name) for row in rows]
    return [of_prompts[p] if shown is None else shown for p, shown in zip(of_group, own, strict=True)]


def trajectory_metrics(groups: Sequence[ScoredGroup]) -> dict[str, float]:
    """Returns the fraction of trajectories per stop reason and the means of their metrics."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    reasons = Counter(trajectory.stop_reason for trajectory in trajectories)
    metrics = {f"rollout/stop_{reason}": reasons[reason] / len(trajectories) for reason in get_args(StopReason)}
    for name in sorted({name for trajectory in trajectories for name in trajectory.metrics}):
        values = [trajectory.metrics[name] for trajectory in trajectories if name in trajectory.metrics]
        metrics[f"rollout/{name}"] = mean(values)
    return metrics


class RolloutStalledError(RuntimeError):
    """Raised if the engine, rewards, and environments made no progress for `stall_timeout` seconds."""


class Collection:
    """Samples and scores the groups of P tasks. Created by `RolloutSampler.collect`; starts immediately.

    If the completions are `trained` on, requests must use the tasks' sampling distribution.
    """

    def __init__(self, sampler: Any, tasks: Sequence[Task], *, trained: bool = False) -> None:
        self.tasks = list(tasks)
        self.sampling = self.tasks[0].sampling
        self.retried = 0  # failed trajectories that were retried
        self.failed = 0  # trajectories that failed after all retries
        self._sampler = sampler
        self._engine = sampler.data.engine
        self._episode = sampler.data.episode
        self._trained = trained
        self._asked = dict[GenerationRequest, None]()  # pending, in order
        self._playing = set(range(len(self.tasks)))
        self._scoring = set[int]()
        self._turns = 0
        self._moved = time.monotonic()
        self._begun = self._generated = self._scored = time.perf_counter()
        self._stopped = False
        self.task: asyncio.Task[Any] | None = None
        self._future = sampler.loop.submit(self._collect())

    @property
    def metrics(self) -> dict[str, float]:
        """Seconds of generation, and of scoring after generation; number of retries of multi-turn episodes."""
        late = max(self._scored - self._generated, 0.0)
        retried = {"rollout/retried": float(self.retried)} if self._episode.multi_turn else {}
        return {"time/generate": self._generated - self._begun, "time/score": late, **retried}

    def progress(self) -> tuple[int, int, str]:
        """(finished prompts, total prompts, activity). Thread-safe."""
        asked, scoring = len(self._asked), len(self._scoring)
        working = [f"{scoring} being scored"] if scoring else []
        if self._episode.multi_turn:
            playing = max(self._episode.playing - asked, 0)
            turns = f"{self._turns} turns, {asked} waiting for the engine, {playing} environments running"
            working.insert(0, turns)
        return len(self.tasks) - len(self._playing) - scoring, len(self.tasks), ", ".join(working)

    def finish(self) -> list[ScoredGroup]:
        """Waits for all groups and returns them in the order of the tasks. An error or Ctrl-C cancels them."""
        release_threads()
        try:
            with _quick_switches() if self._episode.multi_turn else contextlib.nullcontext():
                return self._future.result()
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Cancels unfinished groups once. A second cancellation would interrupt the cleanup of episodes."""
        if not self._stopped:
            self._stopped = True
            self._future.cancel()

    # ---- on the event loop -------------------------------------------------------------------------------------

    async def _collect(self) -> list[ScoredGroup]:
        self.task = asyncio.current_task()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        groups = asyncio.ensure_future(all_of(self._group(number) for number in range(len(self.tasks))))
        # Futures that end the rollout by raising.
        watchers: list[asyncio.Future[Any]] = [self._broken]
        if self._sampler.data.stall_timeout is not None:
            watchers.append(asyncio.ensure_future(self._watch(self._sampler.data.stall_timeout)))
        try:
            done, _ = await asyncio.wait({groups, *watchers}, return_when=asyncio.FIRST_COMPLETED)
            for watcher in done - {groups}:
                watcher.result()
            return groups.result()
        finally:
            self._stopped = True
            for each in (groups, *watchers):
                each.cancel()
            await asyncio.gather(groups, *watchers, return_exceptions=True)

    async def _group(self, number: int) -> ScoredGroup:
        task = self.tasks[number]
        trajectories = await self._attempts(task)
        self._playing.discard(number)
        self._scoring.add(number)
        self._moved = time.monotonic()
        scores = await self._score(number, trajectories)
        self._scoring.discard(number)
        self._moved = time.monotonic()
        self._scored = time.perf_counter()
        return ScoredGroup(task.prompt, trajectories, scores)

    async def _attempts(self, task: Task) -> list[Trajectory]:
        """Returns the group's trajectories after at most `max_retries` retries of failed ones."""
        trajectories = await self._run(task)
        for retry in range(1, self._episode.max_retries + 1):
            failed = [i for i, t in enumerate(trajectories) if t.failed]
            if not failed:
                break
            self.retried += len(failed)
            attempts = tuple(task.attempts[i] for i in failed)
            again = await self._run(replace(task, attempts=attempts, retry=retry))
            for i, trajectory in zip(failed, again, strict=True):
                trajectories[i] = trajectory
        return trajectories

    async def _run(self, task: Task) -> list[Trajectory]:
        """Returns a trajectory per attempt and counts each when it ends."""
        counted = set[int]()

        def ended(trajectory: Trajectory) -> None:
            counted.add(id(trajectory))
            self._count(task, trajectory)

        trajectories = await self._episode.run(replace(task, ended=ended), self._ask)
        _check_trajectories(type(self._episode).__name__, task, trajectories)
        for trajectory in trajectories:
            if id(trajectory) not in counted:
                self._count(task, trajectory)
        return list(trajectories)

    def _count(self, task: Task, trajectory: Trajectory) -> None:
        """Raises an error if more than `max_failed` of the trajectories failed after all retries."""
        episode = self._episode
        if not trajectory.failed or task.retry < episode.max_retries:
            return
        self.failed += 1
        wanted = sum(len(each.attempts) for each in self.tasks)
        if self.failed > episode.max_failed * wanted:
            raise EnvironmentFailedError(
                f"max_failed={episode.max_failed:g} ({type(episode).__name__}): {self.failed} of {wanted} trajectories "
                f"of a rollout failed, each {1 + episode.max_retries} times, for reasons unrelated to the policy. Fix "
                f"the last failure, of {task.name}: {trajectory.failure}{trajectory.raised_at}"
            )

    async def _ask(self, request: GenerationRequest) -> CompletionGroup:
        """Sends a request to the engine. Canceling the coroutine cancels the request."""
        if self._trained and request.trained and request.sampling is not self.sampling:
            self._check_asked(request.sampling)
        if request.sampling.extra != self.sampling.extra:  # requested by a program, which receives the error
            self._engine.check_request(request)
        if request.media:
            self._sampler.data.host.show([request])
        self._asked[request] = None
        self._moved = time.monotonic()
        try:
            group = await self._generate(request)
        except Exception as error:  # the episode might handle it
            if not self._broken.done():
                self._broken.set_exception(error)
            raise
        finally:
            del self._asked[request]
            self._moved, self._generated = time.monotonic(), time.perf_counter()
        self._turns += 1
        return group

    async def _generate(self, request: GenerationRequest) -> CompletionGroup:
        return await self._engine.generate(request)

    def _check_asked(self, sampling: SamplingParams) -> None:
        """Rejects a request whose sampling distribution differs from the one that the trainer scores."""
        for name in ("temperature", "fire_temperature", "min_new_tokens"):
            own, ours = getattr(sampling, name), getattr(self.sampling, name)
            if own != ours and (name == "temperature" or sampling.masked_tokens > self.sampling.masked_tokens):
                raise ValueError(
                    f"sampling.{name}={own}: {type(self._episode).__name__} requests it, but the run trains with "
                    f"{ours}. Use `task.sampling`; only limits and stop strings may differ between requests."
                )
        self._engine.check_sampling(sampling, trained=True)

    async def _score(self, number: int, trajectories: list[Trajectory]) -> Scores | None:
        """Scores the trajectories that did not fail. Reward functions receive copies."""
        scorer, prompt = self._sampler.data.scorer, self.tasks[number].prompt
        if scorer is None:
            return None
        places = [i for i, t in enumerate(trajectories) if not t.failed]
        sound = [trajectories[i] for i in places]
        if not sound:
            return Scores([], {name: [] for name in scorer.names}).spread([], len(trajectories))
        columns = {name: [values[0]] * len(sound) for name, values in prompt.columns.items()}
        if any(trajectory.messages for trajectory in sound):
            columns["messages"] = [[dict(message) for message in trajectory.messages] for trajectory in sound]
        media: dict[str, list[Any]] | None = None
        if prompt.media or any(row.media for trajectory in sound for row in trajectory.rows):
            of_prompt = prompt.media[0] if prompt.media else Media()
            shown = [of_prompt if (last := t.rows[-1].media) is None else last for t in sound]
            media = {name: [getattr(one, name) for one in shown] for name in MEDIA}
        future = scorer.submit(
            prompts=[prompt.texts[0]] * len(sound),
            completions=[trajectory.completion for trajectory in sound],
            completion_ids=[trajectory.sampled_ids for trajectory in sound],
            columns=columns,
            group_ids=[number] * len(sound),
            media=media,
        )
        scores = await asyncio.wrap_future(future)
        return scores.spread(places, len(trajectories))

    async def _watch(self, timeout: float) -> None:
        """Raises an error after `timeout` seconds without progress."""
        while (left := max(self._moved, self._engine.moved) + timeout - time.monotonic()) > 0:
            await asyncio.sleep(left)
        message = f"stall_timeout={timeout:g}: no progress for that many seconds. Waiting for {self._waited_for()}."
        log.error(message)
        raise RolloutStalledError(f"{message} Increase stall_timeout (or set it to null) if this is expected.")

    def _waited_for(self) -> str:
        waited = []
        if self._asked:
            first = next(iter(self._asked)).name
            waited.append(f"engine {type(self._engine).__name__} ({len(self._asked)} requests, the first for {first})")
        elif self._playing:
            first = self.tasks[min(self._playing)].name
            name = type(self._episode).__name__
            waited.append(f"episodes {name} ({len(self._playing)} groups, the first of {first})")
        if self._scoring and self._sampler.data.scorer is not None:
            first, names = self.tasks[min(self._scoring)].name, ", ".join(self._sampler.data.scorer.names)
            waited.append(f"reward functions {names} ({len(self._scoring)} groups, the first of {first})")
        return " and ".join(waited)


def _check_trajectories(episode: str, task: Task, trajectories: Sequence[Trajectory]) -> None:
    """Raises a ValueError unless there is one trajectory per attempt, with a finite log-prob for each token."""
    if len(trajectories) != len(task.attempts):
        raise ValueError(
            f"{episode}.run: returned {len(trajectories)} trajectories for {task.name}. Return one for each of the "
            f"{len(task.attempts)} attempts."
        )
    for row in (row for trajectory in trajectories for row in trajectory.rows):
        if len({len(each) for each in (row.token_ids, row.turn_ids, row.logprobs, row.policy_versions)}) > 1:
            raise ValueError(f"{episode}.run: fields of a row of {task.name} have different lengths. Align them.")
        if not math.isfinite(sum(row.logprobs)):
            raise ValueError(
                f"{episode}.run: {task.name}: a log-prob is not finite. The weights are not finite, or the dtype's "
                "range is too small. Use bfloat16 or float32."
            )


@contextlib.contextmanager
def _quick_switches() -> Iterator[None]:
    """Sets the thread switch interval to `SWITCH_SECONDS`."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(before)
