"""Features together with environments and programs: what docs/combinations.md lists is run here, or rejected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightrl.algorithms import CriticSpec, DistillLightningModule, GRPOLightningModule, PPOLightningModule
from lightrl.algorithms.module import ExtraLosses, Shaping, Updates
from lightrl.callbacks import AdaptiveKL, RewardNormalization, RolloutWriter
from lightrl.callbacks.rollout_writer import load_rollouts
from lightrl.data.curriculum import PromptCurriculum
from lightrl.data.prompts import PromptSource
from lightrl.engines import ServerEngine
from lightrl.models.spec import LoraSpec, ModelSpec
from lightrl.objectives import GSPO, GiGPO, GroupRelative, KLInLoss, ReverseKL, TurnGAE, TurnReturns
from lightrl.records import SamplingParams
from lightrl.rollout import Ahead, Evaluation, InFlight, PTXSource
from tests.rollout.tasks import Keep, Letters, chat_model, fit, gap, sgd, talk
from tests.toys import ThreadEngine

WAYS = ("environment", "program")


class Turns(Letters):
    """`Letters` whose replies are rewarded by their length, so that turns and attempts differ."""

    async def step(self, reply: Any) -> Any:
        step = await super().step(reply)
        step.reward += len(reply.content) / 100
        return step


class Start(Callback):
    """Remembers the policy before the first update."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.weights = {name: value.clone() for name, value in module.actor.state_dict().items()}


@dataclass
class Run:
    """A run that has ended: the policy before it, the module after it, and what its hooks saw."""

    before: dict[str, torch.Tensor]
    module: Any
    keep: Keep

    @property
    def moved(self) -> set[str]:
        """Names of the parameters that have changed."""
        now = self.module.actor.state_dict()
        return {name for name, value in now.items() if not value.equal(self.before[name])}


@dataclass
class Where:
    """What a run is made of, and what ends with it."""

    path: str
    folder: Path
    way: str
    ended: list[Callable[[], None]] = field(default_factory=list)

    def run(self, **arguments: Any) -> Run:
        """A rollout of two groups of four, and its update."""
        settings: dict[str, Any] = {"prompts_per_rollout": 2, "rollouts_per_epoch": 1, **arguments}
        settings |= {"environment": Turns} if self.way == "environment" else {"program": talk}
        module, start = settings.pop("build", grpo)(self.path), Start()
        _, keep = fit(self.path, [*settings.pop("callbacks", ()), start], module, **settings)
        return Run(start.weights, module, keep)


def grpo(path: str, spec: Any = None, **arguments: Any) -> Any:
    settings = {"kl": None, "optimizer": sgd, "advantage": GroupRelative(scale="none"), **arguments}
    return GRPOLightningModule(ModelSpec(path, **(spec or {})), **settings)


def critic(path: str, **arguments: Any) -> Any:
    return PPOLightningModule(path, CriticSpec(), **{"kl": None, "optimizer": sgd, "ppo_epochs": 1, **arguments})


def built(make: Callable[..., Any], *spec: Any, **arguments: Any) -> Callable[[Where], dict[str, Any]]:
    """A run whose module is made like this."""
    return lambda where: {"build": lambda path: make(path, *spec, **arguments)}


def other_model(path: str, name: str, **kwargs: Any) -> str:
    """Another model with the same tokens."""
    folder = Path(path).parent / name
    return str(folder) if folder.exists() else chat_model(folder, **kwargs)


def distill(path: str, **arguments: Any) -> Any:
    return DistillLightningModule(path, {"one": other_model(path, "teacher", seed=1)}, optimizer=sgd, **arguments)


def served(where: Where) -> dict[str, Any]:
    pytest.importorskip("uvicorn")
    from tests.engines.sglang_server import SGLangServer

    server = SGLangServer(where.path, max_model_len=512)
    url = server.start()
    where.ended.append(server.stop)
    return {"engine": ServerEngine([url], kind="sglang", shared_folder=str(where.folder / "weights"))}


def lengths(completions: list[str], word: list[str], **_: Any) -> list[float]:
    return [-100.0 if w == "one" else float(len(text)) for text, w in zip(completions, word, strict=True)]


def turns_differ(run: Run, where: Where) -> bool:
    """Whether turns of one trajectory have different advantages."""
    turns = run.keep.rollouts[0].turn_ids
    assert turns is not None
    rows = zip(run.keep.experiences[0].advantages, turns, strict=True)
    return any(len({round(float(a), 6) for a in advantages[turn >= 0]}) > 1 for advantages, turn in rows)


