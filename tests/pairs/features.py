"""All features as factors, how a run is built from one setting of each, and what is refused at setup."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from lightrl import algorithms as a
from lightrl import callbacks as c
from lightrl import objectives as o
from lightrl.algorithms import CriticSpec
from lightrl.algorithms.module import ExtraLosses, Shaping, Updates
from lightrl.algorithms.schedules import LRSchedule
from lightrl.data.prompts import PromptSource
from lightrl.data.sft import PTXSource
from lightrl.engines.transformers.engine import TransformersEngine
from lightrl.environments import EnvironmentEpisode
from lightrl.models.spec import LoraSpec, ModelSpec
from lightrl.records import SamplingParams
from lightrl.rewards.scorer import RewardScorer
from lightrl.rollout import Ahead, OnPolicy, RolloutDataModule
from tests.rollout.tasks import Letters
from tests.toys import ThreadEngine
from tests.vision.conftest import picture

Settings = Mapping[str, str]
"""Factor -> its setting; of some factors only, while a covering array is made."""

OWN = "own"
ESTIMATORS: dict[str, Callable[[], Any]] = {
    **{each.__name__: each for each in (o.GAE, o.GDPO, o.OPO, o.RLOO, o.GroupRelative, o.MaxRL, o.Reinforce)},
    **{each.__name__: each for each in (o.ReinforcePlusPlus, o.ReinforcePlusPlusBaseline, o.TurnReturns, o.TurnGAE)},
    **{"GiGPO": o.GiGPO, "PassAtK": lambda: o.PassAtK(2), "GroupRelative(batch)": lambda: o.GroupRelative("batch")},
}
LOSSES: dict[str, Callable[[], Any]] = {
    **{each.__name__: each for each in (o.PPOClip, o.CISPO, o.CPG, o.DPPO, o.GMPO, o.GSPO, o.SAPO)},
    **{"RLOOSequence": o.RLOOSequence, "VESPO": o.VESPO},
    "OffPolicyCorrection": lambda: o.OffPolicyCorrection(o.PPOClip()),
    "OffPolicySequenceMask": lambda: o.OffPolicySequenceMask(o.PPOClip()),
    "GeometricRejection": lambda: o.GeometricRejection(o.PPOClip(), 0.5, 2.0),
    "RolloutRatio": lambda: o.RolloutRatio(o.PPOClip()),
}
AGGREGATIONS: dict[str, Callable[[], Any]] = {
    **{each.__name__: each for each in (o.TokenMean, o.SequenceMean, o.SequenceSum)},
    "ConstantLength": lambda: o.ConstantLength(6),
}
KLS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "KLInReward": lambda: o.KLInReward("k1"),
    "KLInLoss": lambda: o.KLInLoss("k2"),
    "KLInLoss(corrected)": lambda: o.KLInLoss("k3", ratio_correction=True),
}
CRITICS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "separate": CriticSpec,
    "shared": lambda: CriticSpec(shared=True),
    "unclipped": lambda: CriticSpec(clip=None, lr=1e-3),
    "warm-up": lambda: CriticSpec(warmup_rollouts=1),
}
CALLBACKS: dict[str, Callable[[Path], list[Any]]] = {
    "none": lambda _: [],
    "AdaptiveKL": lambda _: [c.AdaptiveKL()],
    "LinearKL": lambda _: [c.LinearKL(0.1, 0.0, 2)],
    "AdaptiveEntropy": lambda _: [c.AdaptiveEntropy(target=3.0, step=0.01)],
    "RewardNormalization": lambda _: [c.RewardNormalization()],
    "EMA": lambda _: [c.EMA()],
    "ReferenceSync": lambda _: [c.ReferenceSync(1)],
    "OffloadOptimizer": lambda _: [c.OffloadOptimizer()],
    "OffloadModels": lambda _: [c.OffloadModels()],
    "LogprobMonitor": lambda _: [c.LogprobMonitor(bound=1.0)],
    "TrajectoryLogprobCheck": lambda _: [c.TrajectoryLogprobCheck(tolerance=0.3)],
    "RolloutWriter": lambda folder: [
        c.RolloutWriter(1, str(folder)),
        c.CompletionLogger(1, terminal=False),
        c.ThroughputMonitor(),
    ],
    "RolloutCheckpoint": lambda folder: [c.RolloutCheckpoint(1, str(folder))],
}
ALGORITHMS = ["PPO", "GRPO", "DrGRPO", "DAPO", "GSPO", "CPGD", "RLOO", "ReinforcePlusPlus"]
GROUPS = {"2": 2, "4": 4, "1": 1}
FACTORS: dict[str, list[str]] = {
    "estimator": [OWN, *ESTIMATORS],
    "algorithm": ALGORITHMS,
    "critic": [*CRITICS],
    "kl": [OWN, *KLS],
    "loss": [OWN, *LOSSES],
    "overlap": ["none", "staleness"],
    "callback": [*CALLBACKS],
    "updates": ["one", "two epochs", "mini-batches", "micro-batches"],
    "masks": ["none", "truncated", "top entropy"],
    "clips": ["default", "advantage", "reward", "no norm"],
    "whiten": [OWN, "yes", "no"],
    "group": [*GROUPS],
    "sampling": ["plain", "temperature", "top_p"],
    "lora": ["no", "yes", "with reference"],
    "refills": ["no", "yes"],
    "ptx": ["no", "yes"],
    "rows": ["text", "image", "environment"],
    "aggregation": [OWN, *AGGREGATIONS],
    "layout": ["auto", "padded", "packed", "shared_prefix"],
    "precision": ["32-true", "bf16-mixed", "bf16-true", "16-mixed"],
    "recomputation": ["no", "yes"],
    "rewards": ["dense", "some None", "all equal", "two weighted", "failing"],
    "entropy": ["no", "yes"],
    "schedule": ["none", "cosine"],
    "freeze": ["no", "embeddings"],
}

# ---- what is refused --------------------------------------------------------------------------------------------

OWN_ESTIMATOR = {
    **dict.fromkeys(["GRPO", "DrGRPO", "DAPO", "GSPO", "CPGD"], "GroupRelative"),
    **{"PPO": "GAE", "RLOO": "RLOO", "ReinforcePlusPlus": "ReinforcePlusPlus"},
}
OWN_LOSS = {"GSPO": "GSPO", "CPGD": "CPG"}
OWN_KL = {"PPO": "KLInReward", "RLOO": "KLInReward", "ReinforcePlusPlus": "KLInReward", "GRPO": "KLInLoss"}
WITH_CRITIC = {"GAE", "TurnGAE"}
NO_GROUPS = {"GAE", "TurnGAE", "Reinforce", "ReinforcePlusPlus"}
BINARY = {"MaxRL", "PassAtK"}
TURNS = {"TurnReturns", "TurnGAE", "GiGPO"}
NORMALIZES = {"GDPO", "ReinforcePlusPlus", "ReinforcePlusPlusBaseline", "GroupRelative(batch)"}


def estimator(s: Settings) -> str | None:
    """The estimator, where it is known by now."""
    chosen = s.get("estimator")
    return OWN_ESTIMATOR.get(s.get("algorithm", "")) if chosen == OWN else chosen


def loss(s: Settings) -> str | None:
    chosen = s.get("loss")
    return OWN_LOSS.get(s["algorithm"], "PPOClip") if chosen == OWN and "algorithm" in s else chosen


def kl(s: Settings) -> str | None:
    chosen = s.get("kl")
    return OWN_KL.get(s["algorithm"], "none") if chosen == OWN and "algorithm" in s else chosen


def whitens(s: Settings) -> bool:
    return s.get("whiten") == "yes" or (s.get("whiten") == OWN and s.get("algorithm") == "PPO")


REFUSALS: list[Callable[[Settings], bool]] = [
    lambda s: s.get("algorithm") not in ("PPO", None) and s.get("critic") not in ("none", None),
    lambda s: estimator(s) in WITH_CRITIC and s.get("critic") == "none",
    lambda s: s.get("critic") not in ("none", None) and estimator(s) not in {*WITH_CRITIC, None},
    lambda s: kl(s) == "KLInReward" and estimator(s) in {*BINARY, "GDPO"},
    lambda s: whitens(s) and estimator(s) in NORMALIZES,
    lambda s: s.get("clips") == "reward" and estimator(s) in {"GDPO", *TURNS},
    lambda s: s.get("group") == "1" and estimator(s) not in {*NO_GROUPS, None},
    lambda s: s.get("group") == "1" and s.get("refills") == "yes",
    lambda s: s.get("callback") in ("AdaptiveKL", "LinearKL", "ReferenceSync") and kl(s) == "none",
    lambda s: s.get("callback") == "ReferenceSync" and s.get("lora") == "yes",
    lambda s: s.get("callback") == "RewardNormalization" and estimator(s) in {*BINARY, "GDPO", *TURNS},
    lambda s: s.get("callback") == "LogprobMonitor" and loss(s) == "RolloutRatio",
    lambda s: s.get("callback") == "TrajectoryLogprobCheck" and s.get("sampling") not in ("plain", None),
]


def refused(s: Settings) -> bool:
    """Whether settings are rejected at setup; of settings that are not all known, whether those known are."""
    return any(holds(s) for holds in REFUSALS)


# ---- a run ---------------------------------------------------------------------------------------------------------


def dense(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """0 and 1 in turn, so that every group has spread."""
    return [float(i % 2) for i in range(len(completions))]


def second(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [float(len(text) % 3) for text in completions]


def some_none(prompts: list[str], completions: list[str], **_: Any) -> list[float | None]:
    return [None if i % 4 == 3 else float(i % 2) for i in range(len(completions))]


def all_equal(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


class Failing:
    """Raises at its second call."""

    __name__ = "failing"

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, prompts: list[str], completions: list[str]) -> list[float]:
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("the scorer is away")
        return dense(prompts, completions)


REWARDS: dict[str, Callable[[], dict[str, Any]]] = {
    "dense": lambda: {"rewards": [dense]},
    "some None": lambda: {"rewards": [some_none]},
    "all equal": lambda: {"rewards": [all_equal]},
    "two weighted": lambda: {"rewards": RewardScorer([dense, second], weights=[1.0, 0.5])},
    "failing": lambda: {"rewards": RewardScorer([Failing(), dense], on_reward_error="skip")},
}
SAMPLING = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "top_p": {"top_p": 0.8},
}


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.0)


def module_of(s: Settings, model: str) -> Any:
    lora = LoraSpec(r=2, alpha=4.0, target_modules=["q_proj", "v_proj"]) if s["lora"] != "no" else None
    spec = ModelSpec(
        model,
        lora=lora,
        layout=s["layout"],  # type: ignore[arg-type]
        gradient_checkpointing=s["recomputation"] == "yes",
        freeze=["*embed_tokens*"] if s["freeze"] == "embeddings" else [],
    )
    arguments: dict[str, Any] = {"optimizer": adam}
    for name, choice, made in [
        *(("advantage", s["estimator"], ESTIMATORS), ("loss", s["loss"], LOSSES), ("kl", s["kl"], KLS)),
        ("aggregation", s["aggregation"], AGGREGATIONS),
    ]:
        if choice != OWN:
            arguments[name] = made[choice]()
    if s["algorithm"] == "PPO" or s["critic"] != "none":
        arguments["critic"] = CRITICS[s["critic"]]()
    if s["algorithm"] == "PPO":
        arguments["ppo_epochs"] = 1
    if s["whiten"] != OWN:
        arguments["whiten_advantages"] = s["whiten"] == "yes"
    if s["lora"] == "with reference":
        arguments["reference"] = model
    if s["schedule"] == "cosine":
        arguments["lr_scheduler"] = LRSchedule("cosine", warmup=0.0, floor=0.5)
    updates, shaping, extra = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    if s["updates"] == "two epochs":
        arguments["ppo_epochs"] = 2
    elif s["updates"] == "micro-batches":
        updates["micro_batch_tokens"] = 24
    elif s["updates"] == "mini-batches":
        updates["minibatch_size"] = GROUPS[s["group"]]
    if s["masks"] == "truncated":
        shaping["mask_truncated"] = True
    elif s["masks"] == "top entropy":
        shaping["top_entropy_fraction"] = 0.5
    if s["clips"] in ("advantage", "reward"):
        shaping[f"{s['clips']}_clip"] = 0.5
    elif s["clips"] == "no norm":
        updates["max_grad_norm"] = None
    if s["entropy"] == "yes":
        extra["entropy_coef"] = 0.01
    if s["ptx"] == "yes":
        extra["ptx_coef"] = 0.1
    arguments |= {"updates": Updates(**updates), "shaping": Shaping(**shaping), "extra_losses": ExtraLosses(**extra)}
    return getattr(a, f"{s['algorithm']}LightningModule")(spec, **arguments)


def data_of(s: Settings) -> RolloutDataModule:
    rows: list[dict[str, Any]] = [{"prompt": f"{n}+{n}="} for n in range(4)]
    arguments: dict[str, Any] = {}
    if s["rows"] == "environment":
        arguments["episode"] = EnvironmentEpisode(Letters, max_turns=2, on_truncated="continue")
        rows = [{"prompt": f"say {word}"} for word in ("one", "two", "six", "ten")]
    if s["rows"] == "image":
        rows = [{"prompt": "what is it?", "image": picture(8, 8, n)} for n in range(4)]
    if s["ptx"] == "yes":
        text, answer = {"text": ("1+1=", "2"), "image": ("what", "a"), "environment": ("say", "a")}[s["rows"]]
        ptx_rows = [{"prompt": text, "completion": answer}] * 2
        arguments["ptx"] = PTXSource(rows=ptx_rows, batch_size=2)
    return RolloutDataModule(
        PromptSource(rows=rows),
        engine=TransformersEngine() if s["overlap"] == "none" else ThreadEngine(),
        sampling=SamplingParams(max_new_tokens=4, **SAMPLING[s["sampling"]]),
        group_size=GROUPS[s["group"]],
        prompts_per_rollout=2,
        rollouts_per_epoch=2,
        dynamic_sampling_rounds=int(s["refills"] == "yes"),
        schedule=Ahead() if s["overlap"] == "staleness" else OnPolicy(),
        seed=0,
        **REWARDS[s["rewards"]](),
        **arguments,
    )
