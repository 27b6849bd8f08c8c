"""Runs the episodes of a rollout on one event loop and scores each finished group."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from lightrl.engines.background import BackgroundLoop, all_of, patient_result
from lightrl.engines.base import Engine, EngineDiedError, EngineRestartedError
from lightrl.environments.episodes import EnvironmentFailedError, Episode, Task
from lightrl.records import Completion, CompletionGroup, GenerationRequest, Media, SamplingParams, Scores, Trajectory
from lightrl.rewards.scorer import RewardScorer
from lightrl.rollout.collation import ScoredGroup

log = logging.getLogger(__name__)

MAX_RESTARTS = 3
"""Maximum number of engine restarts within one rollout."""

LEAVE_SECONDS = 5.0
"""Time limit for the cleanup of episodes at the end of a run."""

SWITCH_SECONDS = 5e-4
"""Thread switch interval during multi-turn episodes. Python's default of 5 ms is a third of a small model's step, and
each turn switches threads several times."""


def may_restart(error: EngineRestartedError, restarts: int, world_size: int) -> int:
    """Returns `restarts + 1`.

    Raises:
        EngineDiedError: After `MAX_RESTARTS` restarts, or with several ranks, because weight pushes are collective.
    """
    if world_size > 1:
        raise EngineDiedError(f"{error} restart_engine requires a single process.") from error
    if restarts == MAX_RESTARTS:
        raise EngineDiedError(
            f"The engine died {restarts + 1} times in one rollout. Check the log and GPU memory for the cause; "
            "restarting does not help."
        ) from error
    return restarts + 1


class RolloutStalledError(RuntimeError):
    """The engine, rewards, and environments made no progress for `stall_timeout` seconds."""


@dataclass(eq=False)
class Collector:
    """Starts `Collection`s for one run.

    Args:
        engine: Inference engine.
        episode: Episode type that produces trajectories.
        scorer: Reward functions, or None.
        ready: Function that pushes the weights to the engine. Collective.
        world_size: Number of processes.
        stall_timeout: Seconds without progress after which a rollout fails. None waits forever.
        asks_with_media: Function called in the episodes' thread with each request with media before it is sent.
    """

    engine: Engine
    episode: Episode
    scorer: RewardScorer | None
    _: KW_ONLY
    ready: Callable[[], object]
    world_size: int
    stall_timeout: float | None
    asks_with_media: Callable[[GenerationRequest], None] = lambda request: None
    loop: BackgroundLoop = field(default_factory=lambda: BackgroundLoop("lightrl-episodes"), init=False)
    lost: EngineRestartedError | None = field(default=None, init=False)  # until the weights are pushed again
    _pushed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _live: list[Collection] = field(default_factory=list, init=False)

    def start(self, tasks: Sequence[Task], **how: Any) -> Collection:
        """Starts the episodes of P >= 1 tasks. `how` is passed to `Collection`."""
        self._live = [each for each in self._live if each.task is None or not each.task.done()]
        self._live.append(Collection(self, tasks, **how))
        return self._live[-1]

    def progress(self) -> tuple[int, int, str] | None:
        """(finished prompts, total prompts, activity) of the oldest unfinished rollout."""
        live = (each for each in list(self._live) if each.task is None or not each.task.done())
        return next((each.progress() for each in live), None)

    async def generate(self, request: GenerationRequest) -> CompletionGroup:
        """Sends a request to the engine. If the engine restarts, repeats it after the weights are pushed again."""
        while True:
            try:
                return await self.engine.generate(request)
            except EngineRestartedError as error:
                self.lost = self.lost or error
                await self._pushed.wait()

    def push_again(self) -> None:
        """Pushes the weights to a restarted engine and resumes the lost requests."""
        log.warning("%s Pushing the weights and repeating the lost requests.", self.lost)
        self.ready()
        self.lost = None
        self.loop.call(self._wake)

    def _wake(self) -> None:
        self._pushed.set()
        self._pushed.clear()

    def close(self, timeout: float = LEAVE_SECONDS) -> None:
        """Cancels unfinished rollouts and stops the thread within about `timeout` seconds."""
        end = time.monotonic() + timeout
        for collection in self._live:
            collection.cancel()
        with contextlib.suppress(concurrent.futures.TimeoutError):  # an episode blocks the loop
            if self._live:
                self.loop.submit(self._ended()).result(max(timeout - 1, 0.5))
        self._live = []
        try:
            self.loop.close(self.episode.close, max(end - time.monotonic(), 0.5))
        except concurrent.futures.TimeoutError:  # Python 3.10 has another TimeoutError
            log.warning("An episode did not stop within %g seconds; its thread is leaked.", timeout)

    async def _ended(self) -> None:
        if tasks := [collection.task for collection in self._live if collection.task is not None]:
            await asyncio.wait(tasks)


class Collection:
    """Samples and scores the groups of P tasks. Created by `Collector.start`; starts immediately.

    Args:
        collector: The collector that starts it.
        tasks: Tasks, one per prompt, at least one.
        recover: Whether `finish` pushes the weights to a restarted engine. Otherwise it raises the error, as in a
            thread that runs while the weights change.
        begun: Earlier partial completions, by `_key` of the request. None disables recording.
        trained: Whether the completions are trained on. Requests must then use the tasks' sampling distribution.

    Attributes:
        sampling: Sampling settings of the tasks.
        retried: Number of failed trajectories that were retried.
        failed: Number of trajectories that failed after all retries.
    """

    def __init__(
        self,
        collector: Collector,
        tasks: Sequence[Task],
        *,
        recover: bool = True,
        begun: Mapping[int, list[Completion]] | None = None,
        trained: bool = False,
    ) -> None:
        self.tasks = list(tasks)
        self.sampling = self.tasks[0].sampling
        self.retried = 0
        self.failed = 0
        self._collector = collector
        self._engine = collector.engine
        self._episode = collector.episode
        self._recover = recover
        self._trained = trained
        self._record = None if begun is None else dict(begun)
        self._asked: dict[GenerationRequest, int | None] = {}  # pending -> its key, if recorded
        self._playing = set(range(len(self.tasks)))
        self._scoring = set[int]()
        self._turns = 0
        self._moved = time.monotonic()
        self._begun = self._generated = self._scored = time.perf_counter()
        self._stopped = False
        self.task: asyncio.Task[Any] | None = None
        self._future = collector.loop.submit(self._collect())

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of generation, and of scoring after generation."""
        late = max(self._scored - self._generated, 0.0)
        return {"time/generate": self._generated - self._begun, "time/score": late}

    def progress(self) -> tuple[int, int, str]:
        """See `Collector.progress`. Thread-safe."""
        asked, scoring = len(self._asked), len(self._scoring)
        working = [f"{scoring} being scored"] if scoring else []
        if self._episode.multi_turn:
            playing = max(self._episode.playing - asked, 0)
            turns = f"{self._turns} turns, {asked} waiting for the engine, {playing} environments running"
            working.insert(0, turns)
        return len(self.tasks) - len(self._playing) - scoring, len(self.tasks), ", ".join(working)

    def finish(self) -> list[ScoredGroup]:
        """Waits for all groups and returns them in the order of the tasks. An error or Ctrl-C cancels them."""
        collector, restarts = self._collector, 0

        def look() -> None:
            nonlocal restarts
            if (lost := collector.lost) is None:
                return
            if not self._recover:
                collector.lost = None
                raise lost
            restarts = may_restart(lost, restarts, collector.world_size)
            collector.push_again()
            self._moved = time.monotonic()

        try:
            with _quick_switches() if self._episode.multi_turn else contextlib.nullcontext():
                return patient_result(self._future, look)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Cancels unfinished groups once. A second cancellation would interrupt the cleanup of episodes."""
        if not self._stopped:
            self._stopped = True
            self._future.cancel()

    def sampled(self) -> dict[int, list[Completion]]:
        """Returns the completions so far, by `_key` of the request, for another collection to continue."""
        if self._future.done():
            return dict(self._record or {})
        run = self._collector.loop.run
        try:
            paused = {group.request: group.completions for group in self._engine.pause()}
        except EngineDiedError:  # a checkpoint at the end of the run keeps finished completions
            return run(self._so_far({}))
        try:
            return run(self._so_far(paused))  # after pending responses
        finally:
            self._engine.resume()

    async def _so_far(self, paused: Mapping[GenerationRequest, list[Completion]]) -> dict[int, list[Completion]]:
        keys = {key: paused[request] for request, key in self._asked.items() if key is not None and request in paused}
        return (self._record or {}) | keys

    # ---- on the event loop -------------------------------------------------------------------------------------

    async def _collect(self) -> list[ScoredGroup]:
        self.task = asyncio.current_task()
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        groups = asyncio.ensure_future(all_of(self._group(number) for number in range(len(self.tasks))))
        # Futures that end the rollout by raising.
        watchers: list[asyncio.Future[Any]] = [self._broken]
        if self._collector.stall_timeout is not None:
            watchers.append(asyncio.ensure_future(self._watch(self._collector.stall_timeout)))
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
        try:
            trajectories = await self._attempts(task)
            self._playing.discard(number)
            self._scoring.add(number)
            self._moved = time.monotonic()
            scores = await self._score(number, trajectories)
        except BaseException as error:
            was_stopped, self._stopped = self._stopped, True  # the other groups are canceled next
            if isinstance(error, asyncio.CancelledError):
                if was_stopped:
                    raise
                what = "its environment, program or reward function was cancelled."
            elif isinstance(error, Exception):
                raise
            else:  # e.g. SystemExit, which would end the event loop
                what = f"its episode raised {type(error).__name__}: {error}"
            raise RuntimeError(f"{task.name}: {what}") from error
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
            self._collector.asks_with_media(request)
        key = None
        if self._record is not None:
            key = _key(request)
            begun = self._record.get(key, [])
            if begun and all(part.finish_reason != "suspended" for part in begun):
                return CompletionGroup(request, begun, min(v for part in begun for v in part.policy_versions))
            request = replace(request, begun=begun)
        self._asked[request] = key
        self._moved = time.monotonic()
        try:
            group = await self._collector.generate(request)
            _check_completions(type(self._engine).__name__, group)
        except Exception as error:  # the episode might handle it
            if not self._broken.done():
                self._broken.set_exception(error)
            raise
        finally:
            del self._asked[request]
            self._moved, self._generated = time.monotonic(), time.perf_counter()
        self._turns += 1
        if self._record is not None and key is not None:
            versions = map(group.versions, range(len(group.completions)))
            parts = zip(group.completions, versions, strict=True)
            self._record[key] = [replace(part, policy_versions=of_part) for part, of_part in parts]
        return group

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
        scorer, prompt = self._collector.scorer, self.tasks[number].prompt
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
            media = {name: [getattr(one, name) for one in shown] for name in ("images", "videos", "audios")}
        scores = await scorer.submit(
            prompts=[prompt.texts[0]] * len(sound),
            completions=[trajectory.completion for trajectory in sound],
            completion_ids=[trajectory.sampled_ids for trajectory in sound],
            columns=columns,
            group_ids=[number] * len(sound),
            media=media,
        )
        return scores.spread(places, len(trajectories))

    async def _watch(self, timeout: float) -> None:
        """Raises an error after `timeout` seconds without progress, except while a restarted engine is loading."""
        while (left := max(self._moved, self._engine.moved) + timeout - time.monotonic()) > 0 or self._collector.lost:
            await asyncio.sleep(max(left, 0.5))
        message = f"stall_timeout={timeout:g}: no progress for that many seconds. Waiting for {self._waited_for()}."
        log.error(message)
        raise RolloutStalledError(f"{message} Increase stall_timeout (or set it to null) if this is expected.")

    def _waited_for(self) -> str:
        scoring = [self.tasks[number].name for number in sorted(self._scoring)]
        playing = [self.tasks[number].name for number in sorted(self._playing)]
        waited = []
        if self._asked:
            first = next(iter(self._asked)).name
            waited.append(f"engine {type(self._engine).__name__} ({len(self._asked)} requests, the first for {first})")
        elif playing:
            name = type(self._episode).__name__
            waited.append(f"episodes {name} ({len(playing)} groups, the first of {playing[0]})")
        if scoring and self._collector.scorer is not None:
            names = ", ".join(self._collector.scorer.names)
            waited.append(f"reward functions {names} ({len(scoring)} groups, the first of {scoring[0]})")
        return " and ".join(waited)


@contextlib.contextmanager
def _quick_switches() -> Iterator[None]:
    """Sets the thread switch interval to `SWITCH_SECONDS`."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _check_completions(engine: str, answer: CompletionGroup) -> None:
    """Raises a ValueError if completions violate the contract of `Engine.generate`."""
    request, completions = answer.request, answer.completions
    if len(completions) != request.num_completions:
        raise ValueError(
            f"{engine}.generate: returned {len(completions)} completions of {request.name}. Return "
            f"{request.num_completions}, as requested."
        )
    for part in completions:
        if len(part.logprobs) != len(part.token_ids):
            raise ValueError(
                f"{engine}.generate: a completion of {request.name} has {len(part.token_ids)} tokens and "
                f"{len(part.logprobs)} logprobs. Return one log-prob per token."
            )
        _check_finite(f"{engine}.generate: a completion of {request.name}", part.logprobs)


