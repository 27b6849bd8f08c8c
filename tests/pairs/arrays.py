"""Covering arrays over the features, and what one run of two rollouts shows."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy

from lightrl.algorithms.hooks import RLCallback
from lightrl.callbacks import WeightSync
from lightrl.cli.errors import one_line
from lightrl.objectives import GMPO, SequenceClip
from tests.pairs.features import CALLBACKS, FACTORS, Settings, data_of, module_of, refusals
from tests.ports import held_port
from tests.toys import quickstart_model, quiet_trainer

Pair = tuple[str, str, str, str]
"""A factor, its setting, another factor, its setting."""


def told(error: BaseException) -> str | None:
    """What the command line shows of an invalid input."""
    message = one_line(error) if isinstance(error, Exception) else None
    return message[0] if message is not None and message[1] == 2 else None


def pairs_of(s: Settings) -> set[Pair]:
    """All pairs that settings have."""
    return {(a, s[a], b, s[b]) for a, b in itertools.combinations(FACTORS, 2)}


def missing_pairs(rows: Sequence[Settings]) -> set[Pair]:
    """Pairs in none of the rows, but for those that are refused."""
    there = set[Pair]().union(*map(pairs_of, rows))
    return {
        (one, a, other, b)
        for one, other in itertools.combinations(FACTORS, 2)
        for a in FACTORS[one]
        for b in FACTORS[other]
        if (one, a, other, b) not in there and not refusals({one: a, other: b})
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
        allowed = [level for level in FACTORS[name] if not refusals({**s, name: level})]
        if not allowed:
            return None
        draw.shuffle(allowed)
        news = {level: sum(_pair(name, level, *each) in missing for each in s.items()) for level in allowed}
        costs = {level: COST.get((name, level), 1.0) for level in allowed}
        s[name] = max(allowed, key=lambda level: (news[level] * costs[level], costs[level]))
    return s


COST = {("rows", "image"): 0.5, ("engine", "vLLM"): 0.05, ("ranks", "2"): 0.3}
"""Settings whose runs take longer come with more news or not at all."""

FIRST = ["critic", "estimator", "algorithm"]
"""Settled first: each leaves the next few choices."""
PLACE = {name: number for number, name in enumerate(FACTORS)}


def _pair(one: str, a: str, other: str, b: str) -> Pair:
    return (one, a, other, b) if PLACE[one] < PLACE[other] else (other, b, one, a)


def refused_settings() -> list[dict[str, str]]:
    """For each refusal settings that have it and, where that can be, no other, one rank and no vLLM."""
    found: dict[str, tuple[tuple[int, str, str], dict[str, str]]] = {}
    draw = random.Random(0)
    plain = {name: levels[0] for name, levels in FACTORS.items()} | {"algorithm": "GRPO"}
    for number in range(20_000):
        names = draw.sample([name for name in FACTORS if name not in ("engine", "ranks")], 1 + number % 5)
        s = plain | {name: draw.choice(FACTORS[name]) for name in names}
        s |= {"algorithm": "PPO", "critic": draw.choice(FACTORS["critic"])} if number % 2 else {}
        s |= [{}, {"engine": "vLLM"}, {"ranks": "2"}][number % 3]
        held = refusals(s)
        for refusal in held:
            cost, best = (len(held), s["ranks"], s["engine"]), found.get(refusal.name)
            if best is None or cost < best[0]:
                found[refusal.name] = cost, s
    return [s for _, s in found.values()]


@functools.cache
def models() -> dict[str, str]:
    """Kind of rows -> folder of a tiny model."""
    from tests.rollout.tasks import chat_model
    from tests.vision.models import build

    folder = Path(tempfile.mkdtemp(prefix="lightrl-pairs-"))
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1}
    sizes["max_position_embeddings"] = 128
    return {  # with heads of 32, which vLLM can do
        "text": quickstart_model(folder / "text", num_hidden_layers=1, **sizes),
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
        if module.in_critic_warmup:
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


class BrokenError(AssertionError):
    """A run did what it must not."""


class RankRefusedError(Exception):
    """What a rank was refused with, as its user is told."""


def run(s: Settings) -> str:
    """Two rollouts. "trained", "nothing to learn", or "refused".

    Raises:
        BrokenError: refused without a reason that is known, or not refused, or numbers that are not finite, or weights
            that stay although advantages differ from 0.
    """
    expected = refusals(s)
    try:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            outcome = (_run if s["ranks"] == "1" else _run_on_two_ranks)(s, Path(folder))
    except BrokenError:
        raise
    except Exception as error:
        message = str(error) if isinstance(error, RankRefusedError) else told(error)
        if message is None:
            raise
        if any(re.search(refusal.message, message) for refusal in expected):
            return "refused"
        raise BrokenError(f"refused without a known reason: {message}") from error
    if expected:
        raise BrokenError(f"not refused: {expected[0].name}")
    return outcome


def _run_on_two_ranks(s: Settings, folder: Path) -> str:
    """In two processes that this one becomes, which must not have begun threads; what both say."""
    models()
    holder = held_port()
    ranks = {}
    sys.stdout.flush()
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
            os.environ |= {"MASTER_PORT": str(holder.getsockname()[1]), "GLOO_SOCKET_IFNAME": "lo"}
            try:
                said: Any = _run(s, folder)
            except BaseException as error:  # for the other process to raise
                said = told(error), traceback.format_exc()[-3000:]
            (folder / f"rank{rank}.json").write_text(json.dumps(said))
            os._exit(0)
        ranks[rank] = pid
    end = time.monotonic() + RANKS_SECONDS
    while ranks:
        rank = next((rank for rank, pid in ranks.items() if os.waitpid(pid, os.WNOHANG)[0]), None)
        if rank is not None:
            del ranks[rank]
            end = min(end, time.monotonic() + RANK_SECONDS)
        elif time.monotonic() > end:
            for pid in ranks.values():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            raise BrokenError(f"ranks {[*ranks]} did not end; the other said {_said(folder)}")
        time.sleep(0.02)
    holder.close()
    said = _said(folder)
    refused = [each for each in said if isinstance(each, list)]
    if any(message is None for message, _ in refused):
        raise BrokenError("\n".join(trace for message, trace in refused if message is None))
    if refused:
        raise RankRefusedError(refused[0][0])
    if len({*said}) > 1:
        raise BrokenError(f"ranks differ: {said}")
    return str(said[0])


RANKS_SECONDS, RANK_SECONDS = 400.0, 60.0
"""Within which two ranks end, and one after the other."""


def _said(folder: Path) -> list[Any]:
    """What became of each rank that ended."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]


