"""Evaluation metrics (`eval/`), prediction records, and the texts of prompts in records."""

from __future__ import annotations

import math
from collections import Counter
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from lightrl.algorithms.experience import first_rows, trajectory_lengths
from lightrl.records import Rollouts


def eval_metrics(rollouts: Rollouts, success_reward: float) -> dict[str, Tensor]:
    """Computes the values of one evaluation batch, per trajectory or group, for averaging over the evaluation.

    Returns:
        `eval/reward`, `eval/reward/<function>` (scored trajectories), `eval/reward/<function>/<name>` (logged by the
        function), `eval/length`, `eval/truncated_fraction`, and with G > 1 completions per prompt, over the scored
        ones, `eval/pass@k` (k = 1, 2, 4, ... G) and `eval/maj@G`. With several sets of prompts, names begin with
        `eval/<set>/`.
    """
    lengths = trajectory_lengths(rollouts.response_mask, rollouts.trajectory_ids)
    firsts = first_rows(rollouts.trajectory_ids)
    if len(firsts) < len(rollouts):
        rollouts, lengths = rollouts.select(firsts), lengths[firsts]
    metrics = {
        "eval/reward": rollouts.rewards[rollouts.rewards.isfinite()],
        "eval/length": lengths.float(),
        "eval/truncated_fraction": rollouts.truncated.float(),
        **{f"eval/reward/{name}": part[part.isfinite()] for name, part in rollouts.reward_parts.items()},
    }
    for name, value in rollouts.metrics.items():
        if name.startswith("reward/"):  # logged by a reward function
            metrics[f"eval/{name}"] = torch.full((len(rollouts),), value)
    names, sizes = rollouts.group_ids.unique(return_counts=True)
    size = int(sizes.max())
    if size > 1:
        groups = [((rollouts.group_ids == g) & rollouts.rewards.isfinite()).nonzero().squeeze(1) for g in names]
        groups = [rows for rows in groups if len(rows)]
        success = (rollouts.rewards >= success_reward).float()
        for k in (2**i for i in range(size.bit_length())):
            rates = [pass_at_k(len(rows), int(success[rows].sum()), min(k, len(rows))) for rows in groups]
            metrics[f"eval/pass@{k}"] = torch.tensor(rates)
        metrics[f"eval/maj@{size}"] = torch.tensor([_majority(rollouts, rows, success) for rows in groups])
    if rollouts.eval_set:
        return {name.replace("eval/", f"eval/{rollouts.eval_set}/", 1): values for name, values in metrics.items()}
    return metrics


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k samples is correct, from n samples.

    `1 - C(n - c, k) / C(n, k)` (Chen et al. 2021, https://arxiv.org/abs/2107.03374, eq. 1).
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def _majority(rollouts: Rollouts, rows: Tensor, success: Tensor) -> float:
    """Returns whether a group's most common answer is correct; ties go to the answer sampled first."""
    answers = rollouts.answers or [completion.strip() for completion in rollouts.completions]
    texts = [answers[i] for i in rows.tolist()]
    winner = Counter(texts).most_common(1)[0][0]
    return float(success[rows[texts.index(winner)]])


def records(rollouts: Rollouts, tokenizer: Any = None) -> list[dict[str, Any]]:
    """Returns one dictionary per trajectory, as written by `lightrl predict`; `tokenizer` decodes prompts."""
    lengths = trajectory_lengths(rollouts.response_mask, rollouts.trajectory_ids)
    found = []
    for i in first_rows(rollouts.trajectory_ids).tolist():
        record = trajectory_record(rollouts, i, tokenizer)
        parts = {f"reward/{name}": value for name, value in record.pop("reward_parts").items()}
        columns = {name: values[i] for name, values in rollouts.columns.items()}
        found.append({**columns, **record, "num_tokens": int(lengths[i]), **parts})
    return found


def asked(rollouts: Rollouts, row: int, tokenizer: Any) -> str:
    """Returns the text of a trajectory's first request to the engine, including tools and the system prompt.

    `row` is its first sequence. Repeated special tokens, such as image placeholders, appear once. A `tokenizer` of None
    returns the prompt from the data.
    """
    if tokenizer is None:
        return rollouts.prompts[row]
    real = int(rollouts.attention_mask[row].sum())
    sampled = rollouts.response_mask[row].nonzero()
    ids = rollouts.token_ids[row, : int(sampled[0]) if len(sampled) else real].tolist()
    special = set(tokenizer.all_special_ids)
    runs = ((token, list(run)) for token, run in groupby(ids))
    return str(tokenizer.decode([i for token, run in runs for i in (run[:1] if token in special else run)]))


def question(rollouts: Rollouts, row: int) -> str:
    """Returns the last user message of a prompt, or the whole prompt if it is not a conversation."""
    raw = rollouts.raw_prompts[row] if rollouts.raw_prompts else rollouts.prompts[row]
    if isinstance(raw, str) or not raw:
        return raw or rollouts.prompts[row]
    content = next((m.get("content") for m in reversed(raw) if m.get("role") == "user"), raw[-1].get("content"))
    if isinstance(content, list):  # content blocks, including media
        content = "\n".join(block.get("text") or f"[{block.get('type')}]" for block in content)
    return content or rollouts.prompts[row]


def trajectory_record(
    rollouts: Rollouts, row: int, tokenizer: Any, *, rewards: Tensor | None = None, digits: int | None = None
) -> dict[str, Any]:
    """Returns what every record of a trajectory contains: its texts, rewards, conversation, and end.

    `row` is its first sequence. `rewards` replaces `rollouts.rewards`, and `digits` rounds rewards.
    """

    def number(values: Tensor) -> float | None:
        value = float(values[row])
        return None if not math.isfinite(value) else value if digits is None else round(value, digits)

    record = {
        "prompt": asked(rollouts, row, tokenizer),
        "completion": rollouts.completions[row],
        "reward": number(rollouts.rewards if rewards is None else rewards),
        "reward_parts": {name: number(part) for name, part in rollouts.reward_parts.items()},
        "truncated": bool(rollouts.truncated[row]),
    }
    if rollouts.messages:
        record |= {"messages": rollouts.messages[row], "stop_reason": rollouts.stop_reasons[row]}
    return record
