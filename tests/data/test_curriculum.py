"""Prompts picked by what was learnt: the draw by its probabilities, classes, replay, ranks, resume."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset
from lightning.pytorch import seed_everything

from lightrl.algorithms import GRPOLightningModule
from lightrl.data.curriculum import CurriculumSet, PromptCurriculum
from lightrl.data.prompts import PromptSource
from lightrl.records import SamplingParams
from tests.toys import SMALL, Keep, quickstart_model, quiet_trainer, sums_data

ROWS = [{"prompt": f"{i}+{i}=", "level": "easy" if i < 4 else "hard"} for i in range(8)]


def opened(tokenizer: Any, seed: int = 0, **settings: Any) -> CurriculumSet:
    return PromptCurriculum(PromptSource(rows=ROWS), **settings).load(tokenizer, seed=seed)


def picked(prompts: CurriculumSet, cursor: int, count: int, **ranks: int) -> list[int]:
    return prompts.batch(cursor, count, **ranks).indices


def test_rows_are_drawn_in_proportion_to_their_weights_without_replacement(tokenizer: Any) -> None:
    """Of 8 rows 0 and 1 are solved, 2 is hard, 3 is in between, 4-7 are new: weights 3 x 0.25 and 5 x 1."""
    firsts: Counter[int] = Counter()
    for seed in range(500):
        prompts = opened(tokenizer, seed, rest_weight=0.25)
        prompts.observe([(0, [1.0]), (1, [1.0]), (2, [0.0]), (3, [1.0, 0.0])], 8)
        order = prompts._drawn(0)
        assert sorted(order) == list(range(8))
        firsts[order[0]] += 1
    total = 5 + 3 * 0.25
    for row in range(8):
        expected = (0.25 if row < 3 else 1.0) / total
        assert abs(firsts[row] / 500 - expected) < 4 * (expected * (1 - expected) / 500) ** 0.5, row


def test_the_rate_is_that_of_the_last_visits_and_metrics_count_rows(tokenizer: Any) -> None:
    prompts = opened(tokenizer, window=2, low=0.1, high=0.9)
    prompts.observe([(5, [0.0]), (6, [1.0])], 4)
    metrics = prompts.observe([(5, [1.0]), (6, [1.0])], 8)
    shares = {"rollout/rows_unseen": 6 / 8, "rollout/rows_hard": 0.0, "rollout/rows_solved": 1 / 8}
    assert metrics == shares | {"rollout/classes_open": 1.0}
    assert prompts.observe([(5, [1.0])], 12)["rollout/rows_solved"] == 2 / 8, "the failure has left the window"


def test_hard_rows_come_again_the_oldest_first(tokenizer: Any) -> None:
    prompts = opened(tokenizer, replay=0.25)
    prompts.observe([(7, [0.0])], 4)
    prompts.observe([(1, [0.0]), (2, [0.0]), (3, [1.0, 0.0])], 8)
    order = picked(prompts, 8, 8)
    assert [order[3], order[7]] == [7, 1], "every fourth; 7 was seen before 1 and 2"
    assert sorted(order) == list(range(8))


@pytest.mark.parametrize("percent", [29, 57])
def test_the_replayed_share_is_exact_over_a_hundred_prompts(percent: int, tokenizer: Any) -> None:
    source = PromptSource(rows=[{"prompt": f"{i}+{i}="} for i in range(200)])
    prompts = PromptCurriculum(source, replay=percent / 100, rest_weight=1e-9).load(tokenizer)
    prompts.observe([(i, [0.0]) for i in range(100)], 0)
    assert sum(row < 100 for row in picked(prompts, 0, 100)) == percent


def test_the_next_class_opens_when_the_last_one_is_learnt(tokenizer: Any) -> None:
    prompts = opened(tokenizer, class_column="level", classes=["easy", "hard"], advance_at=0.75, class_window=4)
    assert sorted(picked(prompts, 0, 4)) == [0, 1, 2, 3] and sorted(picked(prompts, 4, 4)) == [0, 1, 2, 3]
    assert prompts.observe([(i, [1.0] * 7 + [0.0] * 3) for i in range(4)], 4)["rollout/classes_open"] == 1
    assert max(picked(prompts, 4, 4)) < 4
    assert prompts.observe([(i, [1.0] * 3 + [0.0]) for i in range(4)], 8)["rollout/classes_open"] == 2
    assert sorted(picked(prompts, 8, 8)) == list(range(8))


def test_ranks_pick_apart_what_one_would_and_a_state_goes_on(tokenizer: Any) -> None:
    settings: dict[str, Any] = {"replay": 0.25, "class_column": "level", "classes": ["easy", "hard"], "class_window": 2}
    whole, parts = opened(tokenizer, **settings), [opened(tokenizer, **settings) for _ in range(2)]
    restored, cursor = opened(tokenizer, **settings), 0
    for number in range(6):
        expected = picked(whole, cursor, 4)
        of_ranks = [picked(part, cursor, 4, rank=rank, world_size=2) for rank, part in enumerate(parts)]
        assert [of_ranks[k % 2][k // 2] for k in range(4)] == expected == picked(restored, cursor, 4)
        more = picked(whole, cursor + 4, 2)  # of a refill
        assert more == picked(restored, cursor + 4, 2)
        visits = [(row, [1.0 if (row + number) % 3 else 0.0]) for row in expected + more]
        cursor += 6
        whole.observe(visits, cursor)
        for part in parts:
            part.observe(visits[::-1], cursor)  # other ranks' come in another order
        restored = opened(tokenizer, **settings)
        restored.load_state_dict(whole.state_dict())
    assert whole.state_dict() == parts[0].state_dict() == restored.state_dict()
    with pytest.raises(ValueError, match="has 8 examples, but the dataset has 4"):
        PromptCurriculum(PromptSource(rows=ROWS[:4])).load(tokenizer).load_state_dict(whole.state_dict())


def rewards(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """Rows 0-3 are always solved, 4 and 5 never, 6 and 7 by every other attempt."""
    rates = [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.5, 0.5]
    return [rates[int(p[0])] if rates[int(p[0])] != 0.5 else float(i % 2) for i, p in enumerate(prompts)]


def fit(path: str, epochs: int, checkpoint: str | None = None, **data: Any) -> tuple[list[list[int]], Any]:
    """Rows of each rollout of a run of 4 prompts a rollout, 3 rollouts an epoch."""
    seed_everything(0, verbose=False)
    keep = Keep()
    trainer = quiet_trainer(callbacks=[keep], max_epochs=epochs)
    source = PromptCurriculum(PromptSource(rows=ROWS, chat_template=False), rest_weight=0.01, replay=0.25)
    settings = {"prompts": source, "rewards": [rewards], "prompts_per_rollout": 4, "rollouts_per_epoch": 3, **data}
    module = GRPOLightningModule(path, optimizer=lambda params: torch.optim.SGD(params, lr=0.01))
    trainer.fit(module, sums_data(sampling=SamplingParams(max_new_tokens=3), **settings), ckpt_path=checkpoint)
    prompts = [r.prompts[:: len(r) // 4] for r in keep.rollouts]
    return [[int(p[0]) for p in of_rollout] for of_rollout in prompts], trainer


def test_a_run_learns_from_what_it_can_learn_from_and_resumes_exactly(tmp_path: Path) -> None:
    path = quickstart_model(tmp_path / "model", **SMALL)
    rows, _ = fit(path, 4)
    assert not {0, 1, 2, 3} & set(rows[0]) & set(rows[1]), "solved rows rest"
    later = Counter(row for of_rollout in rows[3:] for row in of_rollout)
    assert later[6] == later[7] == len(rows[3:]), "what is neither hard nor solved is always drawn"
    assert later[4] + later[5] >= len(rows[3:]), "one in four is a hard row again"
    begun, trainer = fit(path, 2)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    resumed, _ = fit(path, 4, str(tmp_path / "a.ckpt"))
    assert begun + resumed == rows
    refilled, _ = fit(path, 1, dynamic_sampling_rounds=2)
    assert {6, 7} <= set(refilled[1]), "dropped groups count as seen"


def test_what_a_curriculum_lacks_is_named(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="class_column=None with classes"):
        PromptCurriculum(PromptSource(rows=ROWS), classes=["a"])
    for column, found in (("level", "easy, hard"), ("levle", "None")):
        for classes in (["easy"], ["easy", "between", "hard"]):  # an empty class never opens the next one
            for rows in (ROWS, Dataset.from_list(ROWS)):
                source = PromptSource(rows=rows)  # type: ignore[arg-type]
                with pytest.raises(ValueError, match=f"class_column='{column}'.* are {found}, but"):
                    PromptCurriculum(source, class_column=column, classes=classes).load(tokenizer)
    stream = PromptSource(rows=IterableDataset.from_generator(lambda: iter(ROWS)))
    with pytest.raises(ValueError, match="streaming"):
        PromptCurriculum(stream).load(tokenizer)
