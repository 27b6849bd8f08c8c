"""Episodes generate the trajectories of a prompt, in one request or turn by turn."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from lightrl.compat.arguments import MAX_REWARD
from lightrl.records import CompletionGroup, GenerationRequest, Prompts, SamplingParams, Trajectory, TrajectoryRow

if TYPE_CHECKING:
    from lightrl.data.prompts import PromptMixture, PromptSource

Ask: TypeAlias = Callable[[GenerationRequest], Awaitable[CompletionGroup]]
"""Function that sends a request to the engine. Canceling the call, for example by a time limit, cancels the request."""


class EnvironmentFailedError(RuntimeError):
    """Raised for failures that the policy did not cause. The trajectory is excluded from losses and baselines."""


def request_seed(seed: int, stream: str, cursor: int, row: int) -> int:
    """A 62-bit seed that depends only on the run's seed, the stream, and the prompt's position in it."""
    return _digest(f"{seed}/{stream}/{cursor}/{row}")


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


def finite_reward(value: Any, source: str) -> float:
    """Validates a reward from `source`. Raises a ValueError for NaN, too: it would mean an unscored trajectory."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not abs(number) <= MAX_REWARD:
        raise ValueError(f"{source} returned the reward {repr(value)[:60]}. Return a finite number.")
    return number


@dataclass(frozen=True)
class Task:
    """A prompt and the trajectories to generate.

    Attributes:
        prompt: One example: token IDs, text, columns, inputs, and media.
        attempts: Indices of the trajectories in the group, from 0 to group size - 1. A retry has only failed ones.
        seed: Seed of the prompt, equal for all its trajectories and for retries.
        sampling: Sampling settings, including the token limit of one request.
        tokenizer: Tokenizer of the policy.
        max_model_len: Maximum number of tokens of the engine, including context.
        retry: Number of earlier failures of these trajectories.
        name: Name in messages.
        ended: Callback for each trajectory when it ends. Its exceptions must propagate from the episode.
    """

    prompt: Prompts
    attempts: tuple[int, ...]
    seed: int
    sampling: SamplingParams
    tokenizer: Any
    max_model_len: int
    retry: int = 0
    name: str = "a prompt"
    ended: Callable[[Trajectory], None] = lambda trajectory: None

    @property
    def columns(self) -> dict[str, Any]:
        """The example of the dataset: column -> value."""
        return {name: values[0] for name, values in self.prompt.columns.items()}

    def turn_seed(self, attempt: int, turn: int) -> int:
        """Seed of a request, which depends only on the prompt's seed, the trajectory, and the turn."""
        return _digest(f"{self.seed}/{attempt}/{turn}")

    def failed(self, cause: str) -> Trajectory:
        """A failed trajectory that contains only the prompt."""
        ids = list(self.prompt.token_ids[0])
        row = TrajectoryRow(ids, [-1] * len(ids), [0.0] * len(ids), [-1] * len(ids))
        return Trajectory([row], "", "failure", failure=cause)


class Episode(ABC):
    """Base class of episodes, which generate the trajectories of a prompt.

    All groups of a rollout run concurrently on one event loop. A trajectory that reaches a limit (turns, tokens, time)
    ends with that `stop_reason` and is scored. A trajectory that fails for another reason ends with "failure" and a
    description in `Trajectory.failure`. It is retried up to `max_retries` times and then excluded from the loss. An
    exception is a bug in the program and stops the run.

    Attributes:
        multi_turn: Whether trajectories may fail or have several turns, several sequences, or other stop reasons than
            "stop" and "length". If true, the stop reasons are logged.
        max_retries: Maximum number of retries of failed trajectories.
        max_failed: Maximum fraction of a rollout's trajectories on a rank, in [0, 1], that may fail after all retries.
            If more fail, the run stops.
        max_tokens: Maximum number of tokens of a trajectory's sequence. Determines the engine's size. None uses the
            engine's limit.
        playing: Number of trajectories in progress.
    """

    multi_turn: bool = True
    max_retries: int = 2
    max_failed: float = 0.5
    max_tokens: int | None = None
    playing: int = 0

    def setup(self, tokenizer: Any, processor: Any = None) -> None:  # noqa: B027 - optional
        """Receives the policy's tokenizer and, for VLMs, its `MediaProcessor`. Called before `run`.

        Raises:
            ValueError: They are not supported.
        """

    def check_template(self) -> None:  # noqa: B027
        """Raises a ValueError if the episode doesn't support `actor.chat_template`."""

    def check_prompts(self, prompts: PromptSource | PromptMixture) -> None:  # noqa: B027
        """Raises a ValueError if settings of the prompts would have no effect."""

    @abstractmethod
    async def run(self, task: Task, ask: Ask) -> list[Trajectory]:
        """Generates the trajectories `task.attempts`. Must release its resources when canceled at an `await`.

        Args:
            task: Prompt and trajectories to generate.
            ask: Function that sends a request of at most `task.max_model_len` tokens to the engine. Calls may be
                concurrent. Use seeds from `Task.turn_seed`, because requests with equal prompts and seeds get equal
                completions.

        Returns:
            One trajectory per entry of `task.attempts`, in the same order.
        """

    async def close(self) -> None:  # noqa: B027 - optional
        """Releases shared resources. Called when no trajectory is in progress."""


class SingleTurn(Episode):
    """Generates single-turn completions, with one request per prompt."""

    multi_turn = False
    max_retries = 0

    async def run(self, task: Task, ask: Ask) -> list[Trajectory]:
        request = task.prompt.request(0, task.sampling, task.seed, len(task.attempts))
        return one_turn(await ask(request))


def one_turn(group: CompletionGroup) -> list[Trajectory]:
    """Converts completions to single-turn trajectories."""
    prompt = list(group.request.token_ids)
    context, zeros = [-1] * len(prompt), [0.0] * len(prompt)
    trajectories = []
    for place, completion in enumerate(group.completions):
        assert completion.finish_reason != "suspended", "the collector waits for suspended completions"
        row = TrajectoryRow(
            token_ids=[*prompt, *completion.token_ids],
            turn_ids=context + [0] * len(completion.token_ids),
            logprobs=[*zeros, *completion.logprobs],
            policy_versions=context + group.versions(place),
            support=None if completion.support is None else completion.support.after(len(prompt)),
            routes=completion.routes,
        )
        trajectories.append(Trajectory([row], completion.text, completion.finish_reason))
    return trajectories
