"""How the attempts at one prompt come about: an episode asks the engine, once or turn by turn."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from lightrl.data.prompts import PromptMixture, PromptSource
from lightrl.records import (
    CompletionGroup,
    GenerationRequest,
    Prompts,
    SamplingParams,
    Support,
    Trajectory,
    TrajectoryRow,
)

Ask: TypeAlias = Callable[[GenerationRequest], Awaitable[CompletionGroup]]
"""Has the engine complete a request. Cancelling the awaited call (a time limit) cancels the request."""


def request_seed(seed: int, stream: str, cursor: int, row: int) -> int:
    """A 62-bit seed that depends on the run's seed, the stream, and the prompt's place in it, and on nothing else."""
    return _digest(f"{seed}/{stream}/{cursor}/{row}")


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


@dataclass(frozen=True)
class Task:
    """One prompt and the attempts wanted at it.

    Attributes:
        prompt: one row: token ids, text, columns, inputs and media.
        attempts: numbers of the attempts to make, 0 ... group size - 1; when failed ones are made again, only those.
        seed: of the prompt, equal for all its attempts. A retry has the same, so that it samples what the failure
            kept from being sampled.
        sampling: the distribution, and the limit of one request.
        tokenizer: of the policy.
        max_model_len: most tokens of context and completion together that the engine holds.
        retry: how often these attempts failed before.
        name: how messages call it.
        ended: called with an attempt as soon as it is over, where others of the group still run; the run then need
            not wait for them before it gives up. What it raises is to end the episode.
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
        """The data set's row: column -> value."""
        return {name: values[0] for name, values in self.prompt.columns.items()}

    def turn_seed(self, attempt: int, turn: int) -> int:
        """The seed of one request of an attempt: a function of (prompt's seed, attempt, turn) alone."""
        return _digest(f"{self.seed}/{attempt}/{turn}")

    def failed(self, cause: str) -> Trajectory:
        """An attempt of which nothing is left, for something that the policy did not cause: the prompt alone."""
        ids = list(self.prompt.token_ids[0])
        row = TrajectoryRow(ids, [-1] * len(ids), [0.0] * len(ids), [-1] * len(ids))
        return Trajectory([row], "", "failure", failure=cause)


class Episode(ABC):
    """Makes the attempts at one prompt. All groups of a rollout run at once, as coroutines of one event loop.

    Three things may go wrong. What the policy caused (no turns, tokens or time left) ends a trajectory with that
    `stop_reason`: it is scored. What it cannot have caused ends it with "failure" and `Trajectory.failure`: it is made
    again at most `max_retries` times and then is in no loss. An exception is a mistake in the program: it ends the run.

    Attributes:
        multi_turn: whether a trajectory may have several turns or rows, stop reasons beside "stop" and "length", or
            fail; logs then say how trajectories ended.
        max_retries: times that failed attempts are made again.
        max_failed: fraction of a rollout's trajectories on a rank, in [0, 1], that may have failed for good; with
            more the run stops with the cause.
        max_tokens: most tokens of one row of a trajectory, by which the engine is sized; None for what the engine
            holds.
        playing: attempts whose environment lives now; 0 where there are no environments.
    """

    multi_turn: bool = True
    max_retries: int = 2
    max_failed: float = 0.5
    max_tokens: int | None = None
    playing: int = 0

    def setup(self, tokenizer: Any, processor: Any = None) -> None:  # noqa: B027 - most need none before a task
        """Takes the policy's tokenizer and, of a model with images and the like, its `MediaProcessor`; a ValueError if
        they will not do. Before anything runs."""

    def check_template(self) -> None:  # noqa: B027
        """Refuses, with a ValueError, that the actor has a chat template in place of the tokenizer's own."""

    def check_prompts(self, prompts: PromptSource | PromptMixture) -> None:  # noqa: B027
        """Raises a ValueError about settings of the prompts that would have no effect."""

    @abstractmethod
    async def run(self, task: Task, ask: Ask) -> list[Trajectory]:
        """Makes the attempts `task.attempts`.

        Args:
            task: the prompt and the attempts.
            ask: has the engine complete a request; any number may be asked for at once. A request must fit into
                `task.max_model_len`, and its seed should come from `Task.turn_seed`: two with one seed and
                prompt get the same completions, and with `InFlight` what has been sampled is kept under both.

        Returns:
            a trajectory per attempt, in their order. It may be cancelled at any `await` and must then free what it
            holds.
        """

    async def close(self) -> None:  # noqa: B027 - only some hold anything
        """Frees what episodes share, when none runs any more."""


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
    context, nothing = [-1] * len(prompt), [0.0] * len(prompt)
    trajectories = []
    for place, completion in enumerate(group.completions):
        count = len(completion.token_ids)
        row = TrajectoryRow(
            token_ids=[*prompt, *completion.token_ids],
            turn_ids=context + [0] * count,
            logprobs=[*nothing, *completion.logprobs],
            policy_versions=context + group.versions(place),
            support=Support.joined((len(prompt), None), (count, completion.support)),
            routes=completion.routes,
        )
        assert completion.finish_reason != "suspended", "the collector waits until a completion is over"
        trajectories.append(Trajectory([row], completion.text, completion.finish_reason))
    return trajectories