def like_the_padded_layout(run: Run, where: Where) -> bool:
    twin = where.run(build=lambda path: grpo(path, {"layout": "padded"})).module.actor.state_dict()
    mine = run.module.actor.state_dict()
    return all(torch.allclose(mine[name], value, atol=1e-6) for name, value in twin.items())


def replayed(run: Run, where: Where) -> bool:
    """Whether only the replay of the engine's experts closes the gap between its log-probs and the trainer's."""
    rows, module = run.keep.rollouts[0], grpo(other_model(where.path, "experts", experts=True))
    module.build_models()
    return gap(module, rows, rows.routes) < 1e-5 and gap(module, rows, ()) > 1e-3


def saved(run: Run, where: Where) -> bool:
    """Whether 8 trajectories have turns, and log-probs of the policy that sampled them and of the one that is now."""
    records = load_rollouts(where.folder / "rollouts" / "rollout=000001")[1]
    rows = [row for record in records for row in record["rows"]]
    sampled = [(row, i) for row in rows for i, turn in enumerate(row["turns"]) if turn >= 0]
    moved = [abs(row["new_logprobs"][i] - row["old_logprobs"][i]) for row, i in sampled]
    return (
        [len(record["turns"]) > 0 for record in records] == [True] * 8
        and all(abs(row["old_logprobs"][i] - row["engine_logprobs"][i]) < 2e-5 for row, i in sampled)
        and 1e-4 < max(moved) < 10
    )


def stale(schedule: Any) -> Callable[[Where], dict[str, Any]]:
    return lambda where: {"engine": ThreadEngine(), "schedule": schedule(), "rollouts_per_epoch": 3}


def one_behind(run: Run, where: Where) -> bool:
    return [m["rollout/staleness"] for m in run.keep.metrics] == [0, 1, 1]


