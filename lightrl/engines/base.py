"""The contract of an engine: it owns a copy of the policy's weights and samples from it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightrl.records import CompletionGroup, EngineContext, GenerationRequest, Routes, SamplingParams

TOLERANCE = {"float32": 5e-4, "float16": 0.05, "bfloat16": 0.15}
"""dtype -> largest mean difference of log-probs, in nats per token, that rounding explains between equal weights."""


class EngineDiedError(RuntimeError):
    """An engine process is gone. Nothing more can be sampled until the engine is started again."""


class EngineRestartedError(EngineDiedError):
    """An engine process was gone and runs again, without weights: sync them, then ask again for what was lost."""


class GenerationCancelledError(RuntimeError):
    """`Engine.cancel` ended this generation."""


class StaleWeightsError(RuntimeError):
    """The engine would sample with weights that are not the trainer's."""


class RequestQueue:
    """Requests for an engine that is generating. Any thread may add to it; one `Engine.generate` takes from it.

    Args:
        requests: that are there from the start.
        closed: whether no more will come.
    """

    def __init__(self, requests: Iterable[GenerationRequest] = (), *, closed: bool = False) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[GenerationRequest, None] = dict.fromkeys(requests)  # in order, found by identity
        self._cancelled: list[GenerationRequest] = []
        self._closed = closed
        self._stopped = False
        self._suspended = False
        self._listener: Callable[[], None] = lambda: None

    def put(self, request: GenerationRequest) -> None:
        """Adds a request.

        Raises:
            RuntimeError: the queue is closed.
        """
        with self._changed:
            if self._closed:
                raise RuntimeError("RequestQueue.put after close: make another queue and call generate again.")
            self._waiting[request] = None
            self._tell()

    def cancel(self, request: GenerationRequest) -> None:
        """Has a request dropped: it will not be yielded, unless it is on its way already."""
        with self._changed:
            if request in self._waiting:
                del self._waiting[request]
            else:
                self._cancelled.append(request)
                self._tell()

    def close(self) -> None:
        """Says that no more requests will come. May be called twice."""
        with self._changed:
            self._closed = True
            self._tell()

    def stop(self) -> None:
        """Ends the `generate` that takes from this queue by a `GenerationCancelledError` there."""
        with self._changed:
            self._stopped = self._closed = True
            self._tell()

    def suspend(self) -> None:
        """Ends the `generate` that takes from this queue: what it has begun is yielded as it stands, "suspended".

        Requests that it has not taken yet are not answered. For engines that pass `check_in_flight`.
        """
        with self._changed:
            self._suspended = self._closed = True
            self._tell()

    @property
    def suspended(self) -> bool:
        """Whether `suspend` was called."""
        return self._suspended

    def listen(self, listener: Callable[[], None]) -> None:
        """For the engine: has `listener` called after each change, by the thread that made it. It must not block."""
        self._listener = listener

    def _tell(self) -> None:
        self._changed.notify_all()
        self._listener()

    @property
    def closed(self) -> bool:
        """Whether no more requests will come."""
        return self._closed

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped

    def waiting(self) -> list[GenerationRequest]:
        """Requests that nobody has taken yet, which stay."""
        with self._changed:
            return list(self._waiting)

    def take(self, wait: bool) -> list[GenerationRequest]:
        """For the engine: all requests that are there, in the order in which they came.

        Args:
            wait: block until there are some, or no more will come; then an empty list is the end.

        Raises:
            GenerationCancelledError: `stop` was called.
        """
        with self._changed:
            while wait and not (self._waiting or self._closed):
                self._changed.wait()
            if self._stopped:
                raise GenerationCancelledError("This generation was cancelled.")
            if self._suspended:
                return []
            taken = list(self._waiting)
            self._waiting.clear()
            return taken

    def take_cancelled(self) -> list[GenerationRequest]:
        """For the engine: requests that were cancelled after they were taken, each once."""
        if not self._cancelled:
            return []
        with self._changed:
            cancelled, self._cancelled = self._cancelled, []
            return cancelled


