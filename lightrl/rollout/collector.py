"""Runs the episodes of a rollout on one event loop, where they await the engine, and scores each finished group."""

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
"""Times a `restart_engine` engine may die within one rollout."""

LEAVE_SECONDS = 5.0
"""How long the end of a run waits for episodes to clean up."""

SWITCH_SECONDS = 5e-4
"""How long the Python of the engine and of episodes over several turns holds the interpreter while the other waits.
Python's own 5 ms are a third of a small model's step, and a turn changes threads several times."""


def may_restart(error: EngineRestartedError, restarts: int, world_size: int) -> int:
    """Counts a restart of the engine.

    Raises:
        EngineDiedError: there were too many, or there are several ranks, whose pushes are collective.
    """
    if world_size > 1:
        raise EngineDiedError(f"{error} restart_engine works with one process only.") from error
    if restarts == MAX_RESTARTS:
        raise EngineDiedError(
            f"The engine died {restarts + 1} times in one rollout: look for what kills it (memory, a driver), "
            "restarting does not help."
        ) from error
    return restarts + 1


class RolloutStalledError(RuntimeError):
    """Neither engine nor rewards nor environments made progress for `stall_timeout` seconds."""


@dataclass(eq=False)
class Collector:
    """Starts `Collection`s for one run.

    Args:
        engine: samples.
        episode: makes the attempts.
        scorer: reward functions; None without any.
        ready: pushes the weights to the engine. Collective.
        world_size: number of processes.
        stall_timeout: seconds without any progress after which a rollout fails; None waits forever.
        asks_with_media: called in the episodes' thread with every request that has media, before the engine gets it.
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
        """Starts the episodes of P tasks, at least one; `how` are further arguments of `Collection`."""
        self._live = [each for each in self._live if each.task is None or not each.task.done()]
        self._live.append(Collection(self, tasks, **how))
        return self._live[-1]

    def progress(self) -> tuple[int, int, str] | None:
        """Prompts that are done, prompts in all, and what is at work, of the oldest rollout under way."""
        live = (each for each in list(self._live) if each.task is None or not each.task.done())
        return next((each.progress() for each in live), None)

    async def generate(self, request: GenerationRequest) -> CompletionGroup:
        """Has the engine complete a request; repeats it if the engine restarts, once the weights are pushed again."""
        while True:
            try:
                return await self.engine.generate(request)
            except EngineRestartedError as error:
                self.lost = self.lost or error
                await self._pushed.wait()

    def push_again(self) -> None:
        """Pushes the weights to an engine that restarted, which lost requests wait for."""
        log.warning("%s Pushing the weights and repeating the lost requests.", self.lost)
        self.ready()
        self.lost = None
        self.loop.call(self._wake)

    def _wake(self) -> None:
        self._pushed.set()
        self._pushed.clear()

    def close(self, timeout: float = LEAVE_SECONDS) -> None:
        """Ends what is under way, which frees what it holds, and the thread, in about `timeout` seconds."""
        end = time.monotonic() + timeout
        for collection in self._live:
            collection.cancel()
        with contextlib.suppress(concurrent.futures.TimeoutError):  # one blocks the loop
            if self._live:
                self.loop.submit(self._ended()).result(max(timeout - 1, 0.5))
        self._live = []
        try:
            self.loop.close(self.episode.close, max(end - time.monotonic(), 0.5))
        except concurrent.futures.TimeoutError:  # Python 3.10 has another TimeoutError
            log.warning("An episode did not end within %g seconds and was left behind.", timeout)

    async def _ended(self) -> None:
        if tasks := [collection.task for collection in self._live if collection.task is not None]:
            await asyncio.wait(tasks)


class Collection:
    """The groups of P tasks while they are sampled and scored, which begins at once. Made by `Collector.start`.

    Args:
        collector: starts it.
        tasks: the prompts, at least one.
        recover: whether `finish` pushes the weights to an engine that restarted; it raises the error otherwise, as in
            a thread that runs while the weights change.
        begun: what was sampled before, by `_key` of the request, to continue from; None keeps no record.
        trained: whether the completions are trained on. Requests must then have the tasks' sampling distribution.

    Attributes:
        sampling: settings of the tasks.
        retried: attempts that failed and were made again.
        failed: attempts that failed for good.
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
        self._asked: dict[GenerationRequest, int | None] = {}  # under way -> its key, if there is a record
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
        """Time of generation, and of scoring beyond it."""
        late = max(self._scored - self._generated, 0.0)
        return {"time/generate": self._generated - self._begun, "time/score": late}

    def progress(self) -> tuple[int, int, str]:
        """See `Collector.progress`. Any thread may ask."""
        asked, scoring = len(self._asked), len(self._scoring)
        working = [f"{scoring} being scored"] if scoring else []
        if self._episode.multi_turn:
            playing = max(self._episode.playing - asked, 0)
            turns = f"{self._turns} turns, {asked} wait for the engine, {playing} environments work"
            working.insert(0, turns)
        return len(self.tasks) - len(self._playing) - scoring, len(self.tasks), ", ".join(working)

    def finish(self) -> list[ScoredGroup]:
        """Waits for all groups, in the order of the tasks. An error or Ctrl-C ends them."""
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
        """Ends what is under way, once: a second cancellation would cut short how episodes free what they hold."""
        if not self._stopped:
            self._stopped = True
            self._future.cancel()

    def sampled(self) -> dict[int, list[Completion]]:
        """What was sampled so far, by `_key` of the request, for another collection to continue from."""
        if self._future.done():
            return dict(self._record or {})
        run = self._collector.loop.run
        try:
            paused = {group.request: group.completions for group in self._engine.pause()}
        except EngineDiedError:  # a checkpoint at the end of the run keeps what was finished
            return run(self._so_far({}))
        try:
            return run(self._so_far(paused))  # after the answers that are on their way
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
        # Futures that end by raising, which ends the rollout.
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
            was_stopped, self._stopped = self._stopped, True  # the others are cancelled next, by us
            if isinstance(error, asyncio.CancelledError):
                if was_stopped:
                    raise
                what = "its environment, program or reward function was cancelled."
            elif isinstance(error, Exception):
                raise
            else:  # SystemExit and the like would end the loop of all groups
                what = f"its episode raised {type(error).__name__}: {error}"
            raise RuntimeError(f"{task.name}: {what}") from error
        self._scoring.discard(number)
        self._moved = time.monotonic()
        self._scored = time.perf_counter()
        return ScoredGroup(task.prompt, trajectories, scores)

    async def _attempts(self, task: Task) -> list[Trajectory]:
        """The group's trajectories; those that failed are made again within bounds."""
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
        """A trajectory per attempt; each is counted when it is over."""
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
        """Ends the rollout if more attempts have failed for good than may."""
        episode = self._episode
        if not trajectory.failed or task.retry < episode.max_retries:
            return
        self.failed += 1
        wanted = sum(len(each.attempts) for each in self.tasks)
        if self.failed > episode.max_failed * wanted:
            raise EnvironmentFailedError(
                f"{self.failed} of {wanted} trajectories of a rollout failed, each {1 + episode.max_retries} times, "
                f"for reasons that are not the policy's; {type(episode).__name__} allows "
                f"max_failed={episode.max_failed:g}. The last, of {task.name}: {trajectory.failure}"
                f"{trajectory.raised_at}"
            )

    async def _ask(self, request: GenerationRequest) -> CompletionGroup:
        """Has the engine complete a request. Cancelling it cancels the request."""
        if self._trained and request.trained and request.sampling is not self.sampling:
            self._check_asked(request.sampling)
        if request.sampling.extra != self.sampling.extra:  # a wish of a program, which gets to know that it can't be
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
        except Exception as error:  # which the episode may take for its own
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
        """Rejects a request whose tokens the trainer would score with the settings of the tasks, and wrongly."""
        for name in ("temperature", "fire_temperature", "min_new_tokens"):
            own, ours = getattr(sampling, name), getattr(self.sampling, name)
            if own != ours and (name == "temperature" or sampling.masked_tokens > self.sampling.masked_tokens):
                raise ValueError(
                    f"sampling.{name}={own}: {type(self._episode).__name__} asks for it, but the run trains with "
                    f"{ours}. Keep `task.sampling`; only limits and stops may differ between requests."
                )
        self._engine.check_sampling(sampling, trained=True)

    async def _score(self, number: int, trajectories: list[Trajectory]) -> Scores | None:
        """What the reward functions give the trajectories that did not fail; they get copies."""
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
        """Raises when nothing has moved for `timeout` seconds, except while an engine that restarted is waited for."""
        while (left := max(self._moved, self._engine.moved) + timeout - time.monotonic()) > 0 or self._collector.lost:
            await asyncio.sleep(max(left, 0.5))
        message = f"Nothing moved for stall_timeout={timeout:g} seconds. Waiting for {self._waited_for()}."
        log.error(message)
        raise RolloutStalledError(f"{message} Raise stall_timeout (null: never) if that is expected.")

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
    """Threads change places after `SWITCH_SECONDS` while this lasts."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _check_completions(engine: str, answer: CompletionGroup) -> None:
    """Raises a ValueError, which names the engine, for completions that break the promises of `Engine.generate`."""
    request, completions = answer.request, answer.completions
    if len(completions) != request.num_completions:
        raise ValueError(
            f"{engine}.generate: {len(completions)} completions of {request.name}, {request.num_completions} were "
            "asked for."
        )
    for part in completions:
        if len(part.logprobs) != len(part.token_ids):
            raise ValueError(
                f"{engine}.generate: a completion of {request.name} has {len(part.token_ids)} tokens and "
                f"{len(part.logprobs)} logprobs: each token needs its log-probability."
            )
        _check_finite(f"{engine}.generate: a completion of {request.name}", part.logprobs)


def _check_finite(whose: str, logprobs: Sequence[float]) -> None:
    if math.isfinite(sum(logprobs)):
        return
    place = next(place for place, value in enumerate(logprobs) if not math.isfinite(value))
    raise ValueError(
        f"{whose} has the log-prob {logprobs[place]} at its token {place}, with which no loss can be computed. Weights "
        "that are not finite cause it, or a dtype with too small a range: try bfloat16 or float32."
    )


def _check_trajectories(episode: str, task: Task, trajectories: Any) -> None:
    """Raises a ValueError, which names the episode, unless there is a trajectory per attempt with aligned rows."""
    found = trajectories if isinstance(trajectories, list | tuple) else []
    if len(found) != len(task.attempts) or not all(isinstance(one, Trajectory) for one in found):
        what = f"{len(found)} of them" if found else f"a {type(trajectories).__name__}"
        raise ValueError(
            f"{episode}.run gave {what} for {task.name}: it must return a list of Trajectory, one for each of the "
            f"{len(task.attempts)} attempts."
        )
    for row in (row for trajectory in found for row in trajectory.rows):
        sizes = [len(each) for each in (row.token_ids, row.turn_ids, row.logprobs, row.policy_versions)]
        if len(set(sizes)) > 1:
            raise ValueError(
                f"{episode}.run: a row of {task.name} has {sizes[0]} token_ids, {sizes[1]} turn_ids, {sizes[2]} "
                f"logprobs and {sizes[3]} policy_versions: each token needs an entry in all of them."
            )
        _check_finite(f"{episode}.run: a row of {task.name}", row.logprobs)


def _key(request: GenerationRequest) -> int:
    """Identifies a request in its rollout by seed and prompt: an attempt that is made again has the same seed, but
    perhaps another prompt, after another answer of its environment."""
    text = f"{request.seed}/{request.num_completions}/{request.token_ids}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