def _check_finite(whose: str, logprobs: Sequence[float]) -> None:
    if math.isfinite(sum(logprobs)):
        return
    place = next(place for place, value in enumerate(logprobs) if not math.isfinite(value))
    raise ValueError(
        f"{whose} has the log-prob {logprobs[place]} at token {place}. The weights are not finite, or the dtype's "
        "range is too small. Use bfloat16 or float32."
    )


def _check_trajectories(episode: str, task: Task, trajectories: Any) -> None:
    """Raises a ValueError unless there is one trajectory per attempt with aligned sequences."""
    found = trajectories if isinstance(trajectories, list | tuple) else []
    if len(found) != len(task.attempts) or not all(isinstance(one, Trajectory) for one in found):
        what = f"{len(found)} of them" if found else f"a {type(trajectories).__name__}"
        raise ValueError(
            f"{episode}.run: returned {what} for {task.name}. Return a list of Trajectory, one for each of the "
            f"{len(task.attempts)} attempts."
        )
    for row in (row for trajectory in found for row in trajectory.rows):
        sizes = [len(each) for each in (row.token_ids, row.turn_ids, row.logprobs, row.policy_versions)]
        if len(set(sizes)) > 1:
            raise ValueError(
                f"{episode}.run: a row of {task.name} has {sizes[0]} token_ids, {sizes[1]} turn_ids, {sizes[2]} "
                f"logprobs, and {sizes[3]} policy_versions. Make all four equally long."
            )
        _check_finite(f"{episode}.run: a row of {task.name}", row.logprobs)


def _key(request: GenerationRequest) -> int:
    """Returns the key of a request in its rollout. A retry has the same seed, but may have a different prompt."""
    text = f"{request.seed}/{request.num_completions}/{request.token_ids}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
