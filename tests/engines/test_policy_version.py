"""Updates, syncs, broken pushes, and restarts in any order: which policy an engine samples from.

A model of a few lines knows the policy version that the engine must have. Whatever is sampled carries that version, and
log-probs that the trainer's own model of that version gives.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightrl.callbacks import WeightSync
from lightrl.engines import EngineContext, TransformersEngine
from lightrl.records import Prompts, SamplingParams
from tests.engines.conftest import change, load, reference_logprobs

SAMPLING = SamplingParams(max_new_tokens=5, temperature=0.7)
PROMPTS = Prompts(token_ids=[[3, 4, 5], [6, 7], [8, 9, 10, 11]], texts=["", "", ""])


class Learner:
    """What a weight sync asks of the module, and the trainer's model after so many updates."""

    device = torch.device("cpu")
    policy_version = 0

    def __init__(self, folder: Path) -> None:
        self.policies = [load(folder), *(change(load(folder), seed) for seed in range(1, 9))]

    @property
    def actor(self) -> Any:
        lm = self.policies[self.policy_version]
        return SimpleNamespace(lm=lm, has_experts=False, parameters=lm.parameters)

    def named_policy_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.policies[self.policy_version].named_parameters())

    def token_logprobs(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = [reference_logprobs(self.actor.lm, row) for row in tokens.tolist()]
        return torch.nn.functional.pad(torch.stack(rows), (1, 0))

    def all_max(self, value: torch.Tensor) -> torch.Tensor:
        return value


def broken_off(weights: list[Any], after: int) -> Iterator[Any]:
    yield from weights[:after]
    raise ZeroDivisionError


@pytest.mark.parametrize("seed", range(6))
def test_an_engine_samples_from_the_policy_that_it_names(seed: int, tied_folder: Path) -> None:
    """`version` is what the engine's policy version must be."""
    draw, learner, engine, version = random.Random(seed), Learner(tied_folder), TransformersEngine(), -1
    start = partial(engine.start, EngineContext(str(tied_folder), max_prompt_tokens=8, max_new_tokens=5))
    start()
    for _ in range(30):
        weights = list(learner.named_policy_weights())
        action = draw.choice(["update", "sync", "sync", "broken push", "lacking push", "forget", "restart"])
        if action == "update" and learner.policy_version < 8:
            learner.policy_version += 1
        elif action == "sync":
            WeightSync().ensure_synced(learner, engine)  # type: ignore[arg-type]
            version = learner.policy_version
        elif action == "broken push":
            with pytest.raises(ZeroDivisionError):
                engine.load_weights(broken_off(weights, draw.randrange(6)), policy_version=learner.policy_version)
        elif action == "lacking push":
            with pytest.raises(ValueError, match="norm"):
                engine.load_weights(weights[:-1], policy_version=learner.policy_version)
        elif action == "forget":
            engine.mark_stale()
        elif action == "restart":
            engine.close()
            start()
        if action not in ("update", "sync"):
            version = -1
        assert engine.policy_version == version, action
        if version == learner.policy_version:  # a run would sample now
            for group in engine.generate_all([PROMPTS.request(i, SAMPLING, seed + i, 2) for i in range(3)]):
                assert group.policy_version == version
                for completion in group.completions:
                    ids = group.request.token_ids
                    expected = reference_logprobs(learner.policies[version], ids + completion.token_ids, 0.7)
                    found = torch.tensor(completion.logprobs)
                    torch.testing.assert_close(found, expected[len(ids) - 1 :], atol=5e-5, rtol=0)
    engine.close()