class Engine(ABC):
    """Samples completions from its own copy of the policy.

    An engine of your own implements `start`, `started`, `max_model_len`, `generate`, `check_request`, `logprobs`,
    `load_weights` and `close`; calls `super().__init__()`; keeps the queue of each `generate` in `self._queues` while
    it runs (`_checked_queue` makes one of the requests); and sets `policy_version` and `dtype`. The other members say
    what more it can do, and have a default. YAML names it by its dotted path:
    `data.init_args.engine: my_file.MyEngine`.

    Life: built from YAML without touching a device; `start(context)` on all ranks together, once, after Lightning has
    set up the strategy; then any number of `load_weights` and `generate`; `close()` at the end. `close` may be called
    twice and before `start`.
    """

    policy_version: int = -1
    """Version of the loaded weights, -1 until the first `load_weights`. Only the engine sets it."""

    records_support: bool = False
    """Whether completions come with the ids that top-p, top-k and min-p left for each token (`Completion.support`)."""

    harmless_extra: frozenset[str] = frozenset()
    """Keys of `SamplingParams.extra` that leave the distribution of each token alone; others are not trained with."""

    evaluation_extra: frozenset[str] | None = None
    """Further keys that evaluation may use; None allows all."""

    own_extra: Mapping[str, str] = {}
    """Keys that are not supported in `extra` because LightRL has a setting for them -> that setting."""

    dtype: str | None = None
    """Of the weights of the started engine: "float32", "bfloat16" or "float16"; None where the engine does not know,
    and then `WeightSync` allows the gap of float32, `LogprobMonitor` with a warning that of bfloat16."""

    @property
    def concurrent(self) -> bool:
        """Whether it computes outside of this process, so that `generate` may run in a thread beside training."""
        return False

    @property
    def sleeps(self) -> bool:
        """Whether it frees device memory between rollouts, and so cannot sample beside training."""
        return False

    def __init__(self) -> None:
        self._queues: set[RequestQueue] = set()

    def check(self, context: EngineContext) -> None:  # noqa: B027 - most engines find out when they start
        """Checks, before any model is loaded, for what would make `start` fail. Every rank calls it.

        Raises:
            ValueError: what is wrong, and the way out.
        """

    def known_model_len(self, model_path: str) -> int | None:
        """What `max_model_len` will be, as far as that is known before the start; None where it is not.

        Args:
            model_path: folder or hub name of the model.
        """
        return None

    def check_sampling(self, sampling: SamplingParams, name: str = "sampling", *, trained: bool) -> None:
        """Rejects settings that the engine does not serve, and for training those that the trainer cannot score.

        Training needs the distribution that each token was drawn from. An engine that changes it in another way
        extends this method.

        Args:
            sampling: the settings.
            name: of the argument that they come from.
            trained: whether completions are trained on.

        Raises:
            ValueError: the message names the setting.
        """
        engine, plain = type(self).__name__, SamplingParams()
        for key, value in (sampling.extra or {}).items():
            if key in self.own_extra:
                raise ValueError(f"{name}.extra.{key}={value!r}: {engine} sets it. Use {self.own_extra[key]} instead.")
            harmless = key in self.harmless_extra
            if not harmless and self.evaluation_extra is not None and key not in self.evaluation_extra:
                raise ValueError(
                    f"{name}.extra.{key}={value!r}: {engine} has no such setting, or LightRL sets it. Remove it."
                )
            if not harmless and trained:
                raise ValueError(
                    f"{name}.extra.{key}={value!r}: the trainer would score another distribution than tokens are drawn "
                    f"from ({engine}.harmless_extra does not list it). Remove it, or set it in eval_sampling."
                )
        if not trained:
            return
        if sampling.temperature == 0:
            raise ValueError(f"{name}.temperature=0: greedy completions of a prompt are all equal; train above 0.")
        fixes = {
            "repetition_penalty": "Set it to 1 and use the reward RepetitionPenalty, or set it in eval_sampling",
            "regex": "Remove it and use the reward RegexFormat, or set it in eval_sampling",
            "json_schema": "Remove it and reward valid JSON, or set it in eval_sampling",
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

    def check_in_flight(self) -> None:
        """Says whether weights may change within a completion (`InFlight`): the engine takes requests with `begun`
        completions, heeds `RequestQueue.suspend`, and serves several `generate` at a time.

        Raises:
            ValueError: why not, and the way out.
        """
        raise ValueError(
            f"in_flight with engine={type(self).__name__}: it cannot go on with what other weights sampled. Take "
            "VLLMEngine(in_process=False), or leave in_flight out: staleness alone changes weights between rollouts."
        )

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
        """Most tokens, prompt and completion together, that the engine can hold in one sequence."""

    @abstractmethod
    def generate(self, requests: Iterable[GenerationRequest] | RequestQueue) -> Iterator[CompletionGroup]:
        """Samples completions. Runs in the caller's thread, between whose steps new requests are taken.

        Args:
            requests: to complete. Others may join a `RequestQueue`, or be cancelled, while earlier ones run; any other
                iterable is a closed queue. Settings, limits and lengths may differ. Completion g of a request is drawn
                with a seed derived from (its seed, g) alone, so the result depends neither on the order nor on the
                number of requests.

        Yields:
            one group per request, each as soon as it is finished, in any order. It ends when the queue is closed and
            everything that was asked and not cancelled has been yielded.

        Raises:
            ValueError: see `check_request`; at the call, for requests that are there then.
            GenerationCancelledError: `cancel` was called.
            EngineDiedError: an engine process is gone. What was not yielded is lost; asked again it will be the same.
        """

    @abstractmethod
    def check_request(self, request: GenerationRequest) -> None:
        """Checks that the started engine can serve a request.

        Raises:
            ValueError: it does not fit, or its sampling settings cannot be served; the message says the way out.
        """

    def cancel(self) -> None:
        """Ends every `generate` that another thread is in, soon, by a `GenerationCancelledError` there.

        An engine calls `super().__init__()`, and keeps the queue of each `generate` in `self._queues` while it runs.
        """
        for queue in list(self._queues):
            queue.stop()

    def _checked_queue(self, requests: Iterable[GenerationRequest] | RequestQueue) -> RequestQueue:
        """The requests as a queue, those that are there checked."""
        queue = requests if isinstance(requests, RequestQueue) else RequestQueue(requests, closed=True)
        for request in queue.waiting():
            self.check_request(request)
        return queue

    @property
    def replays_routes(self) -> bool:
        """Whether the started engine's model has experts and `logprobs` takes the `routes` of sequences."""
        return False

    @abstractmethod
    def logprobs(self, sequences: Sequence[Sequence[int]], routes: Sequence[Routes | None] = ()) -> list[list[float]]:
        """Log-probs at temperature 1 of tokens 1..n-1 of each sequence given those before, for the canary.

        Args:
            sequences: token ids, at least one each.
            routes: of each sequence the experts that its tokens are to go to, for an engine that `replays_routes`;
                others are not given any.
        """

    takes_parts: bool = False
    """Whether `load_weights` takes `partial=True`."""

    reads_checkpoints: bool = False
    """Whether `load_weights` takes the names and shapes of checkpoints on disk, where each expert has its own matrices,
    and not those of transformers' model."""

    @abstractmethod
    def load_weights(
        self, named_tensors: Iterable[tuple[str, Tensor]], *, policy_version: int, partial: bool = False
    ) -> None:
        """Replaces the weights.

        Args:
            named_tensors: (Hugging Face parameter name, full tensor), as of `reads_checkpoints`, streamed: a tensor may
                be freed or overwritten as soon as the next one is asked for. Tied parameters come once.
            policy_version: what `self.policy_version` is afterwards.
            partial: parameters that do not come stay as they are, for an engine that `takes_parts`.
        Caches of the old weights (prefix, encoder) are dropped. When it raises, `policy_version` is -1.
        """

    def mark_stale(self) -> None:
        """Resets the policy version, so that the next sync pushes the weights even where the version is the same."""
        self.policy_version = -1

    @property
    def takes_adapter(self) -> bool:
        """Whether the engine, as it was started, is given LoRA adapters by `load_adapter` and not merged weights."""
        return False

    def load_adapter(
        self, named_tensors: Iterable[tuple[str, Tensor]], config: Mapping[str, Any], *, policy_version: int
    ) -> None:
        """Replaces the LoRA adapter on the engine's own base weights, for an engine that `takes_adapter`.

        Args:
            named_tensors: (parameter name in peft's format, full tensor).
            config: peft's `adapter_config.json`.
            policy_version: what `self.policy_version` is afterwards.
        As `load_weights` otherwise.
        """
        raise NotImplementedError(f"{type(self).__name__} takes merged weights.")

    def sleep(self) -> None:  # noqa: B027 - optional: an engine without sleep mode keeps its memory
        """Frees device memory until `wake`. After it `policy_version` is -1 if the weights were dropped."""

    def wake(self) -> None:  # noqa: B027
        """Undoes `sleep`."""

    @abstractmethod
    def close(self) -> None:
        """Ends the engine and every process it started."""
