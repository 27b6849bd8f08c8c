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

from tests.engines.sglang_server import SGLangServer
from tests.toys import quickstart_model

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
    """Whether `real` has all that `small` has."""
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
