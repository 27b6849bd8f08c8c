"""Every pair of features in short runs: a part of an array here, whole ones by `-m long` and `make pairs`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightrl.compat.arguments import at_least
from tests.pairs.__main__ import changes
from tests.pairs.arrays import BrokenError, covering_array, missing_pairs, refused_settings, run
from tests.pairs.features import FACTORS, REFUSALS, Settings, refusals

ROOT = Path(__file__).resolve().parent.parent.parent
IN_CI = 24
SLOW = (("engine", "vLLM"), ("ranks", "2"))


def runs_here(s: Settings) -> bool:
    """Whether a run may be in a process with other tests."""
    return not any(s[factor] == level for factor, level in SLOW)


def test_every_pair_that_is_not_refused_is_in_the_array() -> None:
    array = covering_array()
    assert all(not refusals(s) and s.keys() == FACTORS.keys() for s in array)
    # A critic is PPO's alone, so the estimators that need one meet no other algorithm.
    critics = {("estimator", e, "algorithm", a) for e in ("GAE", "TurnGAE") for a in FACTORS["algorithm"] if a != "PPO"}
    assert missing_pairs(array) == critics
    plain = [s for s in array if runs_here(s)][:IN_CI]
    here = [pair for pair in missing_pairs([]) if not {"vLLM", "ranks"} & {*pair} or pair[-2:] == ("ranks", "1")]
    assert len({*here} - missing_pairs(plain)) > 0.5 * len(here)
    both = {("engine", "vLLM", "ranks", "2"), *(("rows", r, *x) for r in FACTORS["rows"] for x in SLOW)}
    assert not both & missing_pairs(array), "real vLLM, two ranks, images and environments meet"


def test_each_refusal_is_met_and_names_both() -> None:
    settings = refused_settings()
    assert {refusal.name for s in settings for refusal in refusals(s)} == {refusal.name for refusal in REFUSALS}
    assert {run(s) for s in settings if runs_here(s)} == {"refused"}


@pytest.mark.timeout(900)  # twenty runs, ten times slower on a busy machine
@pytest.mark.parametrize("part", range(2))
def test_pairs_of_features_train_or_are_refused(part: int) -> None:
    outcomes = {}
    for s in [s for s in covering_array() if runs_here(s)][part:IN_CI:2]:
        outcomes[changes(s)] = run(s)
    assert {*outcomes.values()} <= {"trained", "nothing to learn"}, outcomes
    assert sum(outcome == "trained" for outcome in outcomes.values()) > len(outcomes) / 2


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)  # engines and ranks start ten times slower on a busy machine
def test_pairs_with_vllm_and_on_two_ranks_train() -> None:
    """In a process of its own, from which ranks are forked."""
    pytest.importorskip("vllm")
    command = [sys.executable, "-m", "tests.pairs", "--only", "ci"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    outcomes = [json.loads(line)["outcome"] for line in done.stdout.splitlines() if line.startswith("{")]
    refused = [s for s in refused_settings() if not runs_here(s)]
    assert outcomes[: len(refused)] == ["refused"] * len(refused) and refused
    outcomes = outcomes[len(refused) :]
    assert len(outcomes) == 6 and {*outcomes} <= {"trained", "nothing to learn"} and "trained" in outcomes[-2:]


def test_a_rank_that_fails_or_stays_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's own process may be forked where nothing trains."""
    plain = {name: levels[0] for name, levels in FACTORS.items()} | {"algorithm": "GRPO", "ranks": "2"}
    ways = {
        "ZeroDivisionError": lambda: str(1 / 0),
        "1. did not end": lambda: str(time.sleep(60)),
        "without a known reason: unknown": lambda: str(at_least("unknown", -1, 0)),
    }
    monkeypatch.setattr("tests.pairs.arrays.RANK_SECONDS", 0.5)
    for message, way in ways.items():

        def second_only(s: Settings, folder: Path, way: Any = way) -> str:
            return way() if os.environ["LOCAL_RANK"] == "1" else "trained"

        monkeypatch.setattr("tests.pairs.arrays._run", second_only)
        with pytest.raises(BrokenError, match=message):
            run(plain)


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
    assert run(plain | {"rows": "image", "callback": "TrajectoryLogprobCheck"}) == "trained"


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_whole_array() -> None:
    assert {run(s) for s in covering_array(seed=1) if runs_here(s)} == {"trained", "nothing to learn"}
