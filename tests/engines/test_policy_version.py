"""Updates, syncs, broken pushes, restarts and cancellations in any order: which policy an engine samples from.

A model of a few lines knows the policy version that the engine must have. Whatever is sampled carries that version, and
log-probs that the trainer's own model of that version gives.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lightrl.callbacks import WeightSync
from lightrl.engines import EngineContext, TransformersEngine
from lightrl.records import Prompts, SamplingParams
from tests.engines.conftest import build_model, change, load, reference_logprobs

SAMPLING = SamplingParams(max_new_tokens=5, temperature=0.7)
PROMPTS = Prompts(token_ids=[[3, 4, 5], [6, 7], [8, 9, 10, 11]], texts=["", "", ""])


@cache
def folder() -> Path:
    """A model's folder, the same for all examples."""
    place = Path(tempfile.mkdtemp())
    build_model(place, tied=True)
    return place


@cache
def policy(version: int) -> Any:
    """The trainer's model after so many updates."""
    return change(load(folder()), seed=version) if version else load(folder())


class Learner:
    """What a weight sync asks of the module."""

    device = torch.device("cpu")
    policy_version = 0

    @property
    def actor(self) -> Any:
        lm = policy(self.policy_version)
        return SimpleNamespace(lm=lm, has_experts=False, parameters=lm.parameters)

    def named_policy_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(policy(self.policy_version).named_parameters())

    def token_logprobs(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = [reference_logprobs(self.actor.lm, row) for row in tokens.tolist()]
        return torch.nn.functional.pad(torch.stack(rows), (1, 0))

    def all_max(self, value: torch.Tensor) -> torch.Tensor:
        return value


class Machine(RuleBasedStateMachine):
    """One engine and one learner; `version` is what the engine's policy version must be."""

    engine: Any
    version = -1

    def begin(self) -> None:
        self.engine.start(EngineContext(str(folder()), max_prompt_tokens=8, max_new_tokens=5))
        self.version = -1

    @initialize()
    def first_start(self) -> None:
        self.learner: Any = Learner()
        self.engine = TransformersEngine()
        self.begin()

    @property
    def samples(self) -> bool:
        """Whether a run would sample now: the versions agree."""
        return self.version == self.learner.policy_version

    @rule()
    def update(self) -> None:
        self.learner.policy_version += 1

    @rule()
    def sync(self) -> None:
        WeightSync().ensure_synced(self.learner, self.engine)
        self.version = self.learner.policy_version

    @rule(after=st.integers(0, 5))
    def a_push_breaks_off(self, after: int) -> None:
        def tensors() -> Iterator[Any]:
            for number, pair in enumerate(policy(self.learner.policy_version + 1).named_parameters()):
                if number == after:
                    raise ZeroDivisionError
                yield pair

        with pytest.raises(ZeroDivisionError):
            self.engine.load_weights(tensors(), policy_version=self.learner.policy_version)
        self.version = -1

    @rule()
    def a_push_lacks_weights(self) -> None:
        weights = list(policy(self.learner.policy_version).named_parameters())
        with pytest.raises(ValueError, match="norm"):
            self.engine.load_weights(weights[:-1], policy_version=self.learner.policy_version)
        self.version = -1

    @rule()
    def forget(self) -> None:
        self.engine.mark_stale()
        self.version = -1

    @rule()
    def restart(self) -> None:
        self.engine.close()
        assert not self.engine.started
        self.begin()

    def check(self, groups: list[Any], versions: set[int]) -> None:
        for group in groups:
            assert group.policy_version in versions
            for completion in group.completions:
                ids = group.request.token_ids
                expected = reference_logprobs(policy(group.policy_version), ids + completion.token_ids, 0.7)
                torch.testing.assert_close(
                    torch.tensor(completion.logprobs), expected[len(ids) - 1 :], atol=5e-5, rtol=0
                )

    def requests(self, seed: int) -> list[Any]:
        return [PROMPTS.request(i, SAMPLING, seed + i, 2) for i in range(len(PROMPTS.token_ids))]

    @precondition(lambda self: self.samples)
    @rule(seed=st.integers(0, 3))
    def sample(self, seed: int) -> None:
        groups = self.engine.generate_all(self.requests(seed))
        assert len(groups) == 3
        self.check(groups, {self.version})

    @invariant()
    def the_version_is_the_models(self) -> None:
        if self.engine is not None:
            assert self.engine.policy_version == self.version

    def teardown(self) -> None:
        if self.engine is not None:
            self.engine.close()


Machine.engine = None


TestEngineHere = Machine.TestCase
TestEngineHere.settings = settings(
    max_examples=12,
    stateful_step_count=12,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
