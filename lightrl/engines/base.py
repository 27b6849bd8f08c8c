"""Base classes of inference engines, which sample from a copy of the policy's weights."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lightrl.engines.background import BackgroundLoop, FairLock, all_of, in_background, release_threads
from lightrl.records import CompletionGroup, EngineContext, GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from lightrl.records import Routes

TOLERANCE = {"float32": 5e-4, "float16": 0.05, "bfloat16": 0.5}
"""Maximum mean log-prob difference between equal weights that rounding explains, in nats per token, by dtype."""

LEAVE_SECONDS = 2.5
"""Time limit of `close` for the driver thread to finish a step."""


class EngineDiedError(RuntimeError):
    """Raised if an engine process died. Sampling is not possible until the engine is restarted."""


class StaleWeightsError(RuntimeError):
    """Raised if the engine's weights differ from the trainer's."""


class Engine(ABC):
    """Base class of engines, which sample completions from a separate copy of the policy.

    For an asynchronous inference library, implement the abstract methods. For a library that computes step by step,
    derive from `SteppingEngine`. In YAML, use the dotted path: `data.init_args.engine: my_file.MyEngine`.

    The constructor must not use a device. `start(context)` is called on all ranks after Lightning has set up the
    strategy, followed by any number of `load_weights` and `generate` calls. `close()` may be called repeatedly, and
    before `start`.
    """

    policy_version: int = -1
    """Version of the loaded weights, or -1 before the first `load_weights`. Set only by the engine."""

    dtype: str | None = None
    """Dtype of the started engine's weights: "float32", "bfloat16", or "float16". None if unknown. Log-prob checks then
    use the tolerance of float32 (`WeightSync`) or bfloat16 (`LogprobMonitor`)."""

    moved: float = 0.0
    """`time.monotonic()` of the last step. A rollout has not stalled while its engine steps."""

    harmless_extra: frozenset[str] = frozenset()
    """Keys of `SamplingParams.extra` that don't change the sampling distribution, the only ones allowed in training."""

    records_support: bool = False
    """Whether completions contain the token IDs kept by top-p, top-k, and min-p (`Completion.support`)."""

    replays_routes: bool = False
    """Whether the model has experts and `logprobs` accepts the `routes` of sequences. Known after `start`."""

    pushes: Literal["parameters", "checkpoint", "adapter"] = "parameters"
    """Weight format of a push: "parameters" of the transformers model; "checkpoint", the names and shapes of checkpoint
    files, with separate matrices per expert; or "adapter", a LoRA adapter for the engine's base weights."""

    # ---- before the start --------------------------------------------------------------------------------------

    def check(self, context: EngineContext) -> None:  # noqa: B027 - optional
        """Raises a ValueError for settings that would make `start` fail. Called on all ranks before loading a model."""

    def check_overlap(self, *, in_flight: bool) -> None:
        """Raises a ValueError unless the engine can sample during updates.

        Args:
            in_flight: Whether the weights also change in the middle of completions.
        """
        raise ValueError(
            f"engine={type(self).__name__} in the trainer's process: can't sample during updates. Use "
            "VLLMEngine(in_process=False), or schedule=OnPolicy."
        )

    def check_sampling(self, sampling: SamplingParams, name: str = "sampling", *, trained: bool) -> None:
        """Rejects settings that the engine doesn't support or, in training, that the trainer can't score.

        Training needs the distribution that each token was sampled from. Extend this method in engines that change the
        distribution in other ways.

        Args:
            sampling: Sampling settings.
            name: Name of the argument, for error messages.
            trained: Whether the completions are trained on.

        Raises:
            ValueError: If a setting is not supported.
        """
        if not trained:
            return
        if sampling.temperature == 0:
            raise ValueError(
                f"{name}.temperature=0: greedy completions of a prompt are all equal. Set it above 0 for training."
            )
        plain, listed = SamplingParams(), f"list it in {type(self).__name__}.harmless_extra"
        extra = {key: value for key, value in (sampling.extra or {}).items() if key not in self.harmless_extra}
        fixes = {"repetition_penalty": "use the reward RepetitionPenalty", "regex": "use the reward RegexFormat"}
        fixes["json_schema"] = "reward valid JSON"
        if not self.records_support:
            fixes |= dict.fromkeys(("top_p", "top_k", "min_p"), "use TransformersEngine")
        wrong = [(f"extra.{key}", value, listed) for key, value in extra.items()]
        wrong += [(f, v, fix) for f, fix in fixes.items() if (v := getattr(sampling, f)) != getattr(plain, f)]
        for field, value, fix in wrong:
            raise ValueError(
                f"{name}.{field}={value!r}: the trainer can't reproduce this sampling distribution. Remove it, set it "
                f"in evaluation.sampling, or {fix}."
            )

    def known_model_len(self, model_path: str) -> int | None:
        """Returns `max_model_len` for a model directory or ID, or None if it is unknown before the start."""
        return None

    # ---- sampling ----------------------------------------------------------------------------------------------

    @abstractmethod
    def start(self, context: EngineContext) -> None:
        """Loads the model. Does nothing if already started. Collective."""

    @property
    @abstractmethod
    def started(self) -> bool:
        """Whether `start` has been called and the engine has not been closed."""

    @property
    @abstractmethod
    def max_model_len(self) -> int:
        """Maximum sequence length in tokens, including prompt and completion."""

    @abstractmethod
    def check_request(self, request: GenerationRequest) -> None:
        """Raises a ValueError if the started engine can't serve a request."""

    def check_length(self, request: GenerationRequest) -> None:
        """Raises a ValueError if a prompt is too long for its completions."""
        length, new_tokens = len(request.token_ids), request.sampling.max_new_tokens
        if length + new_tokens > self.max_model_len:
            raise ValueError(
                f"max_new_tokens={new_tokens}: with the {length} tokens of {request.name}, this exceeds the engine's "
                f"max_model_len={self.max_model_len}. Lower it, or drop or truncate prompts of this length."
            )

    @abstractmethod
    async def generate(self, request: GenerationRequest) -> CompletionGroup:
        """Samples a request's completions. Canceling the awaiting task cancels the request.

        The seed of completion g depends only on (request.seed, g), so the result is independent of the order and number
        of requests. Partial completions in `request.begun` are continued.

        Raises:
            ValueError: If the request is invalid. See `check_request`.
            EngineDiedError: If an engine process died.
        """

    def generate_all(self, requests: Iterable[GenerationRequest]) -> list[CompletionGroup]:
        """Samples requests and returns their groups, for tests, benchmarks, and weight-sync checks."""
        loop = BackgroundLoop("lightrl-generate")
        try:
            return loop.run(all_of(self.generate(request) for request in requests))
        finally:
            loop.close()

    def pause(self) -> list[CompletionGroup]:
        """Stops sampling until `resume`. Keeps pending requests and accepts new ones.

        Returns:
            The partial groups of all pending requests. Unfinished completions have the finish reason "suspended".
        """
        raise NotImplementedError(f"{type(self).__name__} does not pause within completions.")

    def resume(self) -> None:  # noqa: B027 - as `pause`
        """Resumes sampling after `pause`."""

    @abstractmethod
    def logprobs(self, sequences: Sequence[Sequence[int]], routes: Sequence[Routes | None] = ()) -> list[list[float]]:
        """Returns the log-probs at temperature 1 of tokens 1..n-1 of each sequence, for weight-sync checks.

        Args:
            sequences: Token IDs, at least one per sequence.
            routes: Experts of each sequence's tokens, if the engine `replays_routes`.
        """

    # ---- weights -----------------------------------------------------------------------------------------------

    @abstractmethod
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, policy_version: int) -> None:
        """Replaces the weights and drops caches of the old ones (prefix, encoder).

        Pending requests continue with the new weights. Their KV cache is recomputed, or kept with
        `EngineContext.keep_cache`. After an error, `policy_version` is -1.

        Args:
            named_tensors: Iterator of (name, full tensor) in the format of `pushes`. A tensor may be freed or
                overwritten when the next one is requested. Tied parameters appear once.
            policy_version: Value of `self.policy_version` afterwards.
        """

    def load_adapter(
        self, named_tensors: Iterable[tuple[str, Tensor]], config: Mapping[str, Any], *, policy_version: int
    ) -> None:
        """Replaces the LoRA adapter if `pushes` is "adapter". Otherwise behaves like `load_weights`.

        Args:
            named_tensors: Iterator of (PEFT parameter name, full tensor).
            config: Contents of PEFT's `adapter_config.json`.
            policy_version: Value of `self.policy_version` afterwards.
        """
        raise NotImplementedError(f"{type(self).__name__} supports only merged weights.")

    def mark_stale(self) -> None:
        """Resets the policy version to -1, so that the next sync always pushes the weights."""
        self.policy_version = -1

    def sleep(self) -> None:  # noqa: B027 - optional
        """Frees memory between rollouts. Sets `policy_version` to -1 if weights are dropped."""

    def wake(self) -> None:  # noqa: B027
        """Restores the engine after `sleep`."""

    @abstractmethod
    def close(self) -> None:
        """Stops the engine and all its processes within a few seconds, even if it hangs."""


