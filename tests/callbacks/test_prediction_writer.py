"""Files that PredictionWriter and RolloutWriter write, read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightrl.callbacks.prediction_writer import PredictionWriter
from lightrl.callbacks.rollout_writer import RolloutWriter, load_rollouts
from lightrl.distributed import strategies
from lightrl.records import Rollouts
from tests.callbacks.toys import Loader, LoggingModule, make_rollouts


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_jsonl_has_every_completion_in_order(
    rollouts: Rollouts, make_trainer: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_rollouts(["x"], [["ü", "z"]], [[0.5, 0.25]])
    other.columns["answer"] = [object(), 7]
    make_trainer(PredictionWriter()).predict(LoggingModule(), Loader([rollouts, other]))
    path = tmp_path / "predictions.jsonl"
    records = read(path)
    assert [r["completion"] for r in records] == ["2", "[/red]33", "4\n", "\x1b[2J55", "ü", "z"]
    assert records[1] == {
        "answer": "answer 0", "prompt": "1+1=", "completion": "[/red]33", "reward": 0.0, "num_tokens": 8,
        "truncated": True, "reward/exact": 0.0,
    }  # fmt: skip
    assert records[3]["reward"] is None  # nobody scored it
    assert [r["answer"] for r in records[4:]] == ["<object>", 7]
    assert capsys.readouterr().out.splitlines()[-1] == f"Wrote 6 completions to {path}"


def test_records_of_ranks_are_in_the_order_of_the_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 prompts, 2 ranks, 2 per rank and batch: rank 0 has 0, 2 and then 4; rank 1 has 1, 3 and then a filler."""
    writer, sent = PredictionWriter(), []
    writer._target = tmp_path / "p.jsonl"
    writer._target.write_text("an earlier run\n")
    zero = SimpleNamespace(global_rank=0, is_global_zero=True, print=sent.append)
    writer.on_predict_start(zero, None)  # type: ignore[arg-type]
    for batch_idx, shares in enumerate(([[0, 2], [1, 3]], [[4], [4]])):
        parts: list[Any] = []
        monkeypatch.setattr(strategies, "gather_objects", parts.append)
        for rank in (1, 0):  # rank 0 is the last, and gets what both have
            prompts = shares[rank]
            groups = torch.tensor([i for i in range(len(prompts)) for _ in range(2)])
            rows = torch.tensor([0, 0, *range(1, len(groups))])  # the first attempt is two rows and one record
            filler = rank == 1 and batch_idx == 1
            batch = SimpleNamespace(group_ids=groups[rows], trajectory_ids=rows, filler=filler)
            records = [{"prompt": p, "completion": c} for p in prompts for c in "ab"]
            trainer: Any = zero if rank == 0 else SimpleNamespace(global_rank=1, is_global_zero=False)
            if rank == 0:
                monkeypatch.setattr(strategies, "gather_objects", lambda own, parts=parts: [own, *parts])
            writer.write_on_batch_end(trainer, None, records, None, batch, batch_idx, 0)  # type: ignore[arg-type]
    writer.on_predict_end(zero, None)  # type: ignore[arg-type]
    assert [(r["prompt"], r["completion"]) for r in read(writer._target)] == [(p, c) for p in range(5) for c in "ab"]
    assert sent == [f"Wrote 10 completions to {writer._target}"]


