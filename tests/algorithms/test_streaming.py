"""Learning from groups while others generate: the gradient, weights and metrics of the serial path, or a refusal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything

from lightrl.algorithms import CriticSpec, GRPOLightningModule, PPOLightningModule, RLOOLightningModule
from lightrl.algorithms.batches import join_pieces, start_experience
from lightrl.algorithms.hooks import RLCallback
from lightrl.callbacks import RewardNormalization, WeightSync
from lightrl.data.sft import SFTSource
from lightrl.distributed.reduction import Reduction
from lightrl.models.spec import ModelSpec
from lightrl.objectives.advantages import GAE, GroupRelative
from lightrl.objectives.aggregation import SequenceMean
from lightrl.objectives.kl import KLInLoss, KLInReward
from lightrl.records import Experience, Piece, Prompts, Rollouts, SamplingParams, Trajectory, TrajectoryRow
from lightrl.rollout.collation import ScoredGroup, collate
from tests.toys import Keep, ThreadEngine, digits_reward, quiet_trainer, sgd, sums_data
from tests.waiting import until


class Pieces(ThreadEngine):
    """Hands groups out in an order of its own, and at some of them waits until all that are out are learnt from.

    Args:
        order: of a rollout's groups.
        waits: at which groups; every one where None.
    """

    def __init__(self, order: Callable[[list[Any]], Any] = reversed, waits: tuple[int, ...] | None = (2, 5)) -> None:
        super().__init__()
        self.order, self.waits, self.learnt = order, waits, 0

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        self.learnt = 0
        for number, group in enumerate(self.order(list(super().generate(*args, **kwargs)))):
            if self.waits is None or number in self.waits:
                until(lambda: self.learnt >= number * len(group.completions))  # noqa: B023
            yield group

    def counts(self, module: PPOLightningModule) -> list[int]:
        """The rows of each piece that the module learns from, as they come."""
        pieces, original = [], module.make_experience

        def make_experience(rollouts: Any, reduction: Any) -> Any:
            pieces.append(len(rollouts))
            experience = original(rollouts, reduction)
            self.learnt += len(rollouts)
            return experience

        module.make_experience = make_experience  # type: ignore[method-assign]
        return pieces


def fit(module: PPOLightningModule, *callbacks: Any, rollouts: int = 2, **data: Any) -> Keep:
    seed_everything(0, verbose=False)
    watch = Keep()
    arguments = {
        "engine": ThreadEngine(),
        "sampling": SamplingParams(max_new_tokens=12),
        "rollouts_per_epoch": rollouts,
    }
    quiet_trainer(callbacks=[WeightSync(), watch, *callbacks]).fit(module, sums_data(**{**arguments, **data}))
    return watch


def only_first_sum(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """All groups but two are without spread."""
    return [float(i) if prompt.endswith("0=") else 1.0 for i, prompt in enumerate(prompts)]


MAKE: dict[str, Callable[[str], PPOLightningModule]] = {
    "grpo": lambda path: GRPOLightningModule(path, kl=KLInLoss("k2"), optimizer=sgd, mask_truncated=True),
    "grpo, entropy": lambda path: GRPOLightningModule(
        path, kl=None, entropy_coef=0.01, optimizer=sgd, max_grad_norm=0.1
    ),
    "rloo": lambda path: RLOOLightningModule(path, kl=KLInReward(), optimizer=sgd, reward_clip=0.5, advantage_clip=0.2),
    "grpo, lora": lambda path: GRPOLightningModule(lora(path), kl=KLInLoss("k2"), optimizer=sgd),
    "ppo": lambda path: PPOLightningModule(path, ppo_epochs=1, whiten_advantages=False, optimizer=sgd),
    "ppo, shared": lambda path: PPOLightningModule(
        path, CriticSpec(shared=True), ppo_epochs=1, whiten_advantages=False, optimizer=sgd
    ),
}


def lora(path: str) -> ModelSpec:
    from lightrl.models.spec import LoraSpec

    return ModelSpec(path, lora=LoraSpec(r=4))


def compare(serial: Keep, streamed: Keep) -> None:
    """The first gradients to rounding; later ones are of weights that differ by that already."""
    for number, (ours, expected) in enumerate(zip(streamed.gradients, serial.gradients, strict=True)):
        assert (ours - expected).norm() <= (1e-5 if number else 1e-6) * expected.norm()
    for ours, expected in zip(streamed.metrics, serial.metrics, strict=True):
        assert ours.keys() - expected.keys() <= {"time/wait"} and not expected.keys() - ours.keys()
        for name in expected:
            if not name.startswith("time/"):
                assert ours[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("name", MAKE)
def test_the_update_is_that_of_the_serial_path(name: str, side_model: str) -> None:
    modules, engine = [MAKE[name](side_model), MAKE[name](side_model)], Pieces()
    pieces = engine.counts(modules[1])
    watches = [fit(modules[0]), fit(modules[1], engine=engine, streaming=True)]
    compare(*watches)
    assert sum(pieces) == 64 and len(pieces) >= 6, "two rollouts of at least three pieces each"
    for ours, expected in zip(modules[1].actor.parameters(), modules[0].actor.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)
    for ours, expected in zip(watches[1].rollouts, watches[0].rollouts, strict=True):
        assert ours.prompts == expected.prompts and ours.completions == expected.completions
        assert torch.equal(ours.token_ids, expected.token_ids) and torch.equal(ours.rewards, expected.rewards)
    for ours, expected in zip(watches[1].experiences, watches[0].experiences, strict=True):
        for field in ("token_ids", "response_mask", "group_ids", "rewards", "valid"):
            assert torch.equal(getattr(ours, field), getattr(expected, field)), field
        for field in ("advantages", "old_logprobs", "ref_logprobs", "values", "returns"):
            left, right = getattr(ours, field), getattr(expected, field)
            assert (left is None) == (right is None), field
            if right is not None:
                torch.testing.assert_close(left, right, atol=1e-5, rtol=1e-4)


@pytest.mark.vllm
@pytest.mark.slow
def test_with_vllm_the_update_begins_before_the_last_group_is_sampled(side_engine: Any, side_model: str) -> None:
    arguments: dict[str, Any] = {"engine": side_engine, "group_size": 8, "prompts_per_rollout": 16}
    arguments["sampling"] = SamplingParams(max_new_tokens=56)
    serial = fit(MAKE["grpo"](side_model), **arguments)
    module, begun, scored = MAKE["grpo"](side_model), [], []
    original = module.compute_loss
    module.compute_loss = lambda m: (begun.append(time.perf_counter()), original(m))[1]  # type: ignore[method-assign]

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        scored.append(time.perf_counter())
        return digits_reward(prompts, completions)

    streamed = fit(module, streaming=True, rewards=[reward], reward_names=["digits_reward"], **arguments)
    compare(serial, streamed)
    assert len(scored) == 32 and begun[0] < scored[15], "the whole of the first rollout came before its first gradient"


def with_spread_last(groups: list[Any]) -> list[Any]:
    """The groups that `only_first_sum` tells apart after all others: the last digit is that which all begin with."""
    return sorted(groups, key=lambda group: group.request.token_ids[-2] == group.request.token_ids[0])


def with_spread_first(groups: list[Any]) -> list[Any]:
    return with_spread_last(groups)[::-1]


@pytest.mark.parametrize("order", [with_spread_first, with_spread_last])
def test_rows_without_advantage_are_not_run(order: Callable[[list[Any]], Any], side_model: str) -> None:
    rows: list[int] = []
    modules = [GRPOLightningModule(side_model, kl=None, optimizer=sgd) for _ in range(2)]
    original = modules[1].compute_loss
    modules[1].compute_loss = lambda m: (rows.append(int(m.response_mask.any(1).sum())), original(m))[1]  # type: ignore[method-assign]
    engine = Pieces(order, waits=None)
    pieces = engine.counts(modules[1])
    common: dict[str, Any] = {"rollouts": 1, "rewards": [only_first_sum], "prompts_per_rollout": 16}
    compare(fit(modules[0], **common), fit(modules[1], engine=engine, streaming=True, **common))
    assert pieces == [4] * 16 and 4 <= sum(rows) < 16


def episode(turns: int, shown: int) -> ScoredGroup:
    """A group of one attempt: turns of a token each with a token between, and this many images."""
    tokens = 2 * turns
    row = TrajectoryRow(
        list(range(5, 5 + tokens)),
        [turn for i in range(turns) for turn in (-1, i)],
        [0.0, -1.0] * turns,
        [-1, 3] * turns,
        inputs={"pixel_values": torch.ones(shown)} if shown else None,
    )
    return ScoredGroup(Prompts([[5]], ["5"]), [Trajectory([row], "6", turn_rewards=[1.0] * turns)], None)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_what_only_some_pieces_have_is_that_of_the_whole(order: list[int]) -> None:
    """Turns after the first, and images that an environment shows."""
    groups = [episode(1, 0), episode(3, 2)]
    whole = collate(groups, 0, 1.0)
    pieces = [Piece(torch.tensor([n]), collate([groups[n]], 0, 1.0, [n]), last=n == order[-1]) for n in order]
    assert [piece.rollouts.turn_ids is None for piece in pieces] == [n == 0 for n in order]
    joined = join_pieces(whole, [(piece, start_experience(piece.rollouts)) for piece in pieces])
    expected = start_experience(whole)
    for name in ("token_ids", "response_mask", "engine_logprobs", "trajectory_ids", "turn_ids", "rewards"):
        assert torch.equal(getattr(joined, name), getattr(expected, name)), name
    assert [len(inputs.get("pixel_values", ())) for inputs in joined.inputs] == [0, 2]


class Changes(RLCallback):
    def on_rollout_scored(self, trainer: Any, module: Any, rollouts: Rollouts) -> None:
        rollouts.rewards = rollouts.rewards + 1.0


class ChangesAdvantages(RLCallback):
    def on_experience_made(self, trainer: Any, module: Any, experience: Experience) -> None:
        experience.advantages *= 2


class OwnMinibatches(GRPOLightningModule):
    def minibatches(self, experience: Experience) -> Any:
        return super().minibatches(experience)


REFUSED: dict[str, tuple[Callable[[str], PPOLightningModule], tuple[Any, ...], str]] = {
    "epochs": (lambda path: GRPOLightningModule(path, kl=None, ppo_epochs=2), (), "ppo_epochs=2"),
    "minibatches": (lambda path: GRPOLightningModule(path, kl=None, minibatch_size=16), (), "minibatch_size=16"),
    "scope": (
        lambda path: GRPOLightningModule(path, kl=None, advantage=GroupRelative("batch")),
        (),
        "advantage=GroupRelative",
    ),
    "whitening": (lambda path: PPOLightningModule(path, ppo_epochs=1), (), "whiten_advantages=True"),
    "entropy": (lambda path: GRPOLightningModule(path, kl=None, top_entropy_fraction=0.2), (), "top_entropy_fraction"),
    "counts": (
        lambda path: PPOLightningModule(
            path, advantage=GAE(), aggregation=SequenceMean(), ppo_epochs=1, whiten_advantages=False
        ),
        (),
        "aggregation=SequenceMean",
    ),
    "hook": (lambda path: OwnMinibatches(path, kl=None), (), "OwnMinibatches overrides minibatches"),
    "normalisation": (
        lambda path: GRPOLightningModule(path, kl=None),
        (RewardNormalization(),),
        "callback RewardNormalization changes rewards",
    ),
    "a callback": (lambda path: GRPOLightningModule(path, kl=None), (Changes(),), "changed the rewards in on_roll"),
    "another": (lambda path: GRPOLightningModule(path, kl=None), (ChangesAdvantages(),), "changed the advantages"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_update_is_refused(name: str, side_model: str) -> None:
    make, callbacks, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"(?s){message}.*streaming=False"):
        fit(make(side_model), *callbacks, streaming=True)


def test_ptx_is_refused_with_streaming() -> None:
    with pytest.raises(ValueError, match="streaming=True with ptx"):
        sums_data(engine=ThreadEngine(), streaming=True, ptx=SFTSource(rows=[{"prompt": "1", "completion": "2"}]))


class Hooks(GRPOLightningModule):
    """A user's subclass that doubles advantages and losses and counts the rows that come through its hooks."""

    def __init__(self, path: str) -> None:
        super().__init__(path, kl=None, optimizer=sgd)
        self.rows = {"make_experience": 0, "compute_advantages": 0}

    def make_experience(self, rollouts: Rollouts, reduction: Reduction | None = None) -> Experience:
        self.rows["make_experience"] += len(rollouts)
        return super().make_experience(rollouts, reduction)

    def compute_advantages(self, experience: Any, token_rewards: Any, rollouts: Any) -> Any:
        self.rows["compute_advantages"] += len(rollouts)
        advantages, returns = super().compute_advantages(experience, token_rewards, rollouts)
        return advantages * 2, returns

    def compute_loss(self, minibatch: Any) -> Any:
        loss, metrics = super().compute_loss(minibatch)
        return loss * 2, metrics


