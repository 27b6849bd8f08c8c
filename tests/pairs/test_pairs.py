"""Pairs of features in short runs, a part of a covering array here and all of it by `-m long`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pairs.arrays import covering_array, missing_pairs, run
from tests.pairs.features import FACTORS, refused

HERE = 16
pytestmark = pytest.mark.filterwarnings("ignore")


def test_every_pair_that_is_not_refused_is_in_the_array() -> None:
    array = covering_array()
    assert all(not refused(s) and s.keys() == FACTORS.keys() for s in array)
    # A critic is PPO's alone, so the estimators that need one meet no other algorithm.
    critics = {("estimator", e, "algorithm", a) for e in ("GAE", "TurnGAE") for a in FACTORS["algorithm"] if a != "PPO"}
    assert missing_pairs(array) == critics


def trained(array: list[dict[str, str]], folder: Path) -> None:
    moved = []
    for number, s in enumerate(array):
        changes = {name: level for name, level in s.items() if level != FACTORS[name][0]}
        try:
            moved.append(run(s, folder / str(number)))
        except Exception as error:
            raise AssertionError(f"run {number}: {changes}") from error
    assert sum(moved) > len(moved) / 2


@pytest.mark.timeout(900)  # ten times slower on a busy machine
def test_pairs_of_features_train(tmp_path: Path) -> None:
    trained(covering_array()[:HERE], tmp_path)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_array_trains(tmp_path: Path) -> None:
    trained(covering_array(seed=1), tmp_path)
