"""Ranks that show different things, or train nothing, learn what one process learns, under every strategy.

Run as a module, the file is what each of the two does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from transformers import AutoModelForImageTextToText

from lightrl.algorithms import CriticSpec, GRPOLightningModule, PPOLightningModule
from lightrl.algorithms.module import Shaping, Updates
from lightrl.data.prompts import PromptSource
from lightrl.models.spec import ModelSpec
from tests import forks
from tests.distributed.job import full_weights, make_strategy
from tests.toys import digits_reward, quiet_trainer, sgd, sums_data
from tests.vision.conftest import film, picture
from tests.vision.models import build

IMAGE, TWO, VIDEO = (
    {"images": [picture(16, 24, 1)]},
    {"images": [picture(16, 16, 2), picture(24, 16, 3)]},
    {"videos": [film(7)]},
)
# Even rows are rank 0's, odd ones rank 1's; three rollouts of four.
SHOWN: list[dict[str, Any]] = [
    *({}, IMAGE, {}, TWO),  # rank 0 has text alone
    *(IMAGE, {}, {**TWO, **VIDEO}, {"videos": [film(4, seed=2)]}),  # rank 0 alone shows images
    *(IMAGE, VIDEO, TWO, {}),  # rank 0's groups are tied: it trains nothing
]
ROWS = [
    {"prompt": f"what is {i}?", "images": None, "videos": None, "tied": i in (8, 10), **shown}
    for i, shown in enumerate(SHOWN)
]


def reward(prompts: list[str], completions: list[str], tied: list[bool], **columns: Any) -> list[float]:
    """No spread in groups of rows that are tied; and some completions that no function scores."""
    scores = digits_reward(prompts, completions)
    return [0.5 if flat else score + i % 4 for i, (score, flat) in enumerate(zip(scores, tied, strict=True))]


def run(kind: str, path: str, devices: int, strategy: str = "auto") -> dict[str, torch.Tensor]:
    """Three rollouts of four prompts: GRPO as recipes have it, or PPO with a critic and masked truncated rows."""
    seed_everything(0, verbose=False)
    options: dict[str, Any] = {"optimizer": sgd, "updates": Updates(micro_batch_tokens=60)}
    module: PPOLightningModule
    if kind == "critic":
        module = PPOLightningModule(ModelSpec(path), CriticSpec(), shaping=Shaping(mask_truncated=True), **options)
    else:
        module = GRPOLightningModule(ModelSpec(path), **options)
    trainer = quiet_trainer(devices=devices, strategy=make_strategy(strategy))
    data = sums_data(
        prompts=PromptSource(rows=ROWS, shuffle=False), rewards=[reward], rollouts_per_epoch=3, prompts_per_rollout=4
    )
    trainer.fit(module, data)
    assert trainer.global_step >= 2
    return full_weights(module)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        ("grpo", "ddp"),
        pytest.param("critic", "fsdp2", marks=pytest.mark.long),
        *(pytest.param("grpo", strategy, marks=pytest.mark.long) for strategy in ("zero2", "zero3")),
    ],
)
def test_ranks_that_show_different_things_learn_what_one_process_learns(
    kind: str, strategy: str, tmp_path: Path
) -> None:
    pytest.importorskip("torchvision")
    path = str(build("qwen2_vl", tmp_path / "model"))
    one = run(kind, path, devices=1)
    forks.ranks(__name__, kind, path, str(tmp_path), strategy)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    start = AutoModelForImageTextToText.from_pretrained(path).state_dict()
    moved = [name for name, value in start.items() if name in one and not torch.equal(one[name], value)]
    assert any("visual" in name for name in moved) and any("language_model" in name for name in moved)
    for rank in ranks:
        assert rank.keys() == one.keys()
        for name, expected in one.items():
            torch.testing.assert_close(rank[name], expected, atol=2e-6, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def main(kind: str, path: str, folder: Path, strategy: str) -> None:
    torch.set_num_threads(1)
    weights = run(kind, path, devices=2, strategy=strategy)
    torch.save(weights, folder / f"{torch.distributed.get_rank()}.pt")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4])