def _run(s: Settings, folder: Path) -> str:
    seed_everything(0, verbose=False)
    module, data, watch = module_of(s, models()[s["rows"]]), data_of(s), Watch()
    callbacks = [WeightSync(tolerance=0.5), watch, *CALLBACKS[s["callback"]](folder)]
    arguments: dict[str, Any] = {"precision": s["precision"], "default_root_dir": folder}
    if s["precision"] == "16-mixed":  # for which Lightning takes bfloat16 on a CPU
        half = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8))
        arguments |= {"precision": None, "plugins": [half]}
    arguments["enable_checkpointing"] = s["callback"] == "RolloutCheckpoint"
    if s["ranks"] == "2":
        strategy = DDPStrategy(timeout=timedelta(seconds=60), gradient_as_bucket_view=True)
        arguments |= {"devices": 2, "strategy": strategy}
    fitter = quiet_trainer(callbacks=callbacks, **arguments)
    start: dict[str, torch.Tensor] = {}
    original = module.on_train_start

    def remember() -> None:
        original()
        start.update({n: p.detach().clone() for n, p in module.actor.named_parameters() if p.requires_grad})

    module.on_train_start = remember
    fitter.fit(module, data)
    bad = [(name, value) for metrics in watch.metrics for name, value in metrics.items() if not math.isfinite(value)]
    if bad and not all(name.endswith(MAY_BE_NAN) for name, _ in bad):
        raise BrokenError(f"not finite: {bad[:5]}")
    if len(watch.metrics) != 2:
        raise BrokenError(f"{len(watch.metrics)} rollouts")
    now = {n: p.detach() for n, p in module.actor.named_parameters() if p.requires_grad}
    if not all(bool(torch.isfinite(p).all()) for p in now.values()):
        raise BrokenError("weights are not finite")
    moved = any(not torch.equal(now[name], start[name]) for name in now)
    if watch.to_learn > 0 and not moved:
        raise BrokenError("advantages differ from 0, but no weight moved")
    if module.num_skipped_updates:
        raise BrokenError(f"{module.num_skipped_updates} updates were skipped")
    return "trained" if moved else "nothing to learn"


MAY_BE_NAN = ("reward_std",)