def test_saved_rollouts_come_back(rollouts: Rollouts, make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    rollouts.inputs = [{"pixels": torch.full((2,), float(i))} for i in range(4)]
    make_trainer(RolloutWriter(every_n_rollouts=2, evaluate=False)).fit(LoggingModule(), Loader([rollouts] * 5))
    assert sorted(p.name for p in (tmp_path / "rollouts").iterdir()) == ["rollout=000002", "rollout=000004"]
    tensors, texts = load_rollouts(tmp_path / "rollouts" / "rollout=000004")
    assert torch.equal(tensors["token_ids"], rollouts.token_ids)
    assert torch.equal(tensors["engine_logprobs"], rollouts.engine_logprobs)
    assert torch.equal(tensors["reward/exact"], rollouts.reward_parts["exact"]) is False  # NaN is not NaN,
    assert torch.equal(tensors["reward/exact"].isnan(), rollouts.rewards.isnan())  # but it is where it was
    assert tensors["advantages"][0].tolist()[:6] == [0, 0, 0, 0, 4, 0]
    assert "values" not in tensors and tensors["policy_version"] == 3 and tensors["temperature"] == 1.0
    assert [float(x["pixels"][0]) for x in tensors["inputs"]] == [0.0, 1.0, 2.0, 3.0]
    expected = {"prompt": "[b]2+2=", "completion": "4\n", "columns": {"answer": "answer 1"}, "group": 1, "rollout": 4}
    assert expected.items() <= texts[2].items()


def test_a_trajectory_of_two_rows_is_one_record(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    """Attempt 0 is rows 0 and 1, two turns; attempt 1 failed."""
    rollouts = make_rollouts(["ab"], [["cd", "ef", "gh"]], [[1.0, 1.0, float("nan")]])
    rollouts.trajectory_ids = torch.tensor([0, 0, 1])
    rollouts.turn_ids = torch.tensor([[-1, -1, 0, 0], [-1, -1, 1, 1], [-1, -1, 0, 0]])
    rollouts.turn_rewards = {"environment": torch.tensor([[0, 0, 0, 0.25], [0, 0, 0, 0.5], [0, 0, 0, 0]])}
    rollouts.stop_reasons = ["turns", "turns", "failure"]
    rollouts.messages = [[{"role": "user", "content": "ab"}]] * 3
    rollouts.states = [["s", "t"], ["s", "t"], ["s"]]
    make_trainer(RolloutWriter(every_n_rollouts=2, evaluate=False)).fit(LoggingModule(), Loader([rollouts] * 2))
    _, (first, second) = load_rollouts(tmp_path / "rollouts" / "rollout=000002")
    assert first["stop_reason"] == "turns" and first["trained"] and first["reward"] == 1.0
    assert [row["turns"] for row in first["rows"]] == [[-1, -1, 0, 0], [-1, -1, 1, 1]]
    assert first["rows"][1]["policy_versions"] == [-1, -1, 3, 3]
    assert first["rows"][0]["engine_logprobs"] == [0.0, 0.0, -0.5, -0.5]
    assert [(turn["rewards"], turn["tokens"], turn["state"]) for turn in first["turns"]] == [
        ({"environment": 0.25}, 2, "s"), ({"environment": 0.5}, 2, "t"),
    ]  # fmt: skip
    assert second["stop_reason"] == "failure" and second["reward"] is None and not second["trained"]


def test_ranks_are_joined(tmp_path: Path) -> None:
    for rank, width in ((0, 2), (1, 3), (10, 1)):
        tensors = {"token_ids": torch.full((2, width), rank), "group_ids": torch.tensor([0, 1]), "policy_version": 4}
        tensors["routes"] = [torch.full((width, 2, 3), rank, dtype=torch.uint8), None]
        if rank == 1:  # the others have text only
            tensors["inputs"] = [{"pixel_values": torch.ones(1)}, {}]
        torch.save(tensors, tmp_path / f"rank{rank}.pt")
        (tmp_path / f"rank{rank}.jsonl").write_text(f'{{"prompt": "{rank}"}}\n' * 2)
    tensors, texts = load_rollouts(tmp_path)
    assert tensors["token_ids"].tolist() == [[0, 0, 0]] * 2 + [[1, 1, 1]] * 2 + [[10, 0, 0]] * 2
    assert tensors["group_ids"].tolist() == [0, 1, 2, 3, 4, 5]
    assert [None if taken is None else taken[0, 0, 0].item() for taken in tensors["routes"]] == [
        0,
        None,
        1,
        None,
        10,
        None,
    ]
    assert [len(inputs) for inputs in tensors["inputs"]] == [0, 0, 1, 0, 0, 0]
    assert [text["prompt"] for text in texts] == ["0", "0", "1", "1", "10", "10"]
