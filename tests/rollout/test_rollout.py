"""The data module's own rules: layout of rows, on-policy, checked rewards, limits, resume."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from lightrl.algorithms import GRPOLightningModule
from lightrl.engines.base import StaleWeightsError
from lightrl.environments.episodes import one_turn, request_seed
from lightrl.records import Completion, CompletionGroup, Prompts, SamplingParams, Scores
from lightrl.rollout.collector import ScoredGroup, collate
from lightrl.rollout.datamodule import RolloutLoader
from tests.toys import SMALL, Idle, Keep, model_fixture, quickstart_model, quiet_trainer, sums_data

model_path = model_fixture(**SMALL)


def test_rows_are_laid_out_by_hand() -> None:
    prompts = Prompts(token_ids=[[5, 6], [7]], texts=["p", "q"], columns={"answer": ["x", "y"]})
    asked = [prompts.request(i, SamplingParams(), 0, 2) for i in range(2)]
    groups = [
        CompletionGroup(
            asked[0], [Completion([8, 1], [-0.5, -0.25], "a", "stop"), Completion([9], [-1.0], "b", "length")], 4
        ),
        CompletionGroup(
            asked[1], [Completion([3], [-2.0], "c", "stop"), Completion([2, 2], [-3.0, -4.0], "d", "stop")], 4
        ),
    ]
    nan = float("nan")
    scores = [Scores([1.0, nan], {"f": [1.0, nan]}), Scores([0.0, 0.5], {"f": [0.0, 0.5]})]
    scored = [ScoredGroup(prompts[[i]], one_turn(groups[i]), scores[i]) for i in range(2)]
    rows = collate(scored, pad_token_id=0, temperature=0.7)
    assert rows.token_ids.tolist() == [[5, 6, 8, 1], [5, 6, 9, 0], [7, 3, 0, 0], [7, 2, 2, 0]]
    assert rows.attention_mask.int().tolist() == [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 0]]
    assert rows.response_mask.int().tolist() == [[0, 0, 1, 1], [0, 0, 1, 0], [0, 1, 0, 0], [0, 1, 1, 0]]
    expected = [[0, 0, -0.5, -0.25], [0, 0, -1.0, 0], [0, -2.0, 0, 0], [0, -3.0, -4.0, 0]]
    assert rows.engine_logprobs.tolist() == expected
    assert rows.group_ids.tolist() == [0, 0, 1, 1] and rows.truncated.tolist() == [False, True, False, False]
    assert rows.columns["answer"] == ["x", "x", "y", "y"] and rows.policy_version == 4 and rows.temperature == 0.7
    assert math.isnan(float(rows.rewards[1])) and rows.rewards[[0, 2, 3]].tolist() == [1.0, 0.0, 0.5]


def test_request_seeds_differ_wherever_something_differs() -> None:
    seeds = {
        request_seed(s, stream, c, r) for s in (0, 1) for stream in ("train", "eval") for c in (0, 8) for r in (0, 1)
    }
    assert len(seeds) == 16 and all(0 <= seed < 2**62 for seed in seeds)


def test_sampling_with_weights_that_were_never_pushed_is_refused(model_path: str) -> None:
    with pytest.raises(
        StaleWeightsError, match=r"policy version -1 \(-1: never synced\), the trainer 0: Idle did not push the weights"
    ):
        quiet_trainer(callbacks=[Idle()]).fit(GRPOLightningModule(model_path, kl=None), sums_data())


@pytest.mark.parametrize(("taken", "position"), [(2, 0), (3, 0), (math.inf, 2)])
def test_an_epoch_that_lightning_cut_short_is_over_for_a_resumed_run(taken: float, position: int) -> None:
    """Two of three rollouts with `limit_train_batches=2`: the next epoch begins with its first."""
    trainer: Any = SimpleNamespace(max_epochs=5, current_epoch=0, fit_loop=SimpleNamespace(max_batches=taken))
    loader = RolloutLoader(SimpleNamespace(next_rollout=lambda left: left, trainer=trainer), 3)
    rollouts = iter(loader)
    for _ in range(2 if taken != 3 else 3):
        next(rollouts)
    assert loader.state_dict() == {"position": position}


def test_completions_end_with_the_turn_where_the_eos_is_another_token(tmp_path: Path) -> None:
    path = quickstart_model(tmp_path, **SMALL, vocab_size=40)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}({{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}({% endif %}"
    )
    tokenizer.save_pretrained(path)
    data = sums_data(sampling=SamplingParams(max_new_tokens=40), rollouts_per_epoch=1)
    keep = Keep()
    quiet_trainer(callbacks=[keep], max_epochs=1).fit(GRPOLightningModule(path), datamodule=data)
    (rollouts,) = keep.rollouts
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    sampled = [ids[mask].tolist() for ids, mask in zip(rollouts.token_ids, rollouts.response_mask, strict=True)]
    assert any(row[-1] == end for row in sampled)
    assert not any(end in row[:-1] for row in sampled)
    assert data.sampling.stop_token_ids is None  # the user's settings stay as they are
