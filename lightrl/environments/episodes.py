"""Episodes make the attempts at a prompt: they ask the engine once, or turn by turn."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from lightrl.records import (
    CompletionGroup,
    GenerationRequest,
    Prompts,
    SamplingParams,
    Support,
    Trajectory,
    TrajectoryRow,
)

if TYPE_CHECKING:
    from lightrl.data.prompts import PromptMixture, PromptSource

Ask: TypeAlias = Callable[[GenerationRequest], Awaitable[CompletionGroup]]
"""Has the engine complete a request. Cancelling the awaited call, as a time limit does, cancels the request."""


class EnvironmentFailedError(RuntimeError):
    """Something failed that the policy did not cause. The trajectory is then in no loss and no baseline."""


def request_seed(seed: int, stream: str, cursor: int, row: int) -> int:
    """A 62-bit seed: a function of the run's seed, the stream, and the prompt's place in it alone."""
    return _digest(f"{seed}/{stream}/{cursor}/{row}")


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


@dataclass(frozen=True)
class Task:
    """One prompt and the attempts wanted at it.

    Attributes:
        prompt: One row: token IDs, text, columns, inputs, and media.
        attempts: Numbers of the attempts to make, from 0 to group size - 1. A retry has only those that failed.
        seed: Seed of the prompt, equal for all its attempts and for retries.
        sampling: Distribution, and the limit of one request.
        tokenizer: Tokenizer of the policy.
        max_model_len: Maximum number of tokens that the engine holds, context included.
        retry: How often these attempts failed before.
        name: Name in messages.
        ended: Called with an attempt as soon as it is over. What it raises must end the episode.
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
        """The dataset's row: column -> value."""
        return {name: values[0] for name, values in self.prompt.columns.items()}

    def turn_seed(self, attempt: int, turn: int) -> int:
        """The seed of a request: a function of (prompt's seed, attempt, turn) alone."""
        return _digest(f"{self.seed}/{attempt}/{turn}")

    def failed(self, cause: str) -> Trajectory:
        """An attempt of which only the prompt is left, for something that the policy did not cause."""
        ids = list(self.prompt.token_ids[0])
        row = TrajectoryRow(ids, [-1] * len(ids), [0.0] * len(ids), [-1] * len(ids))
        return Trajectory([row], "", "failure", failure=cause)


class Episode(ABC):
    """Makes the attempts at one prompt. All groups of a rollout run at once, as coroutines of one event loop.

    A limit that the policy ran into (turns, tokens, time) ends a trajectory with that `stop_reason`, and it is scored.
    What the policy can't have caused ends it with "failure" and `Trajectory.failure`: it is made again at most
    `max_retries` times and then is in no loss. An exception is a mistake in the program, and ends the run.

    Attributes:
        multi_turn: Whether a trajectory may have several turns or rows, other stop reasons than "stop" and "length", or
            fail. Logs then report how trajectories ended.
        max_retries: Maximum number of times that failed attempts are made again.
        max_failed: Fraction of a rollout's trajectories on a rank, in [0, 1], that may fail for good. More end the run.
        max_tokens: Maximum number of tokens of a trajectory's row, which sizes the engine; None for the engine's own.
        playing: Number of attempts whose environment lives now.
    """

    multi_turn: bool = True
    max_retries: int = 2
    max_failed: float = 0.5
    max_tokens: int | None = None
    playing: int = 0

    def setup(self, tokenizer: Any, processor: Any = None) -> None:  # noqa: B027 - most need none before a task
        """Takes the policy's tokenizer and, of a model with media, its `MediaProcessor`, before anything runs.

        Raises:
            ValueError: They don't fit.
        """

    def check_template(self) -> None:  # noqa: B027
        """Raises a ValueError if the actor must not have another chat template than the tokenizer's."""

    def check_prompts(self, prompts: PromptSource | PromptMixture) -> None:  # noqa: B027
        """Raises a ValueError for settings of the prompts that would have no effect."""

    @abstractmethod
    async def run(self, task: Task, ask: Ask) -> list[Trajectory]:
        """Makes the attempts `task.attempts`. If it is cancelled at an `await`, it must free what it holds.

        Args:
            task: Prompt and attempts.
            ask: Has the engine complete a request of at most `task.max_model_len` tokens. Any number may be asked for
                at once. Seeds should come from `Task.turn_seed`: two requests with one seed and prompt get the same
                completions.

        Returns:
            A trajectory per attempt, in their order.
        """

    async def close(self) -> None:  # noqa: B027 - only some hold anything
        """Frees what attempts share, when none runs any more."""


class SingleTurn(Episode):
    """One completion of the prompt per attempt, all asked for at once."""

    multi_turn = False
    max_retries = 0

    async def run(self, task: Task, ask: Ask) -> list[Trajectory]:
        request = task.prompt.request(0, task.sampling, task.seed, len(task.attempts))
        return one_turn(await ask(request))


def one_turn(group: CompletionGroup) -> list[Trajectory]:
    """Each completion as a trajectory of one turn."""
    prompt = list(group.request.token_ids)
    context, zeros = [-1] * len(prompt), [0.0] * len(prompt)
    trajectories = []
    for place, completion in enumerate(group.completions):
        assert completion.finish_reason != "suspended", "the collector waits until a completion is over"
        count = len(completion.token_ids)
        row = TrajectoryRow(
            token_ids=[*prompt, *completion.token_ids],
            turn_ids=context + [0] * count,
            logprobs=[*zeros, *completion.logprobs],
            policy_versions=context + group.versions(place),
            support=Support.joined((len(prompt), None), (count, completion.support)),
            routes=completion.routes,
        )
        trajectories.append(Trajectory([row], completion.text, completion.finish_reason))
    return trajectories
