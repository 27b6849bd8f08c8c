"""The records that cross layers."""

from __future__ import annotations

import pytest
import torch

from lightrl.records import Prompts, Rollouts, SamplingParams


def rollouts() -> Rollouts:
    """Three rows: prompts of 2, 2 and 1 tokens, responses of 1, 2 and 1; the last column is padding in rows 0 and 2."""
    return Rollouts(
        token_ids=torch.tensor([[5, 6, 7, 0], [5, 6, 8, 9], [4, 3, 0, 0]]),
        attention_mask=torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 0]]).bool(),
        response_mask=torch.tensor([[0, 0, 1, 0], [0, 0, 1, 1], [0, 1, 0, 0]]).bool(),
        engine_logprobs=torch.tensor([[0, 0, -1.0, 0], [0, 0, -2.0, -3.0], [0, -4.0, 0, 0]]),
        group_ids=torch.tensor([0, 0, 1]),
        rewards=torch.tensor([1.0, 0.0, float("nan")]),
        reward_parts={"f": torch.tensor([1.0, 0.0, float("nan")])},
        truncated=torch.tensor([False, True, False]),
        policy_version=3,
        prompts=["p", "p", "q"],
        completions=["a", "b", "c"],
        columns={"answer": ["x", "x", "y"]},
        metrics={"time/generate": 1.5},
    )


def test_select_takes_rows_of_tensors_lists_and_columns() -> None:
    picked = rollouts().select(torch.tensor([2, 0]))
    assert picked.token_ids.tolist() == [[4, 3, 0, 0], [5, 6, 7, 0]]
    assert picked.completions == ["c", "a"] and picked.columns == {"answer": ["y", "x"]}
    assert picked.reward_parts["f"][1] == 1.0 and picked.policy_version == 3
    assert picked.metrics == {"time/generate": 1.5}


def test_crop_drops_the_columns_that_are_padding_everywhere() -> None:
    cropped = rollouts().select(torch.tensor([0, 2])).crop()
    assert cropped.token_ids.shape == cropped.engine_logprobs.shape == (2, 3)
    assert cropped.rewards.shape == (2,)
    assert rollouts().crop().token_ids.shape == (3, 4)


def test_prompts_are_picked_by_slice_and_by_rows() -> None:
    prompts = Prompts(token_ids=[[1], [2, 3], [4]], texts=["a", "b", "c"], columns={"k": [1, 2, 3]}, indices=[7, 8, 9])
    assert prompts[1:].texts == ["b", "c"] and prompts[[2, 0]].columns == {"k": [3, 1]}
    assert prompts[[2, 0]].indices == [9, 7] and len(prompts[:1]) == 1


def test_sampling_that_inverts_the_distribution_or_samples_nothing_is_rejected() -> None:
    for wrong in ({"temperature": -0.5}, {"max_new_tokens": 0}, {"min_new_tokens": 9, "max_new_tokens": 8}):
        with pytest.raises(ValueError, match="SamplingParams"):
            SamplingParams(**wrong)
