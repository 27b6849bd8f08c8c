"""Every pair of features in short runs: a part of an array here, whole ones by `-m long` and `make pairs`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pairs.__main__ import BEGIN, changes
from tests.pairs.arrays import BrokenError, covering_array, missing_pairs, refused_settings, run
from tests.pairs.features import FACTORS, REFUSALS, refusals

ROOT = Path(__file__).resolve().parent.parent.parent
IN_CI = 80


def test_every_pair_that_is_not_refused_is_in_the_array() -> None:
    array = covering_array()
    assert all(not refusals(s) and s.keys() == FACTORS.keys() for s in array)
    # A critic is PPO's alone, so the estimators that need one meet no other algorithm.
    critics = {("estimator", e, "algorithm", a) for e in ("GAE", "TurnGAE") for a in FACTORS["algorithm"] if a != "PPO"}
    assert missing_pairs(array) == critics
    covered = len(missing_pairs([])) - len(missing_pairs(array[:IN_CI]))
    assert covered > 0.85 * len(missing_pairs([]))


def test_each_refusal_is_met_and_names_both() -> None:
    settings = refused_settings()
    assert {refusal.name for s in settings for refusal in refusals(s)} == {refusal.name for refusal in REFUSALS}
    assert {run(s) for s in settings} == {"refused"}


@pytest.mark.parametrize("part", range(4))
def test_pairs_of_features_train_or_are_refused(part: int) -> None:
    outcomes = {}
    for s in covering_array()[part:IN_CI:4]:
        outcomes[changes(s)] = run(s)
    assert {*outcomes.values()} <= {"trained", "nothing to learn"}, outcomes
    assert sum(outcome == "trained" for outcome in outcomes.values()) > len(outcomes) / 2


def test_a_run_that_is_not_refused_but_should_be_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {name: levels[0] for name, levels in FACTORS.items()} | {"algorithm": "GRPO"}
    assert run(plain) == "trained"
    monkeypatch.setattr("tests.pairs.arrays.refusals", lambda s: REFUSALS[:1])
    with pytest.raises(BrokenError, match="not refused: a critic"):
        run(plain)
    monkeypatch.setattr("tests.pairs.arrays.refusals", lambda s: [])
    with pytest.raises(BrokenError, match="without a known reason.*needs a critic"):
        run(plain | {"estimator": "GAE"})


def test_the_canary_does_not_ask_about_pictures_that_it_cannot_show() -> None:
    plain = {name: levels[0] for name, levels in FACTORS.items()} | {"algorithm": "GRPO"}
    assert run(plain | {"rows": "image", "callback": "LedgerCanary"}) == "trained"


def test_the_page_lists_every_refusal() -> None:
    text = (ROOT / "docs" / "feature_pairs.md").read_text()
    assert BEGIN in text
    assert [f"- {refusal.name}" for refusal in REFUSALS] == [
        line for line in text.splitlines() if line.startswith("- ")
    ]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_whole_array() -> None:
    assert {run(s) for s in covering_array(seed=1)} == {"trained", "nothing to learn"}
