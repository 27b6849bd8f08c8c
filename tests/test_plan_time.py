"""Seconds of a step: worked out by hand, and measured on this machine with rates taken on this machine."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen2ForCausalLM

from lightrl.cli import main
from lightrl.engines import TransformersEngine
from lightrl.memory_plan.time import (
    Job,
    Rates,
    best_split,
    curve,
    decode_seconds,
    generation,
    lengths,
    needed_staleness,
    steady,
    step_time,
    sync,
    training,
)  # fmt: skip
from lightrl.models.loading import load_causal_lm
from lightrl.models.policy import PolicyModel
from lightrl.models.spec import ModelSpec
from lightrl.records import EngineContext, Prompts, SamplingParams
from tests.toys import quickstart_model

RATES = Rates(flops=4e14, decode_flops=1e14, bandwidth=1e12, overhead=0.0, network=1e10)
JOB = Job(1e9, 10, 1000, 1e5, trajectories=8, prompt=500, response=1000, spread=0.0, slots=4)


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


def test_turns_wait_for_their_tools() -> None:
    """One trajectory, two turns of 500 steps of 2.1 ms, 5 s in between, and 10 ms for the prompt."""
    one = replace(JOB, trajectories=1, turns=2, tool_seconds=5.0)
    assert generation(one, RATES, 1) == pytest.approx(0.01 + 2.1 + 5.0)


def test_training_and_sync_by_hand() -> None:
    """12,000 tokens x 2e9 and 4 x 10 x 1,000 x 8 x 1,500^2 / 2 = 3.6e11: 2.436e13 operations for a forward; one of
    old log-probs and four (recomputation) for the update, on 2 GPUs with 4e14: 0.15225 s. 2e9 bytes at 1e10: 0.2 s."""
    assert training(JOB, RATES, 2) == pytest.approx(5 * 2.436e13 / 8e14)
    assert training(replace(JOB, recompute=False, forwards=0), RATES, 2) == pytest.approx(3 * 2.436e13 / 8e14)
    assert sync(JOB, RATES) == pytest.approx(0.2)


def test_what_rows_begin_with_alike_is_trained_once() -> None:
    """400 of 1,500 tokens in another row: 8 x 1,100 x 2e9 and 4 x 10 x 1,000 x 8 x (1,500^2 - 400^2) / 2 = 3.344e11."""
    assert training(replace(JOB, shared=400), RATES, 2) == pytest.approx(5 * (1.76e13 + 3.344e11) / 8e14)


def test_lengths_have_the_mean_and_a_tail() -> None:
    found = lengths(replace(JOB, spread=0.7, longest=1e9), 2000)
    assert sum(found) / 2000 == pytest.approx(1000, rel=0.01) and found[0] > 5 * 1000
    assert max(lengths(replace(JOB, spread=0.7, longest=3000), 2000)) == 3000


def test_staleness_hides_the_tail_and_says_what_binds() -> None:
    long = replace(JOB, trajectories=512, spread=1.0, slots=64)
    waits = step_time(long, RATES, 8, 0, 0)
    assert waits.step == pytest.approx(waits.generation + waits.training + waits.sync)
    assert waits.binds == "the longest completions"
    ahead = step_time(long, RATES, 6, 2, 1)
    assert ahead.generation == pytest.approx(steady(long, RATES, 6))
    assert ahead.step == pytest.approx(max(ahead.generation, ahead.training) + ahead.sync)
    assert step_time(long, replace(RATES, network=1e6), 6, 2, 1).binds == "weight sync"
    engines, trainers, best = best_split(long, RATES, 8)
    assert engines + trainers == 8 and best.step <= ahead.step


def test_the_staleness_that_hides_the_longest_completion() -> None:
    """One of 1,000 tokens takes 1,000 steps of 2.4 ms, and a tool 5 s more: 2.4 s or 7.4 s, in steps of 2 s."""
    assert needed_staleness(JOB, RATES, 2, 2.0) == 2
    assert needed_staleness(replace(JOB, turns=2, tool_seconds=5.0), RATES, 2, 2.0) == 4
    assert needed_staleness(JOB, RATES, 2, 100.0) == 1 and needed_staleness(JOB, RATES, 0, 2.0) == 0


@pytest.mark.parametrize("trajectories", [64, 4096])  # GPUs that outnumber them too
def test_the_curve_goes_to_4096_gpus_and_never_gets_much_slower(trajectories: int) -> None:
    found = curve(replace(JOB, trajectories=trajectories, spread=0.7), RATES)
    assert [gpus for gpus, *_ in found] == [1 << i for i in range(13)]
    assert all(later[3].step <= 1.05 * earlier[3].step for earlier, later in itertools.pairwise(found))


def cpu_seconds(work: Callable[[], object]) -> float:
    """The least of five, in this thread's processor time, which other processes do not change much."""
    work()
    took = []
    for _ in range(5):
        began = time.thread_time()
        work()
        took.append(time.thread_time() - began)
    return min(took)