def test_a_subclass_keeps_its_hooks(side_model: str) -> None:
    modules = [Hooks(side_model), Hooks(side_model)]
    compare(*(fit(module, streaming=streaming) for module, streaming in zip(modules, (False, True), strict=True)))
    assert modules[0].rows == modules[1].rows == {"make_experience": 64, "compute_advantages": 64}


class Whole(GRPOLightningModule):
    """A user's own step, which knows nothing of pieces."""

    def training_step(self, rollouts: Any, batch_idx: int) -> Any:
        assert rollouts.rewards.shape == (32,) and rollouts.select(torch.tensor([3, 1])).rewards.shape == (2,)
        assert len(rollouts.crop()) == len(rollouts) == len(rollouts.whole()) == 32
        return super().training_step(rollouts, batch_idx)


class Reads(Callback):
    """Looks at the batch before the step, as callbacks may."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        assert int(batch.attention_mask.sum()) > 0


def test_code_that_knows_nothing_of_pieces_sees_the_whole(side_model: str) -> None:
    serial = fit(GRPOLightningModule(side_model, kl=None, optimizer=sgd))
    compare(serial, fit(Whole(side_model, kl=None, optimizer=sgd), streaming=True))
    compare(serial, fit(GRPOLightningModule(side_model, kl=None, optimizer=sgd), Reads(), streaming=True))


def test_an_error_while_others_generate_ends_the_thread(side_model: str) -> None:
    module = GRPOLightningModule(side_model, kl=None, optimizer=sgd)
    module.compute_loss = lambda m: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        fit(module, streaming=True)
    assert not [t for t in threading.enumerate() if t.name == "lightrl-sampling"]
