"""`ServerEngine` on SGLang's routes, and how it deals with servers that fail, change their weights, or go away.

The servers are small ones that speak SGLang's routes (`sglang_server.py`). `test_server_sglang_real.py` runs SGLang.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

pytest.importorskip("uvicorn")

from fastapi import FastAPI

from lightrl.algorithms import DistillLightningModule, GRPOLightningModule
from lightrl.callbacks import WeightSync
from lightrl.engines import EngineContext, EngineDiedError, ServerEngine, ServerTeacher, StaleWeightsError
from lightrl.objectives import Divergence, ForwardKL
from lightrl.records import Prompts, SamplingParams
from lightrl.rollout import Ahead, OnPolicy, Schedule
from tests.algorithms.test_distill import Keep
from tests.engines.conftest import ask, build_model, change, load, reference_logprobs
from tests.engines.sglang_server import SGLangServer, serve
from tests.toys import quickstart_model, quiet_trainer, sums_data
from tests.waiting import until

PROMPTS = Prompts(token_ids=[[3, 4, 5], [6, 7], [8, 9, 10, 11], [12, 13, 14]], texts=["", "", "", ""])
SAMPLING = SamplingParams(max_new_tokens=6, temperature=0.7)
Start = Callable[..., tuple[ServerEngine, list[SGLangServer]]]


@pytest.fixture()
def start(tied_folder: Path, tmp_path: Path) -> Iterator[Start]:
    servers: list[SGLangServer] = []
    engines: list[ServerEngine] = []

    def make(count: int = 2, **arguments: Any) -> tuple[ServerEngine, list[SGLangServer]]:
        servers.extend(SGLangServer(tied_folder) for _ in range(count))
        urls = [server.start() for server in servers]
        options: dict[str, Any] = {"kind": "sglang", "shared_folder": str(tmp_path / "weights"), "timeout": 60.0}
        engines.append(ServerEngine(urls, **{**options, **arguments}))
        engines[-1].start(EngineContext(str(tied_folder), max_prompt_tokens=8, max_new_tokens=6))
        return engines[-1], servers

    yield make
    for engine in engines:
        engine.close()
    for server in servers:
        server.stop()


def push(engine: ServerEngine, folder: Path, version: int = 0, seed: int = 1) -> torch.nn.Module:
    model = change(load(folder), seed)
    engine.load_weights(model.named_parameters(), policy_version=version)
    return model


def sample(engine: ServerEngine, seeds: tuple[int, ...] = (1, 2, 3, 4)) -> dict[int, list[list[int]]]:
    groups = list(ask(engine, PROMPTS, SAMPLING, num_completions=3, seeds=seeds))
    assert sorted(i for i, _ in groups) == [0, 1, 2, 3]
    assert {group.policy_version for _, group in groups} == {engine.policy_version}
    return tokens(groups)


def tokens(groups: Any) -> dict[int, list[list[int]]]:
    return {i: [c.token_ids for c in group.completions] for i, group in groups}


def test_weights_arrive_and_logprobs_are_the_trainers(start: Start, tied_folder: Path, tmp_path: Path) -> None:
    engine, servers = start()
    model = push(engine, tied_folder, version=3)
    for server in servers:
        assert server.calls["/pause_generation"] == server.calls["/flush_cache"] == 1 and not server.paused
    sequence = [3, 9, 14, 20, 33, 8]
    assert torch.allclose(torch.tensor(engine.logprobs([sequence])[0]), reference_logprobs(model, sequence), atol=5e-5)
    for i, group in ask(engine, PROMPTS, SAMPLING, num_completions=3, seeds=[1, 2, 3, 4]):
        assert group.policy_version == 3 and len(group.completions) == 3
        for completion in group.completions:
            ids = PROMPTS.token_ids[i]
            expected = reference_logprobs(model, ids + completion.token_ids, 0.7)[len(ids) - 1 :]
            assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=5e-5)
            assert completion.finish_reason == ("stop" if completion.token_ids[-1] == 1 else "length")
    push(engine, tied_folder, version=4, seed=2)
    assert len(list((tmp_path / "weights").iterdir())) == 1  # the old copy is gone
    engine.close()
    assert list((tmp_path / "weights").iterdir()) == []


def test_a_completion_depends_on_its_prompts_seed_alone(start: Start, tied_folder: Path) -> None:
    engine, servers = start()
    push(engine, tied_folder)
    first = sample(engine)
    assert sample(engine) == first
    order = [2, 0, 3, 1]
    shuffled = ask(engine, PROMPTS[order], SAMPLING, num_completions=3, seeds=[(1, 2, 3, 4)[i] for i in order])
    assert {order[i]: ids for i, ids in tokens(shuffled).items()} == first
    assert sample(engine, (5, 2, 3, 4))[0] != first[0]
    assert len({tuple(tokens) for tokens in first[2]}) > 1  # members of a group differ
    assert all(len(server.requests) > 2 for server in servers)  # both had work


def test_sampling_settings_reach_the_server(start: Start, tied_folder: Path) -> None:
    engine, servers = start(1)
    push(engine, tied_folder)
    plain = servers[0]
    settings: dict[str, Any] = {"top_p": 0.5, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5, "min_new_tokens": 1}
    settings |= {"stop": ["a"], "stop_token_ids": [7], "ignore_eos": True, "regex": "[0-9]+"}
    extra = SamplingParams(max_new_tokens=2, **settings, extra={"frequency_penalty": 0.25})
    list(ask(engine, PROMPTS[[0]], extra, num_completions=2, seeds=[0]))
    sent = plain.requests[-1]["sampling_params"]
    assert {key: sent[0][key] for key in settings} == settings and sent[0]["frequency_penalty"] == 0.25
    assert sent[0]["sampling_seed"] != sent[1]["sampling_seed"] and sent[0]["no_stop_trim"]
    list(ask(engine, PROMPTS[[0]], SamplingParams(max_new_tokens=2), num_completions=1, seeds=[0]))
    assert plain.requests[-1]["sampling_params"][0]["top_k"] == -1


def test_a_dead_server_is_left_out_and_all_dead_end_the_run(start: Start, tied_folder: Path) -> None:
    engine, servers = start()
    push(engine, tied_folder)
    first = sample(engine)
    servers[0].delay = 0.3
    killer = threading.Timer(0.1, servers[0].stop)
    killer.start()
    assert sample(engine) == first
    killer.join()
    asked = len(servers[1].requests)
    sample(engine)
    assert len(servers[1].requests) == asked + 4
    push(engine, tied_folder, version=1)  # goes to the one that is left
    servers[1].stop()
    with pytest.raises(EngineDiedError, match=r"All servers are down.*Restart them"):
        sample(engine)
    with pytest.raises(EngineDiedError, match="All servers are down"):
        push(engine, tied_folder, version=2)
    assert engine.policy_version == -1


def test_a_server_that_hangs_is_left_out(start: Start, tied_folder: Path) -> None:
    engine, servers = start(timeout=4.0)  # within which the other one answers on a busy machine, too
    push(engine, tied_folder)
    first = sample(engine)
    asked = servers[0].calls["/generate"]
    servers[0].hung = True
    assert sample(engine) == first
    hanging = servers[0].calls["/generate"]
    assert hanging > asked
    assert sample(engine) == first and servers[0].calls["/generate"] == hanging
    servers[0].hung = False
    push(engine, tied_folder)  # it is back
    asked = len(servers[0].requests)
    assert sample(engine) == first and len(servers[0].requests) > asked


def test_a_network_that_is_down_is_waited_for(start: Start, tied_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = start(1)
    push(engine, tied_folder)
    first, up = sample(engine), time.monotonic() + 0.4
    send = httpx.AsyncHTTPTransport.handle_async_request

    async def down(*args: Any) -> Any:
        if time.monotonic() < up:
            raise httpx.ConnectError("no route") from OSError(errno.ENETUNREACH, "Network is unreachable")
        return await send(*args)

    monkeypatch.setattr(httpx.AsyncHTTPTransport, "handle_async_request", down)
    assert sample(engine) == first


def test_a_key_is_sent(start: Start, tied_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, servers = start(1)
    servers[0].key = "secret"
    engine.close()
    here = EngineContext(str(tied_folder), max_new_tokens=6)
    with pytest.raises(ValueError, match=r"http://.*returned 401: no key. Set LIGHTRL_SERVER_API_KEY"):
        engine.start(here)
    monkeypatch.setenv("LIGHTRL_SERVER_API_KEY", "secret")
    engine.start(here)
    engine.close()
    monkeypatch.delenv("LIGHTRL_SERVER_API_KEY")
    given = ServerEngine(engine._pool.urls, kind="sglang", shared_folder=str(tmp_path), api_key="secret")
    given.check(here)
    given.close()


def test_a_vllm_server_with_other_log_probs_is_rejected(tied_folder: Path, tmp_path: Path) -> None:
    app = FastAPI()
    app.get("/health")(lambda: None)
    app.get("/v1/models")(lambda: {"data": [{"id": "m", "max_model_len": 64}]})
    config = {"model_config": {"logprobs_mode": "raw_logprobs", "dtype": "torch.float32"}}
    app.get("/server_info")(lambda: {"vllm_config": config})
    url, stop = serve(app)
    try:
        with pytest.raises(ValueError, match=f"{url}.*--logprobs-mode processed_logprobs"):
            ServerEngine([url], shared_folder=str(tmp_path)).check(EngineContext(str(tied_folder)))
    finally:
        stop()


def test_an_error_is_tried_again_and_a_refusal_is_the_users(start: Start, tied_folder: Path) -> None:
    engine, servers = start()
    push(engine, tied_folder)
    first = sample(engine)
    servers[0].faults = [500, 503]
    assert sample(engine) == first
    servers[0].faults = servers[1].faults = [500] * 99
    with pytest.raises(RuntimeError, match=r"/generate returned 500: .*as told"):
        sample(engine)
    servers[0].faults, servers[1].faults = [400] * 9, [400] * 9
    with pytest.raises(ValueError, match=r"returned 400.*rejects prompt \d or its settings"):
        sample(engine)


def test_weights_that_somebody_else_changed_are_not_used(
    start: Start, tied_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, servers = start()
    push(engine, tied_folder)
    first = sample(engine)
    servers[0].version = "another run"
    asked = len(servers[1].requests)
    assert sample(engine) == first
    assert len(servers[1].requests) == asked + 4  # all groups, also those that the first had sampled
    assert "holds weights 'another run'" in caplog.text and "Skipping it until the next push" in caplog.text
    servers[1].version = "another run"
    with pytest.raises(StaleWeightsError, match="No live server has the policy's weights"):
        sample(engine)
    push(engine, tied_folder, version=1)
    sample(engine)


def test_a_push_while_groups_are_out_samples_them_anew(start: Start, tied_folder: Path) -> None:
    engine, servers = start()
    push(engine, tied_folder)
    asked = [server.calls["/generate"] for server in servers]
    for server in servers:
        server.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(ask, engine, PROMPTS, SAMPLING, num_completions=3, seeds=[1, 2, 3, 4])
        assert until(lambda: all(s.calls["/generate"] > a for s, a in zip(servers, asked, strict=True)))
        push(engine, tied_folder, version=1, seed=2)
        for server in servers:
            server.gate.set()
        groups = reader.result(60)
    assert len(groups) == 4 and {group.policy_version for _, group in groups} == {1}
    assert tokens(groups) == sample(engine)


def test_servers_that_disagree_are_named(start: Start, tied_folder: Path) -> None:
    engine, servers = start()
    push(engine, tied_folder)
    change(servers[1].model, seed=5)
    with pytest.raises(StaleWeightsError, match=r"http://.* and http://.* received the same weights, but .* differ by"):
        engine.logprobs([[3, 9, 14, 20]])
    assert engine.policy_version == -1


def test_weights_that_do_not_fit_end_the_run(start: Start, tied_folder: Path, tmp_path: Path) -> None:
    """SGLang exits if a size differs."""
    engine, _ = start()
    wide = build_model(tmp_path / "wide", tied=True, vocab_size=60)
    with pytest.raises(EngineDiedError, match="All servers are down"):
        engine.load_weights(wide.named_parameters(), policy_version=0)
    assert engine.policy_version == -1
    with pytest.raises(EngineDiedError):
        sample(engine)


def test_weights_that_a_server_cannot_read_are_refused(
    start: Start, tied_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = start()
    monkeypatch.setattr("safetensors.torch.save_file", lambda *args, **options: None)
    with pytest.raises(ValueError, match=r"http://.* could not load the weights .*Failed to get weights iterator"):
        push(engine, tied_folder)
    assert engine.policy_version == -1 and list((tmp_path / "weights").iterdir()) == []
    with pytest.raises(StaleWeightsError):
        sample(engine)


def test_a_paused_server_is_alive(start: Start, tied_folder: Path) -> None:
    """While weights load, and after a run that died then. SGLang's /health fails on a paused server."""
    engine, servers = start(1, timeout=3.0)
    push(engine, tied_folder)
    servers[0].paused = True
    assert httpx.get(f"{engine._pool.urls[0]}/health").status_code == 503
    time.sleep(1.0)  # a health check, at least
    assert engine._pool.servers[0].lost is None
    engine.close()
    engine.start(EngineContext(str(tied_folder), max_prompt_tokens=8, max_new_tokens=6))
    push(engine, tied_folder)
    assert not servers[0].paused
    sample(engine)


