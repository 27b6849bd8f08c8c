"""`ServerEngine` on two real vLLM servers, in processes of their own on loopback.

The order matters: the last test kills a server.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from lightning.pytorch import Callback, seed_everything

from lightrl.algorithms import PPOLightningModule
from lightrl.callbacks import WeightSync
from lightrl.engines import EngineContext, ServerEngine, ServerTeacher
from lightrl.records import Prompts, SamplingParams
from tests.engines.conftest import ask, build_model, change, load, reference_logprobs
from tests.ports import held_port
from tests.toys import quiet_trainer, sums_data
from tests.waiting import until

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS = Prompts([[3, 4, 5], [6, 7], [8, 9, 10, 11], [12, 13, 14]], [""] * 4)
SAMPLING = SamplingParams(max_new_tokens=8, temperature=0.7)
START_SECONDS = 300


class Servers:
    """Two servers; what they print goes to files in `place`."""

    def __init__(self, folder: Path, place: Path, root: Path) -> None:
        self.folder, self.place, self.root = folder, place, root
        self.holders = [held_port(), held_port()]
        self.ports = [holder.getsockname()[1] for holder in self.holders]
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        self.processes = [self.start(i) for i in range(2)]

    def start(self, index: int) -> subprocess.Popen[bytes]:
        """By the script that the documentation names; the extension adds a CPU's transfer backend to LightRL's."""
        command = ["bash", "examples/cluster/servers.sh", str(self.folder), "--max-model-len", "256"]
        command += ["--enforce-eager", "--dtype", "float32", "--disable-uvicorn-access-log"]
        command += ["--worker-extension-cls", "tests.engines.transfer_worker.ServerWorker"]
        command += ["--weight-transfer-config", '{"backend": "store"}']
        settings = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
        settings |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONPATH": str(self.root)}
        settings |= {"PYTHON": sys.executable, "HOST": "127.0.0.1", "PORT": str(self.ports[index]), "GPUS": "1"}
        settings |= {"LIGHTRL_TRAINER_PID": str(os.getpid())}
        with open(self.place / f"server-{index}.log", "wb") as log:
            return subprocess.Popen(
                command, env=os.environ | settings, stdout=log, stderr=log, start_new_session=True, cwd=self.root
            )

    def wait(self, index: int) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.processes[index].poll() is None:
            try:
                if httpx.get(f"{self.urls[index]}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.5)
        raise RuntimeError((self.place / f"server-{index}.log").read_text()[-3000:])

    def kill(self, index: int) -> None:
        """SIGKILL for the server and everything that it started, whose shared memory nobody else would remove."""
        os.killpg(self.processes[index].pid, signal.SIGSTOP)  # at once: to read what it maps takes longer than a reply
        family = psutil.Process(self.processes[index].pid)
        mapped = {area.path for process in (family, *family.children(recursive=True)) for area in process.memory_maps()}
        os.killpg(self.processes[index].pid, signal.SIGKILL)
        self.processes[index].wait(60)
        for path in mapped:
            if path.startswith("/dev/shm/"):
                Path(path).unlink(missing_ok=True)

    def close(self) -> None:
        for index, process in enumerate(self.processes):
            if process.poll() is None:
                self.kill(index)
            self.holders[index].close()


@pytest.fixture(scope="module")
def servers(tied_folder: Path, tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[Servers]:
    started = Servers(tied_folder, tmp_path_factory.mktemp("servers"), root)
    try:
        for index in range(2):
            started.wait(index)
        yield started
    finally:
        started.close()


@pytest.fixture()
def engine(servers: Servers, tied_folder: Path, tmp_path: Path) -> Iterator[ServerEngine]:
    engine = ServerEngine(servers.urls, shared_folder=str(tmp_path / "weights"), timeout=60)
    engine.start(EngineContext(str(tied_folder), max_prompt_tokens=8, max_new_tokens=8))
    yield engine
    engine.close()


def sample(engine: ServerEngine, sampling: SamplingParams = SAMPLING) -> dict[int, list[list[int]]]:
    groups = list(ask(engine, PROMPTS, sampling, num_completions=3, seeds=[1, 2, 3, 4]))
    assert sorted(i for i, _ in groups) == [0, 1, 2, 3]
    return {i: [c.token_ids for c in group.completions] for i, group in groups}


def agrees_everywhere(engine: ServerEngine, model: torch.nn.Module) -> None:
    """Each server's log-probs of a long sequence, and those of everything sampled, are the model's."""
    sequence = [2 + (7 * i) % 40 for i in range(70)]
    for server in engine._pool.servers:
        ours = reference_logprobs(model, sequence)
        theirs = engine._pool.loop.run(engine._pool.protocol.scores(server, sequence, 0)).logprobs
        assert torch.allclose(torch.tensor(theirs), ours, atol=5e-5)
    for i, group in ask(engine, PROMPTS, SAMPLING, num_completions=3, seeds=[1, 2, 3, 4]):
        assert group.policy_version == engine.policy_version
        for completion in group.completions:
            ids = PROMPTS.token_ids[i]
            expected = reference_logprobs(model, ids + completion.token_ids, 0.7)[len(ids) - 1 :]
            assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=5e-5)


def test_both_servers_get_the_weights_by_files(engine: ServerEngine, tied_folder: Path) -> None:
    assert (engine.dtype, engine.max_model_len) == ("float32", 256)
    model = load(tied_folder)
    for version in range(2):  # the second push finds filled prefix caches
        change(model, seed=version + 1)
        engine.load_weights(model.named_parameters(), policy_version=version)
        agrees_everywhere(engine, model)
    torch.testing.assert_close(
        torch.tensor(engine.logprobs([[3, 9, 14, 20]])[0]), reference_logprobs(model, [3, 9, 14, 20]), atol=5e-5, rtol=0
    )


def test_both_servers_get_the_weights_by_transfer(servers: Servers, tied_folder: Path, monkeypatch: Any) -> None:
    from lightrl.engines.server import weights as server_weights
    from tests.engines.transfer_backend import store_group

    monkeypatch.setattr(server_weights, "transfer_group", store_group)
    monkeypatch.setattr(server_weights, "_BUCKET_BYTES", 100_000)  # several buckets
    engine = ServerEngine(servers.urls, weights="transfer", timeout=60)
    engine.start(EngineContext(str(tied_folder), max_new_tokens=8))
    try:
        model = load(tied_folder)
        for version in range(2):  # the second push keeps the communicators
            change(model, seed=version + 7)
            engine.load_weights(model.named_parameters(), policy_version=version)
            agrees_everywhere(engine, model)
    finally:
        engine.close()


def test_seeds_and_settings(engine: ServerEngine, tied_folder: Path) -> None:
    model = change(load(tied_folder), seed=3)
    engine.load_weights(model.named_parameters(), policy_version=0)
    first = sample(engine)
    assert sample(engine) == first and len({tuple(tokens) for tokens in first[0]}) > 1
    order = [2, 0, 3, 1]
    shuffled = ask(engine, PROMPTS[order], SAMPLING, num_completions=3, seeds=[order[i] + 1 for i in range(4)])
    assert {order[i]: [c.token_ids for c in group.completions] for i, group in shuffled} == first
    greedy = sample(engine, SamplingParams(max_new_tokens=4, temperature=0))
    assert all(tokens == group[0] for group in greedy.values() for tokens in group)
    digits = SamplingParams(max_new_tokens=4, regex="[0-9]{3}")
    for _, group in ask(engine, PROMPTS, digits, num_completions=2, seeds=[1, 2, 3, 4]):
        assert all(c.text[:3].isdigit() for c in group.completions)
    stopped = SamplingParams(max_new_tokens=30, stop=["a", "e", "1"], ignore_eos=True)
    for _, group in ask(engine, PROMPTS, stopped, num_completions=2, seeds=[1, 2, 3, 4]):
        assert all(c.text[-1] in "ae1" for c in group.completions if c.finish_reason == "stop")
    wrong = SamplingParams(max_new_tokens=4, extra={"presence_penalty": 9.0})
    with pytest.raises(ValueError, match=r"returned 400.*presence_penalty.*rejects prompt"):
        list(ask(engine, PROMPTS, wrong, num_completions=2, seeds=[0] * 4))


def test_as_teachers_they_name_the_likeliest_words(servers: Servers, engine: ServerEngine, tied_folder: Path) -> None:
    model = change(load(tied_folder), seed=4)
    engine.load_weights(model.named_parameters(), policy_version=0)  # the servers serve other tests' policies as well
    teacher = ServerTeacher(servers.urls, timeout=60)
    teacher.check(str(tied_folder))
    rows = [[2 + (7 * i + j) % 40 for i in range(9 + j)] for j in range(4)]
    for scores, ids in zip(teacher.scores(rows, 5), rows, strict=True):
        assert torch.allclose(torch.tensor(scores.logprobs), reference_logprobs(model, ids), atol=5e-5)
        likeliest = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1).topk(5)
        assert [[word for word, _ in top] for top in scores.top] == likeliest.indices.tolist()
        assert torch.allclose(torch.tensor([[p for _, p in top] for top in scores.top]), likeliest.values, atol=5e-5)
    with pytest.raises(ValueError, match=r"rejects a sequence of 9 tokens"):
        teacher.scores(rows[:1], 30)  # above --max-logprobs
    teacher.close()


def test_a_server_with_another_tokenizer_is_rejected_before_models_load(servers: Servers, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    build_model(tokens, tied=True)
    text = (tokens / "tokenizer.json").read_text().replace('"1": 4', '"1": 5').replace('"2": 5', '"2": 4')
    (tokens / "tokenizer.json").write_text(text)
    engine = ServerEngine(servers.urls[:1], shared_folder=str(tmp_path / "w"))
    with pytest.raises(ValueError, match=r"a different tokenizer than .*'12 \+ 34 = 46' is \[4, 5"):
        engine.check(EngineContext(str(tokens), max_new_tokens=8))


def test_a_run_learns_from_servers_and_survives_the_death_of_one(
    servers: Servers, tied_folder: Path, tmp_path: Path
) -> None:
    """PPO: both are canaried after every push; SIGKILL while groups are out; the dead one is used when it is back."""
    engine = ServerEngine(servers.urls, shared_folder=str(tmp_path / "weights"), timeout=60)
    data = sums_data(engine=engine, sampling=SamplingParams(max_new_tokens=100, ignore_eos=True), rollouts_per_epoch=4)
    seen = Seen(engine)
    inner = engine.generate

    def kill() -> None:
        until(lambda: engine._pool.servers[0].pending)
        servers.kill(0)

    killing: list[threading.Thread] = []

    async def generate(request: Any) -> Any:
        if len(seen.gaps) == 1 and not killing:  # in the middle of the second rollout: while the first group is out
            killing.append(threading.Thread(target=kill))
            killing[0].start()
        return await inner(request)

    engine.generate = generate  # type: ignore[method-assign]
    seed_everything(0, verbose=False)
    module = PPOLightningModule(str(tied_folder), optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3))
    quiet_trainer(callbacks=[WeightSync(), seen]).fit(module, data)
    assert seen.groups == [8] * 4 and module.policy_version == 8
    assert seen.alive == [2, 1, 1, 1]
    assert max(seen.gaps) <= 5e-5, seen.gaps


class Seen(Callback):
    def __init__(self, engine: ServerEngine) -> None:
        self.engine = engine
        self.gaps: list[float] = []
        self.groups: list[int] = []
        self.alive: list[int] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.gaps.append(outputs["kl/engine_gap_max"])
        self.groups.append(len(batch.group_ids.unique()))
        self.alive.append(sum(server.lost is None for server in self.engine._pool.servers))
