"""Attempts in environments as the episodes of a rollout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, final

from lightrl.data.prompts import PromptMixture, PromptSource
from lightrl.environments import AgentProgram, Attempts, Environment
from lightrl.rollout.episodes import Ask, Episode, Task
from lightrl.types import CompletionGroup, GenerationRequest, Trajectory

__all__ = ["AgentEpisode", "EnvironmentEpisode"]


class _Played(Episode):
    """Plays a group by what has the interface of `Attempts`."""

    def __init__(self, attempts: Attempts | AgentProgram, max_retries: int, max_failed: float) -> None:
        if max_retries < 0:
            raise ValueError(f"environment.max_retries={max_retries}: must be 0 (give up at once) or more.")
        if not 0 <= max_failed <= 1:
            raise ValueError(f"environment.max_failed={max_failed}: must be a fraction in [0, 1].")
        self.max_retries = max_retries
        self.max_failed = max_failed
        self.attempts = attempts

    @property
    def max_tokens(self) -> int | None:
        """See `Episode.max_tokens`."""
        return self.attempts.max_tokens

    @property
    def playing(self) -> int:
        """See `Episode.playing`."""
        return self.attempts.playing

    def setup(self, tokenizer: Any) -> None:
        """See `Episode.setup`."""
        self.attempts.setup(tokenizer)

    def check_prompts(self, prompts: PromptSource | PromptMixture) -> None:
        """See `Episode.check_prompts`."""
        for source in prompts.sources if isinstance(prompts, PromptMixture) else [prompts]:
            if source.system_prompt is not None:
                raise ValueError(
                    "prompts.system_prompt with an environment: its `reset` makes the first messages. Put the system's "
                    "turn there, or into the prompt, a conversation."
                )
            if source.template_kwargs:
                raise ValueError("prompts.template_kwargs with an environment: set environment.template_kwargs.")
            if source.max_prompt_tokens is not None and source.overlong == "truncate_left":
                raise ValueError(
                    'prompts.overlong="truncate_left" with an environment, which gets the row and not its tokens: take '
                    '"drop" or "error".'
                )

    async def run(self, task: Task, ask: Ask) -> list[Trajectory]:
        """See `Episode.run`."""
        if task.prompt.media and task.prompt.media[0]:
            raise ValueError(f"{task.name} has media: environments are text only so far. Leave such rows out.")

        async def named(request: GenerationRequest) -> CompletionGroup:
            return await ask(replace(request, name=f"{request.name} at {task.name}"))

        return await self.attempts.group(
            {**task.columns, "prompt": task.prompt.raw[0]},
            named,
            attempts=task.attempts,
            seed=task.seed,
            turn_seed=task.turn_seed,
            sampling=task.sampling,
            max_model_len=task.max_model_len,
        )


@final
class EnvironmentEpisode(_Played):
    """Plays each attempt in an environment of its own. The arguments of `Attempts`, and:

    A group's environments are reset with one row, its columns and the column `prompt`, and one seed.

    Args:
        environment: makes one; in YAML a class with its arguments. Called once for each attempt.
        max_retries: times that an attempt is made again that failed for something the policy did not cause.
        max_failed: fraction of a rollout's trajectories on a rank, in [0, 1], that may have failed for good; with
            more the run stops with the cause.
        settings: limits, parsing and templates, see `Attempts`.
    """

    def __init__(
        self, environment: Callable[[], Environment], max_retries: int = 2, max_failed: float = 0.5, **settings: Any
    ) -> None:
        super().__init__(Attempts(environment, **settings), max_retries, max_failed)


class AgentEpisode(_Played):
    """Has each attempt made by a program that takes the policy for a model server, see `AgentProgram`.

    The program gets the row's columns and the column `prompt`.

    Args:
        program: and its limits.
        max_retries: times that an attempt is made again that failed for something the policy did not cause.
        max_failed: fraction of a rollout's trajectories on a rank, in [0, 1], that may have failed for good; with
            more the run stops with the cause.
    """

    def __init__(self, program: AgentProgram, max_retries: int = 2, max_failed: float = 0.5) -> None:
        super().__init__(program, max_retries, max_failed)
