"""A LoRA policy's pushes bring the adapter alone, and the engine, in its own process, samples with it.

At the end, SIGSTOP stops its core, and the error must come within a time limit.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from lightrl.algorithms import GRPOLightningModule
from lightrl.callbacks import WeightSync
from lightrl.engines import EngineContext, EngineDiedError, VLLMEngine
from lightrl.engines.vllm import conversion
from lightrl.models.lora import adapter_config, add_lora, named_adapter_weights
from lightrl.models.policy import PolicyModel
from lightrl.models.spec import LoraSpec, ModelSpec
from lightrl.records import CompletionGroup, GenerationRequest, Prompts, SamplingParams
from tests.engines.conftest import SOON, ask, load, reference_logprobs
from tests.rows import as_rows
from tests.toys import quickstart_model, quiet_trainer, sums_data
from tests.waiting import until

pytest.importorskip("vllm")
pytest.importorskip("peft")
pytestmark = pytest.mark.vllm
SPEC = LoraSpec(r=3, alpha=7.0)
PROMPTS = Prompts(token_ids=[[2, 5 + i, 17, 20 + i] for i in range(16)], texts=[""] * 16)
LONG = SamplingParams(max_new_tokens=40, ignore_eos=True)
BOUND = 4.0


@pytest.fixture(scope="module")
def engine(tied_folder: Path) -> Iterator[VLLMEngine]:
    """In a process of its own; takes 64 tokens a step, so that prompts of 20 would be cut in two."""
    engine = VLLMEngine(in_process=False, engine_args={"max_num_batched_tokens": 64, "max_num_seqs": 16})
    engine.start(EngineContext(str(tied_folder), max_prompt_tokens=24, max_new_tokens=40, lora_rank=SPEC.r))
    yield engine
    VLLMEngine.close(engine)


def adapted(folder: Path, seed: int) -> PolicyModel:
    lm = load(folder)
    add_lora(lm, SPEC)
    torch.manual_seed(seed)
    for name, parameter in lm.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return PolicyModel(lm).eval()


@torch.no_grad()
def expected(policy: PolicyModel, rows: list[list[int]]) -> list[list[float]]:
    tokens = torch.tensor(rows)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    response = mask.clone()
    response[:, 0] = False
    return policy(as_rows(tokens, mask, response)).logprobs[:, 1:].tolist()


def test_each_push_replaces_the_adapter(engine: VLLMEngine, tied_folder: Path) -> None:
    rows = [[2, *range(5, 25)], [2, *range(20, 40)]]
    assert engine.pushes == "adapter"
    results = []
    for version, seed in enumerate((1, 2)):
        policy = adapted(tied_folder, seed)
        engine.load_adapter(named_adapter_weights(policy), adapter_config(policy, SPEC), policy_version=version)
        assert engine.policy_version == version
        results.append(torch.tensor(engine.logprobs(rows)))
        torch.testing.assert_close(results[-1], torch.tensor(expected(policy, rows)), atol=5e-5, rtol=0)
    base = torch.stack([reference_logprobs(load(tied_folder), row) for row in rows])
    assert (results[0] - results[1]).abs().max() > 0.1 and (results[1] - base).abs().max() > 0.1


@pytest.mark.long
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_several_sequences_are_scored_with_the_adapter_in_every_family(tmp_path: Path, family: str) -> None:
    # vLLM gives Llama and Qwen 3 a LoRA layer on the output head, whose CPU kernel fails on the prompts' log-probs.
    folder = Path(quickstart_model(tmp_path, family=family, **({"head_dim": 32} if family == "Qwen3" else {})))
    rows = [[2, *range(5, 25)], [2, *range(20, 30)], [2, 7]]
    engine = VLLMEngine(in_process=False)
    try:
        engine.start(EngineContext(str(folder), max_prompt_tokens=32, max_new_tokens=16, lora_rank=SPEC.r))
        policy = adapted(folder, 1)
        engine.load_adapter(named_adapter_weights(policy), adapter_config(policy, SPEC), policy_version=0)
        for row, theirs in zip(rows, engine.logprobs(rows), strict=True):
            ours = torch.tensor(expected(policy, [row])[0])
            torch.testing.assert_close(torch.tensor(theirs), ours, atol=5e-5, rtol=0)
        groups = ask(
            engine, Prompts(rows, [""] * 3), SamplingParams(max_new_tokens=4), num_completions=2, seeds=range(3)
        )
        for number, group in groups:
            for part in group.completions:
                ours = torch.tensor(expected(policy, [rows[number] + part.token_ids])[0][-len(part.token_ids) :])
                torch.testing.assert_close(torch.tensor(part.logprobs), ours, atol=5e-5, rtol=0)
    finally:
        engine.close()


def test_prompts_that_would_be_cut_in_two_keep_their_seeds(engine: VLLMEngine, tied_folder: Path) -> None:
    # Eight prompts of 20 tokens against 64 a step: CPU generators cannot take a draw back after half a prompt.
    prompts = Prompts([[3 + (7 * p + i) % 40 for i in range(20)] for p in range(8)], [""] * 8)
    sampling = SamplingParams(max_new_tokens=4, ignore_eos=True)

    def sample(pick: list[int]) -> dict[int, Any]:
        groups = ask(engine, prompts[pick], sampling, num_completions=2, seeds=pick)
        return {pick[i]: [c.token_ids for c in group.completions] for i, group in groups}

    together = sample(list(range(8)))
    assert together == {**sample([0, 3, 4, 5]), **sample([7, 6, 2, 1])}


def test_a_run_pushes_the_adapter_only(engine: VLLMEngine, tied_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "close", lambda: None)
    engine.mark_stale()
    sent: list[int] = []
    push = engine.load_adapter

    def counted(tensors: Any, config: Any, **kwargs: Any) -> None:
        pairs = [(name, tensor.clone()) for name, tensor in tensors]
        sent.append(sum(tensor.numel() for _, tensor in pairs))
        push(pairs, config, **kwargs)

    monkeypatch.setattr(engine, "load_adapter", counted)
    module = GRPOLightningModule(
        ModelSpec(str(tied_folder), lora=SPEC), optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2)
    )
    monkeypatch.setattr(module, "named_policy_weights", lambda: pytest.fail("merged weights were pushed"))
    sync = WeightSync()
    quiet_trainer(callbacks=[sync]).fit(module, sums_data(engine=engine, rollouts_per_epoch=3))
    trained = sum(p.numel() for p in module.actor.parameters() if p.requires_grad)
    assert sent == [trained] * 3
    assert sync.last_gap is not None and sync.last_gap <= 5e-5
    moved = [p for name, p in module.actor.named_parameters() if "lora_B" in name]
    assert all(p.abs().max() > 0 for p in moved)


def test_merged_where_asked_and_refusals(tied_folder: Path) -> None:
    context = EngineContext(str(tied_folder), lora_rank=SPEC.r)
    arguments = conversion.arguments(VLLMEngine(), context, cuda=False)
    assert (arguments["enable_lora"], arguments["max_lora_rank"]) == (True, 8)
    assert "enable_lora" not in conversion.arguments(VLLMEngine(lora_sync="merged"), context, cuda=False)
    assert "enable_lora" not in conversion.arguments(VLLMEngine(), EngineContext(str(tied_folder)), cuda=False)
    with pytest.raises(ValueError, match=r'sleep_level=2 with lora_sync="adapter"'):
        conversion.arguments(VLLMEngine(sleep_level=2), context, cuda=False)


def test_requests_join_and_leave_while_others_run(engine: VLLMEngine) -> None:
    """A short request that comes after a long one is done before it; a cancelled one leaves nothing behind."""
    short = SamplingParams(max_new_tokens=3, ignore_eos=True)
    long, late, dropped = (PROMPTS.request(i, s, 7 + i, 2) for i, s in enumerate((LONG, short, LONG)))
    alone = {r: [c.token_ids for c in g.completions] for r in (long, late) for g in engine.generate_all([r])}

    finished: list[GenerationRequest] = []

    async def scenario() -> list[CompletionGroup]:
        first, second = (asyncio.ensure_future(engine.generate(request)) for request in (long, dropped))
        first.add_done_callback(lambda _: finished.append(long))
        while not engine._groups:
            await asyncio.sleep(0.001)
        second.cancel()
        group = await engine.generate(late)
        finished.append(late)
        return [group, await first]

    for group in asyncio.run(scenario()):
        assert [c.token_ids for c in group.completions] == alone[group.request]
    assert finished == [late, long]
    assert until(lambda: not engine._adapter.busy) and not engine._finished and not engine._places


@pytest.mark.parametrize(
    "wait", ["generate", *(pytest.param(x, marks=pytest.mark.long) for x in ("load_adapter", "logprobs", "close"))]
)
def test_a_stopped_core_is_told_and_ended(engine: VLLMEngine, tied_folder: Path, wait: str) -> None:
    """Everything that waits for completions gets the error. This test is last because it ends the engine."""
    engine.start(EngineContext(str(tied_folder), max_prompt_tokens=24, max_new_tokens=40, lora_rank=SPEC.r))
    policy = adapted(tied_folder, 1)
    engine.load_adapter(named_adapter_weights(policy), adapter_config(policy, SPEC), policy_version=1)
    (core,) = engine.process_ids
    engine._adapter.progress_timeout = BOUND
    requests = [PROMPTS.request(i, LONG, i, 20) for i in range(8)]
    os.kill(core, signal.SIGSTOP)
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(engine.generate_all, requests)
        assert until(lambda: bool(engine._groups) or stream.done())
        if wait == "close":  # which does not wait for the core
            engine.close()
            with pytest.raises(RuntimeError):
                stream.result(SOON)
        else:
            with pytest.raises(EngineDiedError, match="VLLMEngine.progress_timeout"):
                if wait == "load_adapter":
                    weights = named_adapter_weights(policy)
                    engine.load_adapter(weights, adapter_config(policy, SPEC), policy_version=2)
                elif wait == "logprobs":
                    engine.logprobs([[2, 5, 6]])
                stream.result()
            with pytest.raises(EngineDiedError):
                stream.result()
            assert time.monotonic() - began >= BOUND
    assert time.monotonic() - began < BOUND + SOON
    assert not engine.started and engine.policy_version == -1 and not psutil.pid_exists(core)
