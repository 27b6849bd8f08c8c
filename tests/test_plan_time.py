"""Seconds of a step on one node, worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lightrl.cli import main
from lightrl.cli.plan.time import Job, Rates, decode_seconds, generation, training
from tests.toys import quickstart_model

RATES = Rates(flops=4e14, decode_flops=1e14, bandwidth=1e12, overhead=0.0)
JOB = Job(1e9, 10, 1000, 1e5, trajectories=8, prompt=500, response=1000, slots=4)


def test_a_decoding_step_by_hand() -> None:
    """10 sequences of 1,000 tokens: 2e9 bytes of weights and 1e9 of cache at 1e12 per second are 3 ms; the products,
    2e9 x 10 at 1e14 per second, 0.2 ms. With 1,000 short ones the products take 20 ms."""
    assert decode_seconds(JOB, RATES, 10, 1000) == pytest.approx(3e-3)
    assert decode_seconds(JOB, RATES, 1000, 0) == pytest.approx(20e-3)


def test_generation_by_hand() -> None:
    """Two engines with 4 sequences each: 4 prompts of 1e12 operations, 40 ms, then 1,000 steps that read
    2e9 + 4 x 1,000 x 1e5 = 2.4e9 bytes: 2.4 s. With 2 slots: two batches of 20 ms and 1,000 steps of 2.2 ms."""
    assert generation(JOB, RATES, 2) == pytest.approx(0.04 + 2.4)
    assert generation(replace(JOB, slots=2), RATES, 2) == pytest.approx(2 * (0.02 + 2.2))


def test_training_by_hand() -> None:
    """12,000 tokens x 2e9 and 4 x 10 x 1,000 x 8 x 1,500^2 / 2 = 3.6e11: 2.436e13 operations for a forward; one of
    old log-probs and four (recomputation) for the update, on 2 GPUs with 4e14: 0.15225 s."""
    assert training(JOB, RATES, 2) == pytest.approx(5 * 2.436e13 / 8e14)
    assert training(replace(JOB, recompute=False, forwards=0), RATES, 2) == pytest.approx(3 * 2.436e13 / 8e14)


def test_the_command_prints_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = quickstart_model(tmp_path)
    main(["plan", "--model", path, "--strategy", "ddp", "--trajectories", "1024"])
    assert "seconds per step" in capsys.readouterr().out.lower()
