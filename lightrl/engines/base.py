"""The contract of an engine, which owns a copy of the policy's weights and samples from it."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightrl.engines.background import BackgroundLoop, FairLock, in_background
from lightrl.records import CompletionGroup, EngineContext, GenerationRequest, Routes, SamplingParams

TOLERANCE = {"float32": 5e-4, "float16": 0.05, "bfloat16": 0.5}
"""dtype -> largest mean difference of log-probs, in nats per token, that rounding explains between equal weights."""

LEAVE_SECONDS = 2.5
"""How long `close` waits for the driver thread to leave a step."""

_LINGER_SECONDS = 5.0  # how long an idle driver thread waits for requests before it ends


class EngineDiedError(RuntimeError):
    """An engine process is gone. No further sampling is possible until the engine is started again."""


class EngineRestartedError(EngineDiedError):
    """An engine process was gone and runs again without weights: push them, then repeat the lost requests."""


class StaleWeightsError(RuntimeError):
    """The engine would sample with weights that are not the trainer's."""


class ExtraKeys(NamedTuple):
    """Which keys of `SamplingParams.extra` an engine takes.

    Attributes:
        harmless: keys that leave the distribution of each token alone; training takes no others.
        evaluation: further keys for evaluation; None allows all.
        own: keys that LightRL sets itself -> the setting to use.
    """

    harmless: frozenset[str] = frozenset()
    evaluation: frozenset[str] | None = None
    own: Mapping[str, str] = {}


