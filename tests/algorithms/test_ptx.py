"""The supervised loss beside reinforcement learning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightrl.algorithms.experience import cut_minibatches
from lightrl.algorithms.module import ExtraLosses, Updates
from lightrl.data.sft import PTXSource
from lightrl.records import RowBatch
from tests.algorithms.toys import fit, grpo, ppo, weights
from tests.rows import as_experience, as_rows
from tests.toys import sgd

ANSWERS = PTXSource(rows=[{"prompt": f"{a:02d}+01=", "completion": str(a + 1)} for a in range(20)], batch_size=8)


def test_ptx_gradient_is_that_of_the_supervised_loss(model_path: str) -> None:
    """With rewards that are all equal GRPO has no gradient, so that one SGD step is the supervised one."""
    equal: list[Any] = [lambda completions, **_: [1.0] * len(completions)]
    module = grpo(model_path, extra_losses=ExtraLosses(ptx_coef=0.5), updates=Updates(max_grad_norm=None))
    keep = fit(module, rewards=equal, ptx=ANSWERS)
    rows = keep.rollouts[0].supervised
    assert rows is not None and len(rows) == 8
    start = grpo(model_path)
    fit(start, rewards=equal)
    out = start.actor(as_rows(rows.token_ids, rows.attention_mask, rows.response_mask)).logprobs
    loss = -out.sum() / rows.response_mask.sum()
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(start.actor.parameters()))])
    torch.testing.assert_close(weights(module), weights(start) - 0.1 * 0.5 * gradient, atol=1e-6, rtol=1e-5)
    assert keep.metrics[0]["loss/ptx"] == pytest.approx(loss.item(), rel=1e-5)


def test_ptx_micro_batches_do_not_change_the_update(model_path: str) -> None:
    results = []
    for tokens in (100_000, 40):
        module = ppo(
            model_path,
            extra_losses=ExtraLosses(ptx_coef=1.0),
            optimizer=sgd,
            updates=Updates(micro_batch_tokens=tokens, minibatch_size=16),
        )
        fit(module, ptx=ANSWERS)
        results.append(weights(module))
    torch.testing.assert_close(results[0], results[1], atol=2e-6, rtol=1e-5)


def test_supervised_rows_are_dealt_out_over_minibatches() -> None:
    def rows(n: int) -> dict[str, Tensor]:
        ones = torch.ones(n, 2, dtype=torch.bool)
        return {"token_ids": torch.arange(2 * n).view(n, 2), "attention_mask": ones, "response_mask": ones}

    four, three = (RowBatch(**rows(n), group_ids=torch.arange(n) // 2) for n in (4, 3))
    experience = as_experience(four, supervised=three)
    parts = cut_minibatches(experience, 2, seed=0)
    assert [p.supervised.token_ids.tolist() for p in parts if p.supervised] == [[[0, 1], [2, 3]], [[4, 5]]]
    with pytest.raises(ValueError, match="ptx.batch_size=3: "):
        cut_minibatches(experience, 4, seed=0)


def test_ptx_needs_rows_and_a_coefficient(model_path: str) -> None:
    with pytest.raises(ValueError, match=r"ptx=None \(data\) with ptx_coef=1.0 \(module\)"):
        fit(grpo(model_path, extra_losses=ExtraLosses(ptx_coef=1.0)))
    with pytest.raises(ValueError, match=r"with ptx_coef=0.0 \(module\)"):
        fit(grpo(model_path), ptx=ANSWERS)
