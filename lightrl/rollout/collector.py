"""Runs the episodes of a rollout, drives the engine that they ask, and has each group scored when it is done.

Three parties work at once. Episodes run on one event loop in the background. They put requests into a queue, from which
`Engine.generate` takes between its steps: in the calling thread where the engine computes in this process, else in a
thread of its own. A group whose last trajectory is done goes to the reward functions, and then to whoever waits for it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import logging
import math
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from lightning.pytorch.utilities import rank_zero_info

from lightrl.engines.background import BackgroundLoop, in_background
from lightrl.engines.base import (
    Engine,
    EngineDiedError,
    EngineRestartedError,
    GenerationCancelledError,
    RequestQueue,
)
from lightrl.environments.base import EnvironmentFailedError
from lightrl.environments.episodes import Episode, Task
from lightrl.records import (
    Completion,
    CompletionGroup,
    GenerationRequest,
    Media,
    SamplingParams,
    Scores,
    Trajectory,
)
from lightrl.rewards.scorer import RewardScorer, ScoreHandle
from lightrl.rollout.collation import ScoredGroup

log = logging.getLogger(__name__)

MAX_RESTARTS = 3
"""Times a `restart_engine` engine may die within one rollout."""

PROGRESS_SECONDS = 10.0
"""How often a rollout of several turns says how far it is where there is no progress bar."""

BAR_SECONDS = 1.0
"""How often the progress bar shows it."""

LEAVE_SECONDS = 5.0
"""How long the end of a run waits for a background thread to leave the engine, and for episodes to clean up."""

SWITCH_SECONDS = 5e-4
"""How long the engine's Python and that of episodes hold the interpreter while the other waits, where both run in this
process. Python's own 5 ms are a third of a small model's step, and a turn changes threads several times."""

SLICE = 0.5
"""Seconds of one wait: a Ctrl-C that comes just before a wait does not end it, but the next slice does."""


class RolloutStalledError(RuntimeError):
    """Neither engine nor rewards nor environments made progress for `stall_timeout` seconds."""


def may_restart(error: EngineRestartedError, restarts: int, world_size: int) -> int:
    """Counts a restart of the engine.

    Raises:
        EngineDiedError: there were too many, or there are several ranks: a push is collective, others are elsewhere.
    """
    if world_size > 1:
        raise EngineDiedError(f"{error} restart_engine works with one process only.") from error
    if restarts == MAX_RESTARTS:
        raise EngineDiedError(
            f"The engine died {restarts + 1} times in one rollout: look for what kills it (memory, a driver), "
            "restarting does not help."
        ) from error
    return restarts + 1


class _ObservedQueue(RequestQueue):
    """Tells when the engine looks for requests, which it does between its steps."""

    def __init__(self, requests: Sequence[GenerationRequest], *, closed: bool, looked: Callable[[], None]) -> None:
        super().__init__(requests, closed=closed)
        self._looked = looked

    def take(self, wait: bool) -> list[GenerationRequest]:
        self._looked()
        return super().take(wait)


@dataclass(eq=False)
class Collector:
    """Makes `Collection`s for one run.

    Args:
        engine: what samples.
        episode: how attempts come about.
        scorer: reward functions; None where there are none.
        ready: pushes the weights to a started engine. Collective.
        world_size: number of processes.
        stall_timeout: seconds without any progress after which a rollout fails; None waits for ever.
        show: shows how far a rollout of several turns is, "" at its end; False is that it cannot, and the log says it.
        asks_with_media: Called with every request that has media before the engine gets it, in the episodes' thread.
    """

    engine: Engine
    episode: Episode
    scorer: RewardScorer | None
    _: KW_ONLY
    ready: Callable[[], object]
    world_size: int
    stall_timeout: float | None
    show: Callable[[str], bool] = lambda text: False
    asks_with_media: Callable[[GenerationRequest], None] = lambda request: None
    loop: BackgroundLoop = field(default_factory=lambda: BackgroundLoop("lightrl-episodes"), init=False)
    _live: list[Collection] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.loop.on_end = self._lost

    def _lost(self) -> None:
        """Fails what is under way, in the thread of the episodes, which ends."""
        error = RuntimeError(
            f"The event loop of the episodes broke off ({sys.exc_info()[1]!r}): an environment or program closed its "
            "files or its selector. Leave those that it did not open itself."
        )
        for collection in self._live:
            collection.fail(error)

    def start(self, tasks: Sequence[Task], **how: Any) -> Collection:
        """Starts the episodes of P tasks.

        Args:
            tasks: the prompts, at least one.
            how: further arguments of `Collection`.
        """
        self._live = [collection for collection in self._live if not collection.exhausted]
        collection = Collection(self, tasks, **how)
        self._live.append(collection)
        collection.begin()
        return collection

    def close(self, timeout: float = LEAVE_SECONDS) -> bool:
        """Gives up what is under way and ends the threads, in about `timeout` seconds.

        Returns:
            whether a thread is stuck in the engine.
        """
        end = time.monotonic() + timeout
        for collection in self._live:
            collection.stop(max(end - time.monotonic(), 0.0))
        stuck = any(collection.stuck for collection in self._live)
        unfinished = [coroutine for collection in self._live for coroutine in collection.unfinished]
        self._live = []
        if unfinished:  # cancelled by now: they free what they hold, which a second cancellation would cut short
            left = max(end - time.monotonic() - 0.5, 0.5)
            with contextlib.suppress(concurrent.futures.TimeoutError):  # one blocks the loop
                self.loop.submit(_wait_for(unfinished, left)).result(left + 0.1)
        try:
            self.loop.close(self.episode.close, max(end - time.monotonic(), 0.5))
        except concurrent.futures.TimeoutError:  # Python 3.10 has another TimeoutError
            log.warning("An episode did not end within %g seconds and was left behind.", timeout)
        return stuck


@dataclass
class _Progress:
    """Where the groups of a collection are, by number, and when something last moved."""

    running: set[int]
    scoring: set[int] = field(default_factory=set)
    moved: float = field(default_factory=time.monotonic)


class Collection:
    """The groups of P tasks while they are sampled and scored. Made by `Collector.start`.

    Args:
        collector: that starts it. tasks: the prompts, at least one.
        recover: push the weights to an engine that restarted and go on, in the thread that waits for groups; False
            raises, as a thread must that runs while the weights move.
        begun: what was sampled before, by `_key` of the requests, which go on from there; None for a collection that
            will not be suspended.
        trained: whether the completions are trained on. Requests must then have the sampling distribution of the tasks.

    Attributes:
        sampling: settings of the tasks.
        groups: number of the task -> its group, as far as they are done.
        retried: attempts that failed and were made again.
        failed: attempts that failed for good.
        sampled: what was sampled so far, by `_key` of the request; empty where it will not be suspended.
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
        self._trained = trained
        self.groups: dict[int, ScoredGroup] = {}
        self.retried = 0
        self.failed = 0
        self.sampled: dict[int, list[Completion]] = dict(begun or {})
        self._keeps = begun is not None
        self._suspended = False
        self._collector = collector
        self._engine = collector.engine
        self._loop = collector.loop
        self._recover = recover
        self._progress = _Progress(set(range(len(self.tasks))))
        self._asked: dict[GenerationRequest, asyncio.Future[CompletionGroup]] = {}
        self._latest: dict[asyncio.Future[CompletionGroup], GenerationRequest] = {}  # the same, the other way round
        self._lock = threading.Lock()  # for the queue and what was asked, which the loop and the driver share
        self._queue: RequestQueue = _ObservedQueue([], closed=False, looked=self._moved)
        self._news: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._coroutines: list[asyncio.Task[None]] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._thread: threading.Thread | None = None
        self._begun_all = False  # no request will come that is not there
        self._driven = False
        self._taken = 0
        self._turns = 0
        self._restarts = 0
        self._begun = time.perf_counter()
        self._generated = self._begun
        self._scored = self._begun

    def begin(self) -> None:
        """Starts every episode, in order, and the engine where it runs beside this thread."""
        self._loop.run(self._begin())
        if self._engine.concurrent:
            self._drive_beside()

    async def _begin(self) -> None:
        self._coroutines = [asyncio.ensure_future(self._group(number)) for number in range(len(self.tasks))]
        await asyncio.sleep(0)  # each has run up to its first wait: requests that can be made at once are there
        if not self._collector.episode.multi_turn:
            with self._lock:
                self._begun_all = True
                self._queue.close()
        if self._collector.stall_timeout is not None:
            self._watchers.append(asyncio.ensure_future(self._watch(self._collector.stall_timeout)))
        if self._collector.episode.multi_turn:
            self._watchers.append(asyncio.ensure_future(self._tell()))

    # ---- waiting for groups ------------------------------------------------------------------------------------

    @property
    def exhausted(self) -> bool:
        """Whether every group has been handed out."""
        return self._taken == len(self.tasks)

    @property
    def seconds(self) -> dict[str, float]:
        """What generation took, and scoring beyond it."""
        late = max(self._scored - self._generated, 0.0)
        return {"time/generate": self._generated - self._begun, "time/score": late}

    def next(self) -> list[int]:
        """Numbers of the groups that were scored since the last call; waits for one, then takes all that are there.

        An engine in this process samples now, all of them, in this thread.
        """
        numbers: list[int] = []
        try:
            while not numbers and not self.exhausted:
                if not self._driven:
                    self._driven = True
                    with _quick_switches() if self._collector.episode.multi_turn else contextlib.nullcontext():
                        self._drive()
                numbers = self._hear(self._wait())
                while not self._news.empty():
                    numbers += self._hear(self._news.get())
        except BaseException:
            self.stop(LEAVE_SECONDS / 2)  # the end of the run, which comes next, waits for what is left of it
            raise
        self._taken += len(numbers)
        if self.exhausted and self._collector.episode.multi_turn:
            self._collector.show("")
        if self.exhausted and self._thread is not None:
            self._thread.join()  # it is about to leave the engine, which others may use from now on
        return sorted(numbers)

    def finish(self) -> list[ScoredGroup]:
        """All groups, in the order of the tasks; waits for them."""
        while not self.exhausted:
            self.next()
        return [self.groups[number] for number in range(len(self.tasks))]

    def _wait(self) -> int | BaseException:
        while True:
            with contextlib.suppress(queue.Empty):
                return self._news.get(timeout=SLICE)

    def _hear(self, news: int | BaseException) -> list[int]:
        if isinstance(news, int):
            return [news]
        if not (self._recover and isinstance(news, EngineRestartedError)):
            raise news
        self._restarts = may_restart(news, self._restarts, self._collector.world_size)
        with self._lock:
            if self._error is not None:  # the next news: nothing is to be asked again
                return []
            self._queue = self._new_queue()
        log.warning("%s Pushing the weights and asking again for %d lost requests.", news, len(self._asked))
        self._collector.ready()
        self._moved()
        if self._engine.concurrent:
            self._drive_beside()
        else:
            self._driven = False
        return []

    def suspend(self) -> None:
        """Has the engine leave off, in the middle of completions, until `resume`; waits until it has."""
        with self._lock:
            self._queue.suspend()
            self._suspended = True
        if self._thread is not None:
            self._thread.join()

    def resume(self) -> None:
        """Has the engine go on with what `suspend` left, by the weights that it has now."""
        with self._lock:
            if not self._suspended or self._error is not None:
                return
            for request in list(self._asked):
                self._replace(request, self._continued(request))
            self._suspended = False
            self._queue = self._new_queue()
        self._moved()
        if self._asked or not self._queue.closed:
            self._drive_beside()

    def _continued(self, request: GenerationRequest) -> GenerationRequest:
        """The same request with what was sampled of it so far."""
        if not self._keeps:
            return request
        begun = self.sampled.get(_key(request), [])
        return replace(request, begun=begun) if begun else request

    def _replace(self, request: GenerationRequest, other: GenerationRequest) -> None:
        future = self._asked.pop(request)
        self._asked[other], self._latest[future] = future, other

    def stop(self, timeout: float = LEAVE_SECONDS) -> None:
        """Gives up: ends the episodes, cancels their requests, and waits so many seconds for the engine to be left."""
        if not self.exhausted:
            self.fail(GenerationCancelledError("This rollout was given up."))
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    @property
    def unfinished(self) -> list[asyncio.Task[None]]:
        """Groups that are not over, and can be."""
        return [each for each in self._coroutines if not each.done() and not each.get_loop().is_closed()]

    @property
    def stuck(self) -> bool:
        """Whether a thread is still in the engine."""
        return self._thread is not None and self._thread.is_alive()

    # ---- the engine's side -------------------------------------------------------------------------------------

    def _new_queue(self) -> RequestQueue:
        """A queue of all that is asked and not answered."""
        closed = not (self._collector.episode.multi_turn and self._progress.running)
        return _ObservedQueue([r for r in self._asked if r.live], closed=closed, looked=self._moved)

    def _drive_beside(self) -> None:
        self._driven = True
        self._thread = in_background(self._drive, "lightrl-sampling")

    def _drive(self) -> None:
        """Has the engine answer requests until the last episode is over. What goes wrong is news, Ctrl-C apart."""
        try:
            answers: Any = self._engine.generate(self._queue)
            try:
                for answer in answers:
                    self._answer(answer)
            finally:  # a failed run's traceback would keep an open one, and the engine would go on
                if hasattr(answers, "close"):
                    answers.close()
            if self._unanswered() and self._error is None:
                raise RuntimeError(
                    f"{type(self._engine).__name__} ended without answering {len(self._asked)} requests."
                )
        except EngineRestartedError as error:
            self._news.put(error)
        except Exception as error:
            self.fail(error)
        self._generated = time.perf_counter()

    def _answer(self, answer: CompletionGroup) -> None:
        _refuse_other_answers(type(self._engine).__name__, answer)
        if self._keeps:
            self.sampled[_key(answer.request)] = answer.completions
        self._moved()
        if answer.suspended:
            return
        with self._lock:
            future = self._asked.pop(answer.request, None)
        self._turns += 1
        if future is not None:  # else it was cancelled meanwhile
            self._loop.call(_settle, future, answer)

    def _unanswered(self) -> bool:
        """Whether the engine left requests that it should have answered."""
        with self._lock:  # `suspend` may be half-way
            return not self._suspended and any(self._continued(request).live for request in self._asked)

    def _moved(self) -> None:
        self._progress.moved = time.monotonic()

    def fail(self, error: BaseException) -> None:
        """Ends everything, with the first error as the cause. Any thread may call it."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            self._queue.stop()
        self._news.put(error)
        self._loop.call(self._cancel)

    def _cancel(self) -> None:
        for coroutine in (*self._coroutines, *self._watchers):
            coroutine.cancel()

    # ---- the episodes' side, on the event loop -----------------------------------------------------------------

    async def ask(self, request: GenerationRequest) -> CompletionGroup:
        """Has the engine complete a request. Cancelling it cancels the request."""
        future: asyncio.Future[CompletionGroup] = asyncio.get_running_loop().create_future()
        if self._trained and request.sampling is not self.sampling:
            self._check_asked(request.sampling)
        if request.media:
            self._collector.asks_with_media(request)
        with self._lock:
            if self._error is not None:
                raise asyncio.CancelledError
            if self._begun_all:
                raise ValueError(
                    f"{type(self._collector.episode).__name__} asks for {request.name} after its first wait, although "
                    "its multi_turn is False, which promises that all is asked for before: set multi_turn = True."
                )
            asked = self._continued(request)
            if asked.begun and not any(part.finish_reason == "suspended" for part in asked.begun):
                return CompletionGroup(
                    request, asked.begun, min(v for part in asked.begun for v in part.policy_versions)
                )
            self._asked[asked], self._latest[future] = future, asked
            if asked.live and not self._suspended:
                self._queue.put(asked)
        self._moved()
        try:
            return await future
        finally:
            with self._lock:
                asked = self._latest.pop(future)
                if self._asked.pop(asked, None) is not None:
                    self._queue.cancel(asked)

    def _check_asked(self, sampling: SamplingParams) -> None:
        """Rejects a request whose tokens the trainer would score with the settings of the tasks, and wrongly."""
        for name in ("temperature", "fire_temperature", "min_new_tokens"):
            own, ours = getattr(sampling, name), getattr(self.sampling, name)
            if own != ours and (name == "temperature" or sampling.masked_tokens > self.sampling.masked_tokens):
                raise ValueError(
                    f"sampling.{name}={own}: {type(self._collector.episode).__name__} asks for it, but the run trains "
                    f"with {ours}. Keep `task.sampling`; only limits and stops may differ between requests."
                )
        self._engine.check_sampling(sampling, trained=True)

    async def _group(self, number: int) -> None:
        try:
            task = self.tasks[number]
            trajectories = await self._attempts(task)
            self._progress.running.discard(number)
            self._progress.scoring.add(number)
            self._moved()
            if not self._progress.running:
                with self._lock:
                    self._queue.close()
            self.groups[number] = ScoredGroup(task.prompt, trajectories, await self._score(number, trajectories))
            self._progress.scoring.discard(number)
            self._moved()
            self._scored = time.perf_counter()
            if len(self.groups) == len(self.tasks):
                for watcher in self._watchers:
                    watcher.cancel()
            self._news.put(number)
        except asyncio.CancelledError:
            if self._error is None:  # nobody here did: what was awaited cancelled itself
                name = self.tasks[number].name
                self.fail(RuntimeError(f"{name}: its environment, program or reward function was cancelled."))
            raise
        except Exception as error:
            self.fail(error)
        except BaseException as error:  # SystemExit and the like would end the loop of all groups
            name = self.tasks[number].name
            self.fail(RuntimeError(f"{name}: its episode raised {type(error).__name__}: {error}"))

    async def _attempts(self, task: Task) -> list[Trajectory]:
        """The group's trajectories; those that failed are made again within bounds."""
        trajectories = await self._run(task)
        for retry in range(1, self._collector.episode.max_retries + 1):
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
        """A trajectory per attempt; each is counted as soon as it is over."""
        episode, counted = self._collector.episode, set[int]()

        def ended(trajectory: Trajectory) -> None:
            counted.add(id(trajectory))
            self._count(task, trajectory)

        trajectories = await episode.run(replace(task, ended=ended), self.ask)
        _refuse_other_trajectories(type(episode).__name__, task, trajectories)
        for trajectory in trajectories:
            if id(trajectory) not in counted:
                self._count(task, trajectory)
        return list(trajectories)

    def _count(self, task: Task, trajectory: Trajectory) -> None:
        """Ends the rollout when more attempts have failed for good than may."""
        episode = self._collector.episode
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

    async def _score(self, number: int, trajectories: list[Trajectory]) -> Scores | None:
        """What the reward functions say of the trajectories that did not fail."""
        scorer = self._collector.scorer
        if scorer is None:
            return None
        sound = [i for i, t in enumerate(trajectories) if not t.failed]
        count = len(trajectories)
        if not sound:
            return Scores([], {name: [] for name in scorer.names}).spread([], count)
        scores = await _submit(scorer, self.tasks[number], number, [trajectories[i] for i in sound])
        return scores.spread(sound, count)

    async def _watch(self, timeout: float) -> None:
        """Fails the rollout when nothing has moved for `timeout` seconds."""
        while (left := self._progress.moved + timeout - time.monotonic()) > 0 or self._suspended:
            await asyncio.sleep(max(left, SLICE))
        message = f"Nothing moved for stall_timeout={timeout:g} seconds. Waiting for {self._waited_for()}."
        log.error(message)  # also where a stuck engine in this process keeps the error from being raised
        self.fail(RolloutStalledError(f"{message} Raise stall_timeout (null: never) if that is no fault."))

    async def _tell(self) -> None:
        """Logs from time to time how far the rollout is, and what is at work."""
        told = self._begun
        while True:
            await asyncio.sleep(min(BAR_SECONDS, PROGRESS_SECONDS))
            asked, now = len(self._asked), time.perf_counter()
            text = (
                f"{len(self.groups)} of {len(self.tasks)} groups done, {self._turns} turns; now {asked} turns wait for "
                f"the engine, {max(self._collector.episode.playing - asked, 0)} environments work, "
                f"{len(self._progress.scoring)} groups are scored"
            )
            if not self._collector.show(text) and now - told >= PROGRESS_SECONDS:
                rank_zero_info(f"Rollout, {now - self._begun:.0f} s: {text}.")
                told = now

    def _waited_for(self) -> str:
        asked = list(self._asked)
        names = [] if self._collector.scorer is None else self._collector.scorer.names
        scoring = [self.tasks[number].name for number in sorted(self._progress.scoring)]
        running = [self.tasks[number].name for number in sorted(self._progress.running)]
        waited = []
        if asked:
            first = asked[0].name
            waited.append(f"engine {type(self._engine).__name__} ({len(asked)} requests, the first for {first})")
        elif running:
            name = type(self._collector.episode).__name__
            waited.append(f"episodes {name} ({len(running)} groups, the first of {running[0]})")
        if scoring:
            waited.append(f"reward functions {', '.join(names)} ({len(scoring)} groups, the first of {scoring[0]})")
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