class Engine(ABC):
    """Samples completions from its own copy of the policy.

    An engine whose library is asynchronous implements the abstract methods below. One whose library computes step by
    step derives from `SteppingEngine`. Everything else has a default. YAML names it by its dotted path:
    `data.init_args.engine: my_file.MyEngine`.

    Life: built from YAML without touching a device; `start(context)` on all ranks together after Lightning has set up
    the strategy; then any number of `load_weights` and `generate`; `close()`, which may come twice and before `start`.
    """

    policy_version: int = -1
    """Version of the loaded weights, -1 until the first `load_weights`. Only the engine sets it."""

    dtype: str | None = None
    """Data type of the started engine's weights: "float32", "bfloat16", or "float16"; None if unknown. Checks of
    log-probs then allow the gap of float32 (`WeightSync`) or, with a warning, of bfloat16 (`LogprobMonitor`)."""

    moved: float = 0.0
    """`time.monotonic()` of the last step, for engines with steps: a rollout whose engine steps has not stalled."""

    extra: ExtraKeys = ExtraKeys()
    """Keys of `SamplingParams.extra` that it takes."""

    records_support: bool = False
    """Whether completions come with the IDs that top-p, top-k, and min-p left for each token (`Completion.support`)."""

    replays_routes: bool = False
    """Whether the started engine's model has experts and `logprobs` takes the `routes` of sequences."""

    takes_parts: bool = False
    """Whether `load_weights` takes `partial=True`."""

    pushes: Literal["parameters", "checkpoint", "adapter"] = "parameters"
    """What a push brings to the started engine: the parameters of transformers' model; those under the names and shapes
    of checkpoints on disk, where each expert has its own matrices; or a LoRA adapter for the engine's own base."""

    # ---- before the start --------------------------------------------------------------------------------------

    def check(self, context: EngineContext) -> None:  # noqa: B027 - most engines find out when they start
        """Raises a ValueError about what would make `start` fail, before any model is loaded, on every rank."""

    def check_overlap(self, *, in_flight: bool) -> None:
        """Raises a ValueError unless it can sample while the trainer computes.

        Args:
            in_flight: weights also change within completions.
        """
        raise ValueError(
            f"engine={type(self).__name__} in the trainer's process: it can't sample while the trainer computes. Use "
            "VLLMEngine(in_process=False), or sample on-policy."
        )

    def check_sampling(self, sampling: SamplingParams, name: str = "sampling", *, trained: bool) -> None:
        """Rejects settings that the engine does not serve and, for training, those that the trainer cannot score.

        Training needs the distribution that each token was drawn from. An engine that changes it in another way
        extends this method.

        Args:
            sampling: the settings.
            name: argument that they come from.
            trained: whether completions are trained on.

        Raises:
            ValueError: the message names the setting.
        """
        engine, plain = type(self).__name__, SamplingParams()
        for key, value in (sampling.extra or {}).items():
            if key in self.extra.own:
                raise ValueError(f"{name}.extra.{key}={value!r}: {engine} sets it. Use {self.extra.own[key]} instead.")
            if key in self.extra.harmless:
                continue
            if self.extra.evaluation is not None and key not in self.extra.evaluation:
                raise ValueError(
                    f"{name}.extra.{key}={value!r}: {engine} has no such setting, or LightRL sets it. Remove it."
                )
            if trained:
                raise ValueError(
                    f"{name}.extra.{key}={value!r}: the trainer would score another distribution than tokens are drawn "
                    f"from ({engine}.extra does not list it as harmless). Remove it, or set it in evaluation.sampling."
                )
        if not trained:
            return
        if sampling.temperature == 0:
            raise ValueError(f"{name}.temperature=0: greedy completions of a prompt are all equal; train above 0.")
        fixes = {
            "repetition_penalty": "Set it to 1 and use the reward RepetitionPenalty, or set it in evaluation.sampling",
            "regex": "Remove it and use the reward RegexFormat, or set it in evaluation.sampling",
            "json_schema": "Remove it and reward valid JSON, or set it in evaluation.sampling",
        }
        if not self.records_support:
            cut = f"{engine} does not record what it leaves. Leave it off, or use TransformersEngine"
            fixes |= dict.fromkeys(("top_p", "top_k", "min_p"), cut)
        for field, fix in fixes.items():
            if getattr(sampling, field) != getattr(plain, field):
                raise ValueError(
                    f"{name}.{field}={getattr(sampling, field)!r}: the trainer would score another distribution than "
                    f"tokens are drawn from. {fix}."
                )

    def known_model_len(self, model_path: str) -> int | None:
        """What `max_model_len` will be for a model directory or ID; None if unknown before the start."""
        return None

    # ---- sampling ----------------------------------------------------------------------------------------------

    @abstractmethod
    def start(self, context: EngineContext) -> None:
        """Loads the model. Collective: every rank calls it. Calling it on a started engine does nothing."""

    @property
    @abstractmethod
    def started(self) -> bool:
        """Whether `start` has been called and the engine has not been closed."""

    @property
    @abstractmethod
    def max_model_len(self) -> int:
        """Maximum number of tokens, prompt and completion together, of one sequence."""

    @abstractmethod
    def check_request(self, request: GenerationRequest) -> None:
        """Raises a ValueError, with the fix, if the started engine cannot serve a request."""

    @abstractmethod
    async def generate(self, request: GenerationRequest) -> CompletionGroup:
        """Samples a request's completions. Cancelling the task that awaits it cancels the request.

        Completion g is drawn with a seed derived from (request.seed, g) alone, so the result depends neither on the
        order nor on the number of requests. `request.begun` continues from there.

        Raises:
            ValueError: see `check_request`.
            EngineRestartedError: push the weights and ask again, which gives the same.
            EngineDiedError: an engine process is gone.
        """

    def generate_all(self, requests: Iterable[GenerationRequest]) -> Iterator[CompletionGroup]:
        """Samples requests and yields each group when it finishes, for tests, benchmarks, and weight-sync checks.

        Leaving the iterator early cancels the rest. Raises as `generate`; a ValueError comes at the call.
        """
        asked = list(requests)
        for request in asked:
            self.check_request(request)
        return self._stream(asked)

    def _stream(self, requests: list[GenerationRequest]) -> Iterator[CompletionGroup]:
        loop, done = BackgroundLoop("lightrl-generate"), queue.SimpleQueue[asyncio.Task[CompletionGroup]]()

        async def ask_all() -> None:
            for request in requests:
                asyncio.ensure_future(self.generate(request)).add_done_callback(done.put)

        try:
            loop.run(ask_all())
            for _ in requests:
                yield _patiently(done).result()
        finally:
            loop.close()
            while not done.empty():  # else asyncio tells of errors that were not asked for
                if not (left := done.get()).cancelled():
                    left.exception()

    def pause(self) -> list[CompletionGroup]:
        """Stops sampling between two tokens, until `resume`; requests stay, and others may be made.

        Returns:
            what has come of each request under way; completions that are not over are "suspended".
        """
        raise NotImplementedError(f"{type(self).__name__} does not pause within completions.")

    def resume(self) -> None:  # noqa: B027 - as `pause`
        """Undoes `pause`."""

    @abstractmethod
    def logprobs(self, sequences: Sequence[Sequence[int]], routes: Sequence[Routes | None] = ()) -> list[list[float]]:
        """Log-probs at temperature 1 of tokens 1..n-1 of each sequence given those before, for weight-sync checks.

        Args:
            sequences: token IDs, at least one each.
            routes: experts that each sequence's tokens go to, if the engine `replays_routes`.
        """

    # ---- weights -----------------------------------------------------------------------------------------------

    @abstractmethod
    def load_weights(
        self, named_tensors: Iterable[tuple[str, Tensor]], *, policy_version: int, partial: bool = False
    ) -> None:
        """Replaces the weights; caches of the old ones (prefix, encoder) are dropped.

        Requests under way continue with the new weights; their keys and values are recomputed, or kept with
        `EngineContext.keep_cache`. If it raises, `policy_version` is -1.

        Args:
            named_tensors: (name, full tensor) as `pushes` states, streamed: a tensor may be freed or overwritten when
                the next one is requested. Tied parameters come once.
            policy_version: value of `self.policy_version` afterwards.
            partial: parameters that do not come keep their values; only if `takes_parts`.
        """

    def load_adapter(
        self, named_tensors: Iterable[tuple[str, Tensor]], config: Mapping[str, Any], *, policy_version: int
    ) -> None:
        """Replaces the LoRA adapter, if `pushes` is "adapter". As `load_weights` otherwise.

        Args:
            named_tensors: (parameter name in peft's format, full tensor).
            config: peft's `adapter_config.json`.
            policy_version: value of `self.policy_version` afterwards.
        """
        raise NotImplementedError(f"{type(self).__name__} takes merged weights.")

    def mark_stale(self) -> None:
        """Resets the policy version, so that the next sync pushes the weights even if the version is the same."""
        self.policy_version = -1

    def sleep(self) -> None:  # noqa: B027 - optional
        """Frees memory between rollouts, until `wake`. `policy_version` is -1 afterwards if weights were dropped."""

    def wake(self) -> None:  # noqa: B027
        """Undoes `sleep`."""

    @abstractmethod
    def close(self) -> None:
        """Ends the engine and every process it started, in a few seconds even if it hangs."""