class SteppingEngine(Engine):
    """Base class of engines whose library computes in steps. Runs the steps in a driver thread.

    Subclasses implement `start`, `started`, `max_model_len`, `check_request`, `logprobs`, `load_weights`, and `close`
    of `Engine`, and the four methods below. The driver thread calls them one at a time and holds `self.lock`::

        class MyEngine(SteppingEngine):
            def add(self, requests):                # start requests with the next step
                for request in requests:
                    self.library.submit(request.token_ids, ...)

            def step(self):                         # sample one token each, return finished groups
                return [self.group(done) for done in self.library.step()]

            def abort(self, requests): ...          # cancel requests
            def partials(self): ...                 # return unfinished groups

    Other methods must acquire `self.lock`, which waits for the end of a step, before they use the library. `close` must
    call `self.end_driver()`. Requests of one event-loop tick are added together, so that batches don't depend on
    thread timing.
    """

    device: str = "cpu"
    """Device of the started engine. The driver thread selects it if it is a GPU."""

    def __init__(self) -> None:
        self.lock = FairLock()
        self._news = threading.RLock()  # guards the attributes below
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
        """Starts requests from one or more event-loop ticks."""

    @abstractmethod
    def step(self) -> list[CompletionGroup]:
        """Runs one step and returns the finished groups, each with the request that was added."""

    @abstractmethod
    def abort(self, requests: list[GenerationRequest]) -> None:
        """Cancels requests that were added."""

    @abstractmethod
    def partials(self) -> list[CompletionGroup]:
        """Returns the partial groups of all unfinished requests."""

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
        """Applies a change and starts the driver thread, which ends when it has no work."""
        with self._news:
            change()
            if self._driver is None and not self._ending:
                self._driver = in_background(self._drive, "lightrl-sampling")

    def _drive(self) -> None:
        torch.get_num_threads()  # initializes this thread with the process's number of threads
        if self.device.startswith("cuda"):
            torch.cuda.set_device(self.device)
        while True:
            with self._news:
                running = not self._paused and (self._waiting or self._running)
                if self._ending or not (self._cancelled or running):
                    self._driver = None
                    break
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
            except BaseException as error:  # SystemExit would be lost, or end the caller's event loop
                self.lose(RuntimeError(f"{type(self).__name__}.step raised {type(error).__name__}: {error}"))
            self.moved = time.monotonic()
            self._answer([(group.request, group) for group in groups])
        release_threads()

    def _answer(self, answers: Iterable[tuple[GenerationRequest, CompletionGroup | Exception]]) -> None:
        """Settles futures, together for each event loop, so that follow-up requests are also added together."""
        told = defaultdict[Any, list[Any]](list)
        for request, answer in answers:
            if (future := self._asked.pop(request, None)) is not None:
                told[future.get_loop()].append((future, answer))
        for loop, settled in told.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_settle, settled)

    def lose(self, error: Exception) -> None:
        """Raises an error in all pending requests. An `EngineDiedError` also fails later requests until weights are
        loaded."""
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
        self._tell(lambda: setattr(self, "_paused", False))

    def end_driver(self) -> bool:
        """Stops the driver thread and fails pending requests. Returns False if the thread hangs and is leaked."""
        with self._news:
            self._ending = True
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
