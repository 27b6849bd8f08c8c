"""A small server with exactly the SGLang routes that `ServerEngine` uses, on a real model.

Its answers follow SGLang 0.5.23; `test_server_sglang_real.py` compares them with a running one.
Weights really come from the folder, log-probs from the model, random numbers from each request's `sampling_seed`.
`faults` makes it misbehave.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def serve(app: FastAPI) -> tuple[str, Callable[[], None]]:
    """Runs `app` in a thread; its address, and what ends it."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)

    def stop() -> None:
        server.should_exit = server.force_exit = True
        thread.join(30)

    return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", stop


class SGLangServer:
    def __init__(self, folder: Path | str, max_model_len: int = 64) -> None:
        self.folder = str(folder)
        self.max_model_len = max_model_len
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.version, self.paused, self.calls = "default", False, Counter[str]()
        self.faults: list[int] = []  # statuses that the next /generate calls answer
        self.gate = threading.Event()  # nothing is answered by /generate while it is not set
        self.gate.set()
        self.delay = 0.0
        self.requests: list[dict[str, Any]] = []
        self.hung = False  # takes connections and answers nothing
        self.crashed = False  # as SGLang after weights of another size
        self.key: str | None = None
        app = FastAPI()
        app.middleware("http")(self.count)
        for path in ("/health", "/model_info", "/v1/models"):
            app.get(path)(getattr(self, path.strip("/").replace("/", "_")))
        for path in ("/generate", "/update_weights_from_disk", "/flush_cache"):
            app.post(path)(getattr(self, path.strip("/")))
        for path in ("/pause_generation", "/continue_generation"):
            app.post(path)(getattr(self, path.strip("/")))
        self.app = app

    def start(self) -> str:
        url, self.stop = serve(self.app)
        return url

    async def count(self, request: Request, call_next: Any) -> Any:
        self.calls[request.url.path] += 1
        while self.hung:
            await asyncio.sleep(0.05)
        if self.crashed:
            return Response("gone", 503)
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return Response("no key", 200 if request.url.path == "/health" else 401)
        return await call_next(request)

    def health(self) -> Response:
        """SGLang samples a token for it, which waits while paused; it gives up after 20 s."""
        return Response(status_code=503 if self.paused else 200)

    def model_info(self) -> dict[str, Any]:
        return {"model_path": self.folder, "is_generation": True, "weight_version": self.version}

    def v1_models(self) -> dict[str, Any]:
        return {"data": [{"id": self.folder, "max_model_len": self.max_model_len}]}

    def pause_generation(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["mode"] == "abort"
        self.paused = True
        return {"message": "Generation paused successfully.", "status": "ok"}

    def continue_generation(self, body: dict[str, Any]) -> dict[str, Any]:
        self.paused = False
        return {"message": "Generation continued successfully.", "status": "ok"}

    def flush_cache(self) -> Response:
        assert self.paused
        return Response("Cache flushed.\n")

    def update_weights_from_disk(self, body: dict[str, Any]) -> dict[str, Any]:
        assert self.paused
        if not (files := list(Path(body["model_path"]).glob("*.safetensors"))):
            raise HTTPException(400, "Failed to get weights iterator")
        weights: dict[str, torch.Tensor] = {}
        for file in files:
            weights |= load_file(file)
        try:  # missing and unknown names are no errors
            self.model.load_state_dict(weights, strict=False)
        except RuntimeError as error:
            self.crashed = True
            raise HTTPException(503, "gone") from error
        self.folder, self.version = body["model_path"], body["weight_version"]
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def generate(self, body: dict[str, Any]) -> Any:
        if self.faults:
            raise HTTPException(self.faults.pop(0), "as told")
        self.gate.wait(60)
        time.sleep(self.delay)
        self.requests.append(body)
        if isinstance(body["input_ids"][0], int):
            return self.one(body["input_ids"], body["sampling_params"], body)
        return [self.one(ids, p, {}) for ids, p in zip(body["input_ids"], body["sampling_params"], strict=True)]

    @torch.no_grad()
    def one(self, ids: list[int], params: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(params.get("sampling_seed", 0))
        tokens, logprobs = list(ids), list[float]()
        reason: dict[str, Any] = {"type": "length", "length": params["max_new_tokens"]}
        for _ in range(params["max_new_tokens"]):
            logits = self.model(torch.tensor([tokens])).logits[0, -1]
            scores = (logits / (params["temperature"] or 1.0)).log_softmax(-1)
            greedy = not params["temperature"]
            token = int(scores.argmax() if greedy else torch.multinomial(scores.exp(), 1, generator=generator))
            tokens.append(token)
            logprobs.append(float(scores[token]))
            if token == self.tokenizer.eos_token_id and not params.get("ignore_eos"):
                reason = {"type": "stop", "matched": token}
                break
        new = tokens[len(ids) :]
        meta: dict[str, Any] = {
            "finish_reason": reason,
            "weight_version": self.version,
            "prompt_tokens": len(ids),
            "completion_tokens": len(new),
            "output_token_logprobs": [[lp, t, None] for lp, t in zip(logprobs, new, strict=True)],
        }
        if "logprob_start_len" in body:
            all_scores = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
            known = [float(all_scores[i, ids[i + 1]]) for i in range(len(ids) - 1)]
            meta["input_token_logprobs"] = [[lp, t, None] for lp, t in zip([None, *known], ids, strict=True)]
            if body.get("top_logprobs_num"):
                words = [row.topk(body["top_logprobs_num"]) for row in all_scores[:-1]]
                pairs = [zip(row.values.tolist(), row.indices.tolist(), strict=True) for row in words]
                meta["input_top_logprobs"] = [None, *([[lp, t, None] for lp, t in row] for row in pairs)]
        return {"text": self.tokenizer.decode(new, skip_special_tokens=True), "output_ids": new, "meta_info": meta}