@pytest.mark.slow
def test_training_time_is_predicted_from_the_measured_rate(tmp_path: Path) -> None:
    """The rate of 16 rows of 128 tokens gives the seconds of 48 rows of 256 within 30 %."""
    torch.set_num_threads(1)
    path = quickstart_model(tmp_path, hidden_size=128, intermediate_size=512)
    policy = PolicyModel(load_causal_lm(ModelSpec(path), trainable=True), layout="packed")
    size = sum(p.numel() for p in policy.parameters())

    def seconds(rows: int, width: int) -> float:
        ids = torch.randint(3, 20, (rows, width))
        mask = torch.ones(rows, width, dtype=torch.bool)
        response = mask & (torch.arange(width) > 0)
        return cpu_seconds(lambda: policy(ids, mask, response).logprobs.sum().backward())

    few = Job(size, 3, 128, 0, 16, prompt=1, response=127, spread=0.0, forwards=0, recompute=False)
    many = replace(few, trajectories=48, response=255)
    found = []
    for _ in range(5):  # what else the machine does may come between the measurements of a round
        rate = training(few, replace(RATES, flops=1.0), 1) / seconds(16, 128)
        found.append(training(many, replace(RATES, flops=rate), 1) / seconds(48, 256))
        if 0.7 < found[-1] < 1.3:
            return
    pytest.fail(f"predicted to measured seconds: {found}")


@pytest.mark.slow
def test_generation_time_is_predicted_from_measured_rates(tmp_path: Path) -> None:
    """The rates of 8 and of 64 short sequences give the seconds of 96 longer ones on 32 slots within 30 %."""
    torch.set_num_threads(1)
    path = quickstart_model(tmp_path, hidden_size=128, intermediate_size=512)
    size = sum(p.numel() for p in Qwen2ForCausalLM.from_pretrained(path).parameters())

    def seconds(trajectories: int, response: int, slots: int) -> float:
        engine = TransformersEngine(max_sequences=slots)
        engine.start(EngineContext(path))
        with torch.no_grad():
            engine.load_weights(Qwen2ForCausalLM.from_pretrained(path).named_parameters(), policy_version=0)
        prompts = Prompts(token_ids=[[5, 6, 7, 8]], texts=[""])
        settings = SamplingParams(max_new_tokens=response, ignore_eos=True)
        try:
            return cpu_seconds(
                lambda: list(engine.generate([prompts.request(0, settings, i, 1) for i in range(trajectories)]))
            )
        finally:
            engine.close()

    short = Job(size, 3, 128, 0, 8, prompt=4, response=32, spread=0.0, slots=64)
    long = replace(short, trajectories=96, response=48, slots=32)
    found = []
    for _ in range(5):  # what else the machine does may come between the measurements of a round
        few, many, measured = seconds(8, 32, 64), seconds(64, 32, 64), seconds(96, 48, 32)
        each = (many - few) / 32 / 56  # seconds that one more sequence adds to a step
        rates = replace(RATES, decode_flops=2 * size / each, bandwidth=1e15, overhead=max(0.0, few / 32 - 8 * each))
        found.append(generation(long, rates, 1) / measured)
        if 0.7 < found[-1] < 1.3:
            return
    pytest.fail(f"predicted to measured seconds: {found}")


def test_the_command_prints_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = quickstart_model(tmp_path)
    main(["plan", "--model", path, "--strategy", "ddp", "--trajectories", "1024"])
    out = capsys.readouterr().out
    assert "seconds per step of 1024 trajectories" in out and "4096" in out and "decoding" in out
    assert "staleness" in out and "131072" in out
