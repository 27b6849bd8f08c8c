"""An environment that shows something in every turn."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from lightrl.environments import Environment, EnvironmentEpisode, Reply, Step
from lightrl.records import CompletionGroup, GenerationRequest, Prompts, Rollouts, SamplingParams
from lightrl.rollout.collector import ScoredGroup, collate
from tests.environments.scripted import alone
from tests.vision.conftest import picture

SIZES = [(16, 24), (16, 16), (32, 24), (24, 16)]


class Looks(Environment):
    """An image first, two in the second turn, none in the third, one in the fourth; then text."""

    def __init__(self) -> None:
        self.turn = 0

    def shown(self, *numbers: int) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = [{"type": "image", "image": picture(*SIZES[n], seed=n)} for n in numbers]
        return [*blocks, {"type": "text", "text": "what is it? <|image_pad|>"}]  # the last is text, and no image

    async def reset(self, row: Mapping[str, Any], *, seed: int) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.shown(0)}]

    async def step(self, reply: Reply) -> Step:
        self.turn += 1
        numbers = {1: (1, 2), 3: (3,)}.get(self.turn, ())
        content: Any = self.shown(*numbers) if numbers else "and then?"
        return Step([{"role": "user", "content": content}], reward=len(reply.content) / 10)


def played(engine: Any, folder: Any, number: int = 3) -> Rollouts:
    """Attempts at `Looks`, some turns of which are cut, asked of a started engine."""
    attempts = EnvironmentEpisode(Looks, max_turns=5, on_truncated="continue", max_tokens_per_turn=4)
    attempts.setup(folder.tokenizer, folder.processor)

    async def ask(request: GenerationRequest) -> CompletionGroup:
        (group,) = engine.generate_all([request])
        return group

    trajectories = asyncio.run(alone(attempts, ask, {}, SamplingParams(max_new_tokens=8), number=number))
    assert all(trajectory.failure is None for trajectory in trajectories), trajectories[0].failure
    prompts = Prompts(token_ids=[[0]], texts=["look"])
    return collate([ScoredGroup(prompts, trajectories, None)], 0, 1.0)
