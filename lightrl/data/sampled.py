"""Sampled and scored groups, and how they become the rectangular `Rollouts`.

Letters: P prompts, G completions per prompt, B = P * G sequences, T tokens.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightrl.rewards.scorer import Scores
from lightrl.types import CompletionGroup, Prompts, Rollouts, pad_rows

__all__ = ["Draft", "Sampled", "build_rollouts", "gather_numbers", "refill", "request_seed"]


@dataclass
class Sampled:
    """P prompts with their groups of completions and scores, all in one order.

    Attributes:
        prompts: P prompts.
        groups: P groups of G completions.
        scores: P scores of G rows each; empty where the data module has no reward functions.
        seconds: what making them took, metric name -> seconds.
    """

    prompts: Prompts
    groups: list[CompletionGroup]
    scores: list[Scores]
    seconds: dict[str, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.groups)

    def pick(self, rows: Sequence[int]) -> Sampled:
        """The given prompts with all that belongs to them."""
        scores = [self.scores[i] for i in rows] if self.scores else []
        return Sampled(self.prompts[list(rows)], [self.groups[i] for i in rows], scores, self.seconds)

    def joined(self, other: Sampled) -> Sampled:
        """These and others; seconds add up."""
        names = self.seconds.keys() | other.seconds.keys()
        return Sampled(
            Prompts.concat([self.prompts, other.prompts]),
            self.groups + other.groups,
            self.scores + other.scores,
            {name: self.seconds.get(name, 0.0) + other.seconds.get(name, 0.0) for name in sorted(names)},
        )

    def has_spread(self) -> list[bool]:
        """Per prompt, whether its scored completions got different rewards."""
        totals = [[r for r in scores.total if not math.isnan(r)] for scores in self.scores]
        return [bool(rewards) and min(rewards) < max(rewards) for rewards in totals]


@dataclass
class Draft:
    """A rollout before it is laid out.

    Attributes:
        sampled: its groups.
        cursor: number of the prompt after its last.
        metrics: scalars of its making.
        version: version of the weights, where the groups' own may be out of date; None to take theirs.
    """

    sampled: Sampled
    cursor: int
    metrics: dict[str, float]
    version: int | None = None


def refill(
    sampled: Sampled,
    cursor: int,
    max_refills: int,
    *,
    draw: Callable[[int, int, int], Sampled],
    gather: Callable[[int], list[int]],
    rank: int,
) -> tuple[Sampled, int, dict[str, float]]:
    """Replaces groups without reward spread by those of further prompts, in at most `max_refills` generations.

    Per generation each rank draws one prompt for each group it lacks, all ranks together a contiguous run of prompts,
    so the cursor stays the same everywhere and no prompt is lost. Groups still lacking at the end are made up for by
    dropped ones, the oldest first: the batch keeps its size, and they add nothing to a group estimator.

    Args:
        sampled: this rank's groups.
        cursor: number of the prompt after those drawn so far.
        max_refills: bound on further generations.
        draw: (start, offset, count) samples prompts start + offset ... start + offset + count - 1 of the run.
        gather: every rank's number from this rank's. Collective; called equally often on every rank.
        rank: of this process.

    Returns:
        as many groups as came in; the cursor after all draws; metrics.

    Source: DAPO's dynamic sampling, https://arxiv.org/abs/2503.14476, section 3.2. It keeps sampling until the batch is
        full, with generation batches of a fixed size, and throws surplus groups away; here no surplus is made.
    """
    wanted, everything, refills = len(sampled), sampled, 0
    while refills < max_refills:
        missing = gather(wanted - sum(everything.has_spread()))
        if not any(missing):
            break
        if missing[rank]:
            everything = everything.joined(draw(cursor, sum(missing[:rank]), missing[rank]))
        cursor += sum(missing)
        refills += 1
    good = everything.has_spread()
    flat = [i for i, spread in enumerate(good) if not spread]
    kept = [i for i, spread in enumerate(good) if spread]
    rewards = [r for scores in everything.scores for r in scores.total if not math.isnan(r)]
    metrics = {
        "rollout/refills": float(refills),
        "rollout/dropped_groups": float(len(everything) - wanted),
        "rollout/flat_groups": float(wanted - len(kept)),
        "reward/sampled_mean": math.fsum(rewards) / len(rewards) if rewards else 0.0,
    }
    return everything.pick([*kept, *flat[: wanted - len(kept)]]), cursor, metrics


def gather_numbers(number: int, group: Any = None) -> list[int]:
    """Every rank's number, in the order of the ranks. Collective over the process group, the default one where None."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [number]
    numbers: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(numbers, number, group=group)
    return numbers


def request_seed(seed: int, stream: str, cursor: int, row: int) -> int:
    """A 62-bit seed that depends on the run's seed, the stream, and the prompt's place in it, and on nothing else."""
    digest = hashlib.blake2b(f"{seed}/{stream}/{cursor}/{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def build_rollouts(
    prompts: Prompts, groups: list[CompletionGroup], scores: Scores | None, pad_token_id: int, temperature: float
) -> Rollouts:
    """Lays P groups out as right-padded (B, T) rows, rows of a group next to one another.

    Args:
        prompts: P prompts. groups: their completions, in the order of the prompts.
        scores: of the B rows; None leaves them unscored (NaN).
        pad_token_id: fills the rows. temperature: of the sampling distribution.
    """
    rows = [(p, c) for p, group in enumerate(groups) for c in group.completions]
    picked = [p for p, _ in rows]
    tokens = [prompts.token_ids[p] + list(c.token_ids) for p, c in rows]
    before = [len(prompts.token_ids[p]) for p in picked]
    logprobs = [[0.0] * n + list(c.logprobs) for n, (_, c) in zip(before, rows, strict=True)]
    token_ids = pad_rows(tokens, pad_token_id, torch.long)
    slots = torch.arange(token_ids.shape[1])
    real = slots < torch.tensor([len(row) for row in tokens])[:, None]
    scores = scores or Scores(total=[float("nan")] * len(rows), parts={})
    columns = {name: [values[p] for p in picked] for name, values in prompts.columns.items()}
    return Rollouts(
        token_ids=token_ids,
        attention_mask=real,
        response_mask=real & (slots >= torch.tensor(before)[:, None]),
        engine_logprobs=pad_rows(logprobs, 0.0, torch.float32),
        group_ids=torch.tensor(picked),
        rewards=torch.tensor(scores.total, dtype=torch.float32),
        reward_parts={name: torch.tensor(part, dtype=torch.float32) for name, part in scores.parts.items()},
        truncated=torch.tensor([c.finish_reason == "length" for _, c in rows]),
        policy_version=min(group.policy_version for group in groups),
        temperature=temperature,
        prompts=[prompts.texts[p] for p in picked],
        raw_prompts=[prompts.raw[p] for p in picked] if prompts.raw else [],
        completions=[c.text for _, c in rows],
        columns={**columns, **scores.extra},
        inputs=[prompts.inputs[p] for p in picked] if prompts.inputs else [],
        media=[prompts.media[p] for p in picked] if prompts.media else [],
        metrics=dict(scores.metrics),
    )