class SteppingEngine(Engine):
    """An engine whose library computes in steps. The base class owns the thread that steps and what waits for answers.

    A subclass implements `start`, `started`, `max_model_len`, `check_request`, `logprobs`, and `load_weights` as any
    engine, and the four methods below, which the driver thread calls one at a time, holding `self.lock`::

        class MyEngine(SteppingEngine):
            def add(self, requests):                # these begin with the next step
                for request in requests:
                    self.library.submit(request.token_ids, ...)

            def step(self):                         # one token for each; what is done
                return [self.group(done) for done in self.library.step()]

            def abort(self, requests): ...          # forget these
            def partials(self): ...                 # what has come of all others, as groups

    Other methods take `self.lock`, which waits for the end of a step, before they touch the library. `close` ends with
    `self.end_driver()`. Requests made in the same tick of an event loop are added together, so that batches do not
    depend on the timing of threads.
    """

    device: str = "cpu"
    """Of the started engine; the driver thread makes a GPU its current one."""

    def __init__(self) -> None:
        self.lock = FairLock()
        self._news = threading.Condition()  # for what follows
        self._made: dict[asyncio.AbstractEventLoop, list[GenerationRequest]] = defaultdict(list)  # in this tick
        self._asked: dict[GenerationRequest, asyncio.Future[CompletionGroup]] = {}
        self._waiting: list[GenerationRequest] = []  # not added yet
        self._cancelled: list[GenerationRequest] = []
        self._running: set[GenerationRequest] = set()
        self._paused = False
        self._ending = False
        self._driver: threading.Thread | None = None
        self._lost: EngineDiedError | None = None

    @abstractmethod
    def add(self, requests: list[GenerationRequest]) -> None:
        """Begins requests, all of one tick of the event loop or more."""

    @abstractmethod
    def step(self) -> list[CompletionGroup]:
        """Samples on, for a moment; groups that are done, each with the request that was added."""

    @abstractmethod
    def abort(self, requests: list[GenerationRequest]) -> None:
        """Forgets requests that were added."""

    @abstractmethod
    def partials(self) -> list[CompletionGroup]:
        """What has come of each request that was added and is not done."""

    async def generate(self, request: GenerationRequest) -> CompletionGroup:
        if self.policy_version >= 0:
            self._lost = None
        if self._lost is not None:
            raise self._lost
        self.check_request(request)
        loop = asyncio.get_running_loop()
        future = self._asked[request] = loop.create_future()
        if not self._made[loop]:
            loop.call_soon(self._hand_over, loop)
        self._made[loop].append(request)
        try:
            return await future
        finally:
            if self._asked.pop(request, None) is not None:  # cancelled
                self._tell(lambda: self._cancelled.append(request))

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        made = self._made.pop(loop)
        self._tell(lambda: self._waiting.extend(made))

    def _tell(self, change: Callable[[], object]) -> None:
        """Makes a change and has the driver look."""
        with self._news:
            change()
            if self._driver is None and not self._ending:
                self._driver = in_background(self._drive, "lightrl-sampling")
            self._news.notify_all()

    def _drive(self) -> None:
        torch.get_num_threads()  # gives this thread the process's number of threads
        if self.device.startswith("cuda"):
            torch.cuda.set_device(self.device)
        while True:
            with self._news:
                self._news.wait_for(self._has_work, _LINGER_SECONDS)
                if self._ending or not self._has_work():
                    self._driver = None
                    return
                cancelled = [request for request in self._cancelled if request in self._running]
                added = [] if self._paused else [request for request in self._waiting if request in self._asked]
                self._cancelled.clear()
                if not self._paused:
                    self._waiting.clear()
            groups = list[CompletionGroup]()
            try:
                with self.lock:
                    if cancelled:
                        self._running.difference_update(cancelled)
                        self.abort(cancelled)
                    if added:
                        self._running.update(added)
                        self.add(added)
                    if self._running and not self._paused:
                        groups = self.step()
                        self._running.difference_update(group.request for group in groups)
            except Exception as error:
                self.lose(error)
            except BaseException as error:  # SystemExit would vanish with the thread, or end the loop of who waits
                self.lose(RuntimeError(f"{type(self).__name__}.step raised {type(error).__name__}: {error}"))
            self.moved = time.monotonic()
            self._answer([(group.request, group) for group in groups])

    def _has_work(self) -> bool:
        return bool(self._ending or self._cancelled or (not self._paused and (self._waiting or self._running)))

    def _answer(self, answers: Iterable[tuple[GenerationRequest, CompletionGroup | Exception]]) -> None:
        """Settles futures; those of one event loop together, so that what they ask next is added together."""
        told = defaultdict[Any, list[Any]](list)
        for request, answer in answers:
            if (future := self._asked.pop(request, None)) is not None:
                told[future.get_loop()].append((future, answer))
        for loop, settled in told.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_settle, settled)

    def lose(self, error: Exception) -> None:
        """Raises an error in whoever awaits a request. One that ended the engine is also raised in later `generate`
        until weights are loaded."""
        with self._news:
            if isinstance(error, EngineDiedError):
                self._lost = error
            running, asked = list(self._running), list(self._asked)
            self._running.clear()
            self._waiting.clear()
        if running and self._lost is None and not self._ending:
            with contextlib.suppress(Exception), self.lock:
                self.abort(running)
        self._answer([(request, error) for request in asked])

    def pause(self) -> list[CompletionGroup]:
        self._paused = True
        with self.lock:
            return self.partials()

    def resume(self) -> None:
        def go_on() -> None:
            self._paused = False

        self._tell(go_on)

    @property
    def ending(self) -> bool:
        """Whether `end_driver` waits for a step that is under way."""
        return self._ending

    def end_driver(self) -> bool:
        """Ends the driver thread and what waits for it; False if the thread hangs in a step and is left behind."""
        with self._news:
            self._ending = True
            self._news.notify_all()
            driver = self._driver
        if driver is not None and driver is not threading.current_thread():
            driver.join(LEAVE_SECONDS)
        stuck = driver is not None and driver.is_alive()
        self.lose(RuntimeError(f"{type(self).__name__} was closed."))
        self._paused, self._ending, self._lost = False, False, None
        return not stuck


def _settle(answers: list[tuple[asyncio.Future[CompletionGroup], CompletionGroup | Exception]]) -> None:
    for future, answer in answers:
        if future.done():
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)


def _patiently(items: queue.SimpleQueue[Any]) -> Any:
    """The next item. A Ctrl-C that comes just before a wait does not end it, but the next short wait does."""
    while True:
        with contextlib.suppress(queue.Empty):
            return items.get(timeout=0.5)
