"""What callbacks declare, what data modules ask for, and which checkpoints are taken."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from lightrl import algorithms
from lightrl.algorithms import (
    GRPOLightningModule,
)
from lightrl.algorithms.run_record import FORMAT, description, require_own
from lightrl.objectives import PassAtK
from tests.toys import quickstart_model, quiet_trainer, sums_data


def test_groups_without_k_samples_are_refused(tmp_path: Path) -> None:
    path = quickstart_model(tmp_path)
    module = GRPOLightningModule(path, advantage=PassAtK(k=3))
    with pytest.raises(ValueError, match="PassAtK.k=3"):
        quiet_trainer(max_epochs=1).fit(module, sums_data(group_size=2))


def test_checkpoints_of_other_classes_and_formats_are_refused() -> None:
    stored = description("PPOLightningModule", {}, None)
    require_own(stored, "PPOLightningModule")
    with pytest.raises(ValueError, match="written by PPOLightningModule, not by GRPOLightningModule"):
        require_own(stored, "GRPOLightningModule")
    with pytest.raises(ValueError, match="something other than LightRL"):
        require_own({}, "PPOLightningModule")
    del stored["format"]
    with pytest.raises(ValueError, match=f"format 1, .* reads format {FORMAT}"):
        require_own(stored, "PPOLightningModule")


def test_a_run_in_which_nothing_gives_rewards_says_so(tmp_path: Path) -> None:
    module = GRPOLightningModule(quickstart_model(tmp_path / "model"))
    with pytest.warns(UserWarning, match=r"rewards=null with GRPO.* nothing scores the completions.*data\.rewards"):
        quiet_trainer().fit(module, sums_data(rewards=None, rollouts_per_epoch=1, group_size=2))


@pytest.mark.parametrize("name", [name for name in algorithms.__all__ if name.endswith("LightningModule")])
def test_constructors_stay_small_and_variants_override_public_hooks_only(name: str) -> None:
    kind = getattr(algorithms, name)
    assert len(inspect.signature(kind).parameters) <= 15
    private = [each for each, value in vars(kind).items() if each[0] == "_" != each[1] and inspect.isfunction(value)]
    assert not [each for each in private if hasattr(kind.__mro__[1], each)]