def _refuse_other_answers(engine: str, answer: CompletionGroup) -> None:
    """Raises a ValueError for completions that are not what `Engine.generate` promises, which names the engine."""
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
        _refuse_not_finite(f"{engine}.generate: a completion of {request.name}", part.logprobs)


def _refuse_not_finite(whose: str, logprobs: Sequence[float]) -> None:
    if math.isfinite(sum(logprobs)):
        return
    place = next(place for place, value in enumerate(logprobs) if not math.isfinite(value))
    raise ValueError(
        f"{whose} has the log-prob {logprobs[place]} at its token {place}, with which no loss can be computed. Weights "
        "that are not finite give such ones, or a dtype whose range is too small: try bfloat16 or float32."
    )


def _refuse_other_trajectories(episode: str, task: Task, trajectories: Any) -> None:
    """Raises a ValueError for what is not a trajectory per attempt with aligned rows, which names the episode."""
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
        _refuse_not_finite(f"{episode}.run: a row of {task.name}", row.logprobs)


async def _wait_for(tasks: Sequence[asyncio.Task[None]], seconds: float) -> None:
    await asyncio.wait(tasks, timeout=seconds)


def _key(request: GenerationRequest) -> int:
    """What tells a request from others of its rollout: of its seed and prompt, since an attempt that is made again asks
    with the same seed, but after another answer of its environment."""
    text = f"{request.seed}/{request.num_completions}/{request.token_ids}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _settle(future: asyncio.Future[CompletionGroup], answer: CompletionGroup) -> None:
    if not future.done():
        future.set_result(answer)


def _submit(scorer: RewardScorer, task: Task, number: int, trajectories: Sequence[Trajectory]) -> ScoreHandle:
    """Starts scoring trajectories of one group; functions get copies of what the rollout is made of."""
    count, prompt = len(trajectories), task.prompt
    columns = {name: [values[0]] * count for name, values in prompt.columns.items()}
    if any(trajectory.messages for trajectory in trajectories):
        columns["messages"] = [[dict(message) for message in trajectory.messages] for trajectory in trajectories]
    media: dict[str, list[Any]] | None = None
    if prompt.media or any(row.media for trajectory in trajectories for row in trajectory.rows):
        of_prompt = prompt.media[0] if prompt.media else Media()
        lasts = [trajectory.rows[-1].media for trajectory in trajectories]
        shown = [of_prompt if last is None else last for last in lasts]
        media = {name: [getattr(one, name) for one in shown] for name in ("images", "videos", "audios")}
    return scorer.submit(
        prompts=[prompt.texts[0]] * count,
        completions=[trajectory.completion for trajectory in trajectories],
        completion_ids=[trajectory.sampled_ids for trajectory in trajectories],
        columns=columns,
        group_ids=[number] * count,
        media=media,
    )