SIX = {"max_new_tokens": 6}
FOUR = PromptSource(rows=[{"prompt": f"say {word}", "word": word} for word in "abab"])
RUNS: dict[str, tuple[Callable[[Where], dict[str, Any]], Callable[[Run, Where], bool]]] = {
    "`ServerEngine`": (served, lambda run, where: True),
    "`schedule: Ahead`": (stale(Ahead), one_behind),
    "`schedule: InFlight`": (stale(InFlight), one_behind),
    "`dynamic_sampling_rounds`": (
        lambda where: {"dynamic_sampling_rounds": 2, "rewards": [lengths], "prompts_per_rollout": 4},
        lambda run, where: len(set(run.keep.rollouts[0].trajectory_ids.tolist())) == 16,
    ),
    "LoRA": (
        built(grpo, {"lora": LoraSpec(r=2)}),
        lambda run, where: all("lora_" in name for name in run.moved),
    ),
    "routing replay": (
        lambda where: {"build": lambda path: grpo(other_model(path, "experts", experts=True))},
        replayed,
    ),
    "`shared_prefix`, cut by `micro_batch_tokens`": (
        built(grpo, {"layout": "shared_prefix"}, updates=Updates(micro_batch_tokens=128)),
        like_the_padded_layout,
    ),
    "`GSPO`": (built(grpo, loss=GSPO()), lambda run, where: True),
    "a critic": (
        built(critic),
        lambda run, where: bool((run.keep.experiences[0].values[run.keep.rollouts[0].response_mask] != 0).all()),
    ),
    "`TurnReturns`": (built(grpo, advantage=TurnReturns(gamma=0.5)), turns_differ),
    "`TurnGAE`": (built(critic, advantage=TurnGAE(gamma=0.5)), turns_differ),
    "`GiGPO`": (built(grpo, advantage=GiGPO()), turns_differ),
    "`AdaptiveKL`": (
        lambda where: {**built(grpo, kl=KLInLoss(coef=0.1))(where), "callbacks": [AdaptiveKL(target=0.1)]},
        lambda run, where: run.keep.experiences[0].ref_logprobs is not None,
    ),
    "`ppo_epochs`, `minibatch_size`": (
        built(grpo, ppo_epochs=2, updates=Updates(minibatch_size=4)),
        lambda run, where: run.module.policy_version == 4,
    ),
    "`ptx`": (
        lambda where: {
            **built(grpo, extra_losses=ExtraLosses(ptx_coef=0.5))(where),
            "ptx": PTXSource(rows=[{"prompt": "say a", "completion": "a"}], batch_size=1),
        },
        lambda run, where: run.keep.metrics[0]["loss/ptx"] > 0,
    ),
    "distillation": (
        built(distill),
        lambda run, where: "teacher/logprobs" in run.keep.experiences[0].token_extras,
    ),
    "distillation with a `divergence`": (
        built(distill, divergence=ReverseKL()),
        lambda run, where: run.keep.metrics[0]["loss/teacher"] > 0,
    ),
    "`temperature`": (lambda where: {"sampling": SamplingParams(**SIX, temperature=0.7)}, lambda run, where: True),
    "`top_p`": (
        lambda where: {"sampling": SamplingParams(**SIX, top_p=0.5)},
        lambda run, where: any(s is not None and bool(s.counts.any()) for s in run.keep.rollouts[0].supports),
    ),
    "reward functions": (
        lambda where: {"rewards": [lengths]},
        lambda run, where: bool((run.keep.rollouts[0].reward_parts["lengths"] != 0).any()),
    ),
    "`evaluation`": (
        lambda where: {"evaluation": Evaluation(FOUR, SamplingParams(max_new_tokens=4), 2)},
        lambda run, where: run.keep.evaluated[0].turn_ids is not None,
    ),
    "`PromptCurriculum`": (
        lambda where: {"prompts": PromptCurriculum(FOUR, replay=0.25)},
        lambda run, where: run.keep.metrics[0]["rollout/rows_unseen"] == 0.5,
    ),
    "`RolloutWriter`": (lambda where: {"callbacks": [RolloutWriter(1, str(where.folder / "rollouts"))]}, saved),
}
"""Feature as the page names it -> arguments of a run that has it, and whether the run shows it."""
UNPROVEN = {"`schedule: Ahead`", "`schedule: InFlight`", "`temperature`", "`top_p`"}
"""Engine and trainer have the log-probs of different distributions."""
REJECTED: dict[str, tuple[Callable[[Where], dict[str, Any]], str, tuple[str, ...]]] = {
    "`GiGPO`": (built(grpo, advantage=GiGPO()), "GiGPO", ("program",)),
    "`reward_clip`": (built(grpo, advantage=TurnReturns(), shaping=Shaping(reward_clip=1.0)), "TurnReturns", WAYS),
    "`RewardNormalization`": (
        lambda where: {**built(grpo, advantage=TurnReturns())(where), "callbacks": [RewardNormalization()]},
        "TurnReturns",
        WAYS,
    ),
    "`prompts.template_kwargs`": (
        lambda where: {"prompts": PromptSource(rows=FOUR.rows, template_kwargs={"a": 1})},
        "template_kwargs",
        WAYS,
    ),
}
"""Feature -> arguments, the named part, and the ways that reject it."""
ONE_WAY = {name: WAYS[i % 2] for i, name in enumerate(RUNS) if name not in UNPROVEN} | {"`GiGPO`": "environment"}
"""The trainer doesn't see where turns come from, so most features are run with one of the two ways."""
CELLS = [(name, way) for name in RUNS for way in WAYS if ONE_WAY.get(name, way) == way]


@pytest.mark.parametrize(("feature", "way"), CELLS)
def test_a_feature_works_with_turns(feature: str, way: str, path: str, tmp_path: Path) -> None:
    where, (arguments, shows) = Where(path, tmp_path, way), RUNS[feature]
    proven = feature not in UNPROVEN
    try:
        run = where.run(**{"canary": proven, "compare": proven, **arguments(where)})
        assert run.moved and run.keep.metrics[0]["rollout/turns"] > 1
        assert run.keep.metrics[0]["rollout/stop_failure"] == 0
        assert not proven or max(run.keep.gaps) < 1e-5
        assert shows(run, where)
    finally:
        for end in where.ended:
            end()


@pytest.mark.parametrize(("feature", "way"), [(name, way) for name, cell in REJECTED.items() for way in cell[2]])
def test_what_has_no_meaning_with_turns_is_rejected(feature: str, way: str, path: str, tmp_path: Path) -> None:
    where, (arguments, part, _) = Where(path, tmp_path, way), REJECTED[feature]
    with pytest.raises(ValueError, match=part):
        where.run(canary=False, **arguments(where))


def test_the_page_lists_what_is_tested() -> None:
    page = (Path(__file__).parents[2] / "docs" / "combinations.md").read_text()
    assert not [feature for feature in (*RUNS, *REJECTED) if feature not in page]
