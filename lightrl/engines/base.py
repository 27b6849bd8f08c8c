"""The contract of an engine: it owns a copy of the policy's weights and samples from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightrl.types import CompletionGroup, Prompts, SamplingParams

__all__ = [
    "Engine",
    "EngineContext",
    "EngineDiedError",
    "EngineRestartedError",
    "GenerationCancelledError",
    "StaleWeightsError",
]


class EngineDiedError(RuntimeError):
    """An engine process is gone. Nothing more can be sampled until the engine is started again."""


class EngineRestartedError(EngineDiedError):
    """An engine process was gone and runs again, without weights: sync them, then ask again for what was lost."""


class GenerationCancelledError(RuntimeError):
    """`Engine.cancel` ended this generation."""


class StaleWeightsError(RuntimeError):
    """The engine would sample with weights that are not the trainer's."""


@dataclass(frozen=True)
class EngineContext:
    """What the run tells an engine when it starts. An argument given to the engine's constructor wins.

    Attributes:
        model_path: folder or hub name whose configuration and tokenizer describe the policy.
        dtype: "float32", "bfloat16" or "float16": the trainer's compute dtype.
        seed: the run's seed; per-request seeds are derived by the caller, not from this.
        rank: global rank of this process. world_size: number of processes.
        local_rank: rank on this machine.
        device: "cpu" or "cuda:0" and so on, the trainer's device.
        max_prompt_tokens: longest prompt the data module lets through; None where it does not know.
        max_new_tokens: largest `max_new_tokens` of any sampling settings in the run.
        random_init: the model folder has a configuration but no weights; the first sync brings them.
        lora_rank: rank of the policy's adapter; 0 where there is none, or none that fits on the folder's weights.
    """

    model_path: str
    dtype: str = "float32"
    seed: int = 0
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device: str = "cpu"
    max_prompt_tokens: int | None = None
    max_new_tokens: int = 256
    random_init: bool = False
    lora_rank: int = 0


class Engine(ABC):
    """Samples completions from its own copy of the policy.

    Life: built from YAML without touching a device; `start(context)` on all ranks together, once, after Lightning has
    set up the strategy; then any number of `load_weights` and `generate`; `close()` at the end. `close` may be called
    twice and before `start`.
    """

    policy_version: int = -1
    """Version of the loaded weights, -1 until the first `load_weights`."""

    dtype: str | None = None
    """Of the weights of the started engine: "float32", "bfloat16" or "float16"; None where the engine does not know."""

    @property
    def concurrent(self) -> bool:
        """Whether it computes outside of this process, so that `generate` may run in a thread beside training."""
        return False

    def check(self, context: EngineContext) -> None:  # noqa: B027 - most engines find out when they start
        """Looks, before any model is loaded, for what would make `start` fail. Every rank calls it.

        Raises:
            ValueError: what is wrong, and the way out.
        """

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
    def generate(
        self, prompts: Prompts, sampling: SamplingParams, *, num_completions: int, seeds: Sequence[int]
    ) -> Iterator[CompletionGroup]:
        """Samples `num_completions` (G) completions of each prompt.

        Args:
            prompts: P prompts.
            sampling: the distribution and the limits.
            num_completions: G, at least 1.
            seeds: P integers; completion g of prompt p is drawn with a seed derived from (seeds[p], g) alone, so the
                result depends neither on the order nor on the number of prompts.

        Yields:
            one group per prompt, each as soon as it is finished, in any order.

        Raises:
            ValueError: a prompt that does not fit, or sampling settings the engine cannot serve.
            EngineDiedError: an engine process is gone.
        """

    def cancel(self) -> None:  # noqa: B027 - only a concurrent engine can be asked
        """Ends every `generate` that another thread is in, soon, by a `GenerationCancelledError` there."""

    @abstractmethod
    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs at temperature 1 of tokens 1..n-1 of each sequence given those before; the canary's question."""

    takes_parts: bool = False
    """Whether `load_weights` has an argument `partial`: with it, parameters that do not come stay as they are."""

    @abstractmethod
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], *, policy_version: int) -> None:
        """Replaces the weights.

        Args:
            named_tensors: (Hugging Face parameter name, full tensor), streamed: a tensor may be freed or overwritten
                as soon as the next one is asked for. Tied parameters come once.
            policy_version: what `self.policy_version` is afterwards.
        Caches of the old weights (prefix, encoder) are dropped. When it raises, `policy_version` is -1.
        """

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
