"""Covering arrays over the features, and what one run of two rollouts shows."""

from __future__ import annotations

import functools
import itertools
import math
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.plugins.precision import MixedPrecision

from lightrl.callbacks import WeightSync
from lightrl.objectives import GMPO, SequenceClip
from lightrl.rollout.learner import RLCallback
from tests.pairs.features import CALLBACKS, FACTORS, Settings, data_of, module_of, refused
from tests.toys import SMALL, quickstart_model, quiet_trainer

Pair = tuple[str, str, str, str]
"""A factor, its setting, another factor, its setting."""


def pairs_of(s: Settings) -> set[Pair]:
    return {(a, s[a], b, s[b]) for a, b in itertools.combinations(FACTORS, 2)}


def missing_pairs(rows: Sequence[Settings]) -> set[Pair]:
    """Pairs in none of the rows, but for those that are refused."""
    there = set[Pair]().union(*map(pairs_of, rows))
    return {
        (one, a, other, b)
        for one, other in itertools.combinations(FACTORS, 2)
        for a in FACTORS[one]
        for b in FACTORS[other]
        if (one, a, other, b) not in there and not refused({one: a, other: b})
    }


def covering_array(seed: int = 0) -> list[dict[str, str]]:
    """Settings that are not refused, in which every pair meets that can; those with most new pairs come first.

    Greedy, as in AETG (Cohen et al. 1997, https://doi.org/10.1109/32.605761): each row starts with a pair that is
    missing and gives each further factor the setting that brings most missing pairs. `seed` breaks ties, so that others
    give other arrays.
    """
    draw, missing = random.Random(seed), missing_pairs([])
    rows: list[dict[str, str]] = []
    while missing:
        start = draw.choice(sorted(missing))
        tries = [_row(start, missing, draw) for _ in range(TRIES)]
        row = max((each for each in tries if each is not None), key=lambda s: len(pairs_of(s) & missing), default=None)
        if row is None:  # each third factor's settings are refused with one of the two
            missing.discard(start)
            continue
        missing -= pairs_of(row)
        rows.append({name: row[name] for name in FACTORS})
    return rows


TRIES = 4


def _row(start: Pair, missing: set[Pair], draw: random.Random) -> dict[str, str] | None:
    s = {start[0]: start[1], start[2]: start[3]}
    names = [name for name in FACTORS if name not in s]
    draw.shuffle(names)
    names.sort(key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    for name in names:
        allowed = [level for level in FACTORS[name] if not refused({**s, name: level})]
        if not allowed:
            return None
        draw.shuffle(allowed)
        news = {level: sum(_pair(name, level, *each) in missing for each in s.items()) for level in allowed}
        costs = {level: COST.get((name, level), 1.0) for level in allowed}
        s[name] = max(allowed, key=lambda level: (news[level] * costs[level], costs[level]))
    return s


COST = {("rows", "image"): 0.5}
"""Settings whose runs take longer come with more news or not at all."""

FIRST = ["critic", "estimator", "algorithm"]
"""Settled first: each leaves the next few choices."""
PLACE = {name: number for number, name in enumerate(FACTORS)}


def _pair(one: str, a: str, other: str, b: str) -> Pair:
    return (one, a, other, b) if PLACE[one] < PLACE[other] else (other, b, one, a)


@functools.cache
def models() -> dict[str, str]:
    """Kind of rows -> folder of a tiny model."""
    from tests.rollout.tasks import chat_model
    from tests.vision.models import build

    folder = Path(tempfile.mkdtemp(prefix="lightrl-pairs-"))
    return {
        "text": quickstart_model(folder / "text", **SMALL),
        "image": str(build("qwen2_vl", folder / "image")),
        "environment": chat_model(folder / "environment"),
    }


def one_ratio(loss: Any) -> bool:
    """Whether all tokens of a trajectory are trained through one ratio."""
    return isinstance(loss, SequenceClip | GMPO) or (hasattr(loss, "loss") and one_ratio(loss.loss))


class Watch(RLCallback):
    """Whether something was to be learnt, and whether all numbers were finite."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.to_learn = 0.0

    def on_experience_made(self, trainer: Any, module: Any, experience: Any) -> None:
        if getattr(module, "in_critic_warmup", False):
            return
        advantages = (experience.advantages * experience.response_mask).double()
        if one_ratio(module.loss):  # through which those of a trajectory's turns may cancel each other
            sums = torch.zeros(int(experience.trajectory_ids.max()) + 1, dtype=torch.float64)
            sums.index_add_(0, experience.trajectory_ids.cpu(), advantages.sum(1).cpu())
            self.to_learn += float((sums.abs() - 1e-3 * advantages.abs().sum()).clamp(min=0).sum())
        else:
            self.to_learn += float(advantages.abs().sum())

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.metrics.append(dict(outputs))


def run(s: Settings, folder: Path) -> bool:
    """Two rollouts, of which all numbers must be finite. Whether the weights moved, as they must if advantages did."""
    seed_everything(0, verbose=False)
    module, data, watch = module_of(s, models()[s["rows"]]), data_of(s), Watch()
    callbacks = [WeightSync(tolerance=0.5), watch, *CALLBACKS[s["callback"]](folder)]
    arguments: dict[str, Any] = {"precision": s["precision"], "default_root_dir": folder}
    if s["precision"] == "16-mixed":  # for which Lightning takes bfloat16 on a CPU
        half = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8))
        arguments |= {"precision": None, "plugins": [half]}
    arguments["enable_checkpointing"] = s["callback"] == "RolloutCheckpoint"
    fitter = quiet_trainer(callbacks=callbacks, **arguments)
    start: dict[str, torch.Tensor] = {}
    original = module.on_train_start

    def remember() -> None:
        original()
        start.update({n: p.detach().clone() for n, p in module.actor.named_parameters() if p.requires_grad})

    module.on_train_start = remember
    fitter.fit(module, data)
    assert len(watch.metrics) == 2 and not module.num_skipped_updates
    bad = [(name, value) for metrics in watch.metrics for name, value in metrics.items() if not math.isfinite(value)]
    assert all(name.endswith("reward_std") for name, _ in bad), bad
    now = {n: p.detach() for n, p in module.actor.named_parameters() if p.requires_grad}
    assert all(bool(torch.isfinite(p).all()) for p in now.values())
    moved = any(not torch.equal(now[name], start[name]) for name in now)
    assert moved or watch.to_learn == 0, "advantages differ from 0, but no weight moved"
    return moved