@pytest.mark.parametrize("schedule", [OnPolicy(), Ahead()], ids=lambda schedule: type(schedule).__name__)
def test_a_run_learns_from_servers(schedule: Schedule, start: Start, tied_folder: Path, tmp_path: Path) -> None:
    """Strictly on-policy, one rollout ahead, and while groups come in."""
    engine, servers = start()
    engine.close()  # a run starts it itself
    canary = WeightSync()
    module = GRPOLightningModule(str(tied_folder), optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))
    quiet_trainer(callbacks=[canary]).fit(module, sums_data(engine=engine, schedule=schedule))
    assert module.policy_version == 4 and not engine.started
    assert canary.last_gap is not None and canary.last_gap < 5e-5
    for server in servers:  # the second rollout ahead is of the first policy
        assert server.calls["/update_weights_from_disk"] == 4 - schedule.max_staleness
    groups = [r for server in servers for r in server.requests if isinstance(r["input_ids"][0], list)]
    assert len(groups) == 4 * 8 and list((tmp_path / "weights").iterdir()) == []


@pytest.mark.parametrize("divergence", [None, ForwardKL()], ids=["sampled", "top words"])
def test_a_served_teacher_teaches_what_its_model_would(divergence: Divergence | None, tmp_path: Path) -> None:
    """Two servers, of which one dies: advantages and gradient are those of the same model in this process."""
    student = quickstart_model(tmp_path / "student")
    path, results = quickstart_model(tmp_path / "teacher", seed=1), []
    servers = [SGLangServer(path) for _ in range(2)]
    remote = ServerTeacher([server.start() for server in servers], kind="sglang", timeout=20.0)
    remote.check(student)
    servers[0].stop()
    for teacher in (path, remote):
        module = Keep(student, {"one": teacher}, divergence=divergence, divergence_top_k=7 if divergence else None)
        quiet_trainer().fit(module, sums_data(rollouts_per_epoch=1, group_size=2))
        results.append((module.kept.advantages, module.gradient))
    servers[1].stop()
    (advantages, gradient), (served, of_served) = results
    torch.testing.assert_close(served, advantages, atol=1e-4, rtol=1e-4)
    assert bool(advantages.any()) is (divergence is None)
    for a, b in zip(of_served, gradient, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-3)
    assert any(bool(g.any()) for g in gradient)


def test_a_served_teacher_at_another_temperature_is_refused(tmp_path: Path) -> None:
    path = quickstart_model(tmp_path / "student")
    server = SGLangServer(path)
    data = sums_data(sampling=SamplingParams(max_new_tokens=4, temperature=0.5), rollouts_per_epoch=1, group_size=2)
    module = DistillLightningModule(path, {"one": ServerTeacher([server.start()], kind="sglang", timeout=20.0)})
    try:
        with pytest.raises(ValueError, match="at temperature 1"):
            quiet_trainer().fit(module, data)
    finally:
        server.stop()
