"""`ServerEngine` on a real SGLang server, and the test server's answers against SGLang's.

Set `LIGHTRL_SGLANG_PYTHON` to an interpreter that has SGLang 0.5, and `LIGHTRL_SGLANG_ARGUMENTS` to its server's
arguments. On a CPU without SGLang's CPU kernels, SGLang 0.5.23 needs a change; see docs/generation.md.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from lightning.fabric.plugins.environments.lightning import find_free_network_port

pytest.importorskip("uvicorn")

import torch

from lightrl.algorithms import GRPOLightningModule
from lightrl.callbacks import WeightSync
from lightrl.engines import EngineContext, EngineDiedError, ServerEngine
from lightrl.records import Prompts, SamplingParams
from tests.engines.conftest import ask, build_model, change, load, reference_logprobs
from tests.engines.sglang_server import SGLangServer
from tests.toys import quickstart_model, quiet_trainer, sums_data

PYTHON = os.environ.get("LIGHTRL_SGLANG_PYTHON")
ARGUMENTS = os.environ.get(
    "LIGHTRL_SGLANG_ARGUMENTS",
    "--device cpu --attention-backend torch_native --disable-overlap-schedule --mem-fraction-static 0.4",
)
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="LIGHTRL_SGLANG_PYTHON names no interpreter"),
    pytest.mark.long,
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(quickstart_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = find_free_network_port()
    place = ["--host", "127.0.0.1", "--port", str(port), "--model-path", str(model), "--dtype", "float32"]
    limits = ["--max-total-tokens", "4096"]
    log = tmp_path_factory.mktemp("log") / "server.log"
    with log.open("w") as file:
        command = [str(PYTHON), "-m", "sglang.launch_server", *place, *limits, *ARGUMENTS.split()]
        environment = {**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + 400
    try:
        while True:
            try:
                if httpx.get(f"{url}/health", timeout=30).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(1)
        yield url
    finally:
        sys.stdout.write(log.read_text()[-3000:])
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def shape(answer: Any) -> Any:
    """Keys and types of an answer, with numbers alike and lists by their first element that is not None."""
    if isinstance(answer, dict):
        return {key: shape(value) for key, value in answer.items()}
    if isinstance(answer, list):
        return [shape(next((item for item in answer if item is not None), None))]
    return "number" if isinstance(answer, int | float) and not isinstance(answer, bool) else type(answer).__name__


def contains(real: Any, small: Any) -> bool:
    if isinstance(small, dict):
        return isinstance(real, dict) and all(key in real and contains(real[key], small[key]) for key in small)
    if isinstance(small, list):
        return isinstance(real, list) and contains(real[0], small[0])
    return bool(real == small)


def test_the_test_server_answers_as_sglang_does(server: str, model: Path, tmp_path: Path) -> None:
    prompts, params = [[3, 4, 5]] * 2, {"max_new_tokens": 3, "temperature": 0.7, "top_p": 1.0, "top_k": -1}
    greedy = {"input_ids": [3, 4, 5], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    scored = greedy | {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    group = {"input_ids": prompts, "sampling_params": [params, params], "return_logprob": True}
    pushed = {"model_path": str(model), "weight_version": "one"}
    absent = {"model_path": str(tmp_path / "absent"), "weight_version": "two"}
    calls: list[tuple[str, str, Any]] = [
        ("GET", "/health", None),
        ("GET", "/model_info", None),
        ("GET", "/v1/models", None),
        ("POST", "/generate", group),
        ("POST", "/generate", scored),
        ("POST", "/pause_generation", {"mode": "abort"}),
        ("POST", "/update_weights_from_disk", pushed),
        ("POST", "/update_weights_from_disk", absent),
        ("POST", "/flush_cache", None),
        ("POST", "/continue_generation", {}),
        ("GET", "/model_info", None),
    ]
    small = SGLangServer(model)
    url = small.start()
    try:
        for method, path, body in calls:
            real, ours = (httpx.request(method, base + path, json=body, timeout=60) for base in (server, url))
            kinds = [answer.headers.get("content-type") for answer in (real, ours)]
            assert (real.status_code, kinds[0]) == (ours.status_code, kinds[1]), path
            if ours.status_code == 200 and ours.content and kinds[1] is not None:
                assert contains(shape(real.json()), shape(ours.json())), (path, real.text, ours.text)
    finally:
        small.stop()


SAMPLING = SamplingParams(max_new_tokens=6, temperature=0.7)


def test_two_rollouts_are_trained(server: str, model: Path, tmp_path: Path) -> None:
    """Log-probs after each push are the trainer's, and those of the samples, too."""
    options: dict[str, Any] = {"kind": "sglang", "shared_folder": str(tmp_path / "weights"), "timeout": 60.0}
    engine, canary = ServerEngine([server], **options), WeightSync()
    module = GRPOLightningModule(str(model), optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2))
    quiet_trainer(callbacks=[canary]).fit(module, sums_data(engine=engine, rollouts_per_epoch=2, group_size=2))
    assert module.policy_version == 2 and canary.last_gap is not None and canary.last_gap < 5e-5
    assert list((tmp_path / "weights").iterdir()) == []
    engine = ServerEngine([server], **options)
    engine.start(EngineContext(str(model), max_prompt_tokens=8, max_new_tokens=6))
    changed = change(load(model), 1)
    engine.load_weights(changed.named_parameters(), policy_version=7)
    prompts = Prompts(token_ids=[[3, 4, 5], [6, 7]], texts=["", ""])
    for i, result in ask(engine, prompts, SAMPLING, num_completions=3, seeds=[1, 2]):
        assert result.policy_version == 7 and len(result.completions) == 3
        for completion in result.completions:
            ids = prompts.token_ids[i]
            expected = reference_logprobs(changed, ids + completion.token_ids, 0.7)[len(ids) - 1 :]
            assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=5e-5)
    engine.close()


def test_weights_of_another_size_end_the_server(server: str, model: Path, tmp_path: Path) -> None:
    """Comes last: SGLang exits."""
    engine = ServerEngine([server], kind="sglang", shared_folder=str(tmp_path / "weights"), timeout=60.0)
    engine.start(EngineContext(str(model), max_prompt_tokens=8, max_new_tokens=6))
    wide = build_model(tmp_path / "wide", tied=True, vocab_size=60)
    with pytest.raises(EngineDiedError, match="All servers are down"):
        engine.load_weights(wide.named_parameters(), policy_version=0)
    engine.close()
