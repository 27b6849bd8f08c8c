"""Protocols of the server kinds that `ServerEngine` supports.

vLLM uses the OpenAI-compatible `/v1/completions` and development-mode routes. SGLang uses native routes.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightrl.engines.server.client import Server, ServerError
from lightrl.engines.vllm.conversion import completion_seed, plain_sampling
from lightrl.records import Completion, GenerationRequest, SamplingParams


@dataclass
class TokenScores:
    """A model's log-probs at temperature 1 of tokens 1..n-1 of a sequence of n tokens."""

    logprobs: list[float]  # n - 1 entries
    top: list[list[tuple[int, float]]]  # n - 1 lists of (ID, log-prob), most likely first; empty unless requested


class ServerProtocol(ABC):
    """Base class of server protocols. All methods raise `ServerError` and `ServerLostError`.

    Attributes:
        harmless_extra: See `Engine.harmless_extra`.
        alive_path: See `Server`.
    """

    harmless_extra: frozenset[str]
    alive_path = "/health"

    @abstractmethod
    async def look_at(self, server: Server, model: str | None, *, pushes: bool) -> None:
        """Sets the server's model, `max_model_len`, and dtype. With `pushes`, checks the requirements for pushes.

        Raises a ValueError that explains how to start the server if it is misconfigured.
        """

    async def tokenize(self, server: Server, text: str) -> list[int] | None:
        """Returns the server's token IDs of `text` without special tokens, or None if not supported."""
        return None

    @abstractmethod
    async def sample(self, server: Server, request: GenerationRequest) -> tuple[list[Completion], str]:
        """Returns the request's completions and the weight version afterwards.

        Aborted completions are omitted.
        """

    @abstractmethod
    async def scores(self, server: Server, ids: Sequence[int], top: int) -> TokenScores:
        """Returns the log-probs at temperature 1 of tokens 1..n-1 and the `top` most likely tokens at each."""

    @abstractmethod
    async def pause(self, server: Server, mark: str) -> None:
        """Aborts running requests, holds back new ones, and sets the weight version to `mark`."""

    @abstractmethod
    async def load_files(self, server: Server, folder: str, files: Sequence[str], token: str) -> None:
        """Replaces the weights with a directory's safetensors files. Raises a ValueError if the model differs."""

    @abstractmethod
    async def resume(self, server: Server, token: str) -> None:
        """Drops the caches, sets the weight version to `token`, and resumes serving."""


class VLLMProtocol(ServerProtocol):
    """Protocol of vLLM 0.32 servers in development mode."""

    harmless_extra = frozenset(
        (
            *("cache_salt", "include_stop_str_in_output", "priority", "request_id", "skip_special_tokens"),
            *("spaces_between_special_tokens", "user"),
        )
    )

    async def look_at(self, server: Server, model: str | None, *, pushes: bool) -> None:
        models = (await server.get("/v1/models"))["data"]
        served = {entry["id"]: entry for entry in models}
        name = model or next(iter(served))
        if name not in served:
            raise ValueError(
                f"model={model!r}: {server.url} serves {', '.join(served)}. Set one of these or None, or start the "
                "server with --served-model-name."
            )
        server.model, server.max_model_len = name, int(served[name]["max_model_len"])
        if not pushes:
            return
        info = await server.get("/server_info", params={"config_format": "json"})
        config = info["vllm_config"]["model_config"]
        if config["logprobs_mode"] != "processed_logprobs":
            raise ValueError(
                f"{server.url} reports log-probs before temperature and top-p "
                f"(logprobs_mode={config['logprobs_mode']}). Start it with --logprobs-mode processed_logprobs."
            )
        server.dtype = str(config["dtype"]).removeprefix("torch.")

    async def tokenize(self, server: Server, text: str) -> list[int] | None:
        body = {"model": server.model, "prompt": text, "add_special_tokens": False}
        return list((await server.post("/tokenize", body))["tokens"])

    async def sample(self, server: Server, request: GenerationRequest) -> tuple[list[Completion], str]:
        sampling, n = request.sampling, request.num_completions
        greedy = sampling.temperature == 0  # vLLM supports only n=1, since all would be equal
        # n=G uses seeds s, s + 1, ... A hashed s separates prompts with adjacent seeds.
        body = {
            "model": server.model,
            "prompt": list(request.token_ids),
            "n": 1 if greedy else n,
            "seed": completion_seed(request.seed, 0) >> 1,
            "logprobs": 0,
            "return_token_ids": True,
        }
        answer = await server.post("/v1/completions", body | _vllm_sampling(sampling))
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        completions = [
            Completion(c["token_ids"], c["logprobs"]["token_logprobs"], c["text"], c["finish_reason"])
            for c in choices
            if c["finish_reason"] in ("stop", "length")
        ]
        version = str((await server.get("/weight_info"))["weight_version"])
        return completions * n if greedy else completions, version

    async def scores(self, server: Server, ids: Sequence[int], top: int) -> TokenScores:
        body = {"model": server.model, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0}
        answer = await server.post("/v1/completions", body | {"prompt_logprobs": top})
        entries = answer["choices"][0]["prompt_logprobs"][1:]
        logprobs = [float(entry[str(token)]["logprob"]) for token, entry in zip(ids[1:], entries, strict=True)]
        likeliest = []
        for entry in entries:  # also contains the token itself
            ranked = sorted((said["rank"], int(word), float(said["logprob"])) for word, said in entry.items())
            likeliest.append([(word, logprob) for _, word, logprob in ranked[:top]])
        return TokenScores(logprobs, likeliest)

    async def pause(self, server: Server, mark: str) -> None:
        await server.post("/pause", params={"mode": "abort"})
        await server.post("/update_weight_version", {"new_version": mark})

    async def load_files(self, server: Server, folder: str, files: Sequence[str], token: str) -> None:
        call = {"method": "lightrl_load_files", "args": [[f"{folder}/{file}" for file in files], True]}
        answers = (await server.post("/collective_rpc", call))["results"]
        errors = [answer["error"] for answer in answers if answer["error"]]
        if errors:
            raise ValueError(f"{server.url} could not load the weights: {errors[0]}")
        missing = sorted({name for answer in answers for name in answer["missing"]})
        if missing:
            raise ValueError(
                f"Weight sync left {len(missing)} parameter(s) of {server.url} without new values (or with NaN): "
                f"{', '.join(missing[:8])}{' ...' if len(missing) > 8 else ''}. Start it with the policy's model."
            )

    async def resume(self, server: Server, token: str) -> None:
        # This order keeps multimodal requests valid.
        await server.post("/reset_mm_cache")
        await server.post("/reset_encoder_cache")
        answer = await server.post("/reset_prefix_cache", params={"reset_running_requests": "true"})
        if not answer["success"]:
            raise RuntimeError(f"{server.url} failed to reset its prefix cache, which holds keys of the old weights.")
        await server.post("/update_weight_version", {"new_version": token})
        await server.post("/resume")


def _vllm_sampling(sampling: SamplingParams) -> dict[str, Any]:
    body = plain_sampling(sampling)
    if sampling.regex is not None:
        body["structured_outputs"] = {"regex": sampling.regex}
    elif sampling.json_schema is not None:
        body["structured_outputs"] = {"json": sampling.json_schema}
    return body | (sampling.extra or {})


_SGLANG_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "include_stop_str_in_output": "no_stop_trim",
}
"""vLLM's names mapped to SGLang's, if they differ."""


class SGLangProtocol(ServerProtocol):
    """Protocol of SGLang servers, run against SGLang 0.5.23 on a CPU only.

    Seeds have an effect only if the server runs with `--enable-deterministic-inference`. SGLang keeps the old values of
    parameters that are missing in a weight update, ignores unknown ones, and exits if a size differs. Source:
    https://docs.sglang.io/docs/basic_usage/native_api.md, https://docs.sglang.io/docs/advanced_features/sglang_for_rl.md
    """

    harmless_extra = frozenset({"skip_special_tokens", "spaces_between_special_tokens"})
    alive_path = "/v1/models"  # /health samples a token: on a paused server, it returns 503 after 20 s

    async def look_at(self, server: Server, model: str | None, *, pushes: bool) -> None:
        info = await server.get("/model_info")
        served = (await server.get("/v1/models"))["data"]
        server.model = model or str(info["model_path"])
        server.max_model_len = next((entry.get("max_model_len") for entry in served), None)

    async def sample(self, server: Server, request: GenerationRequest) -> tuple[list[Completion], str]:
        # A group is a batch of requests with one seed each. n=G would sample the same completion G times.
        shared, n = _sglang_sampling(request.sampling), request.num_completions
        body = {
            "input_ids": [list(request.token_ids)] * n,
            "sampling_params": [shared | {"sampling_seed": completion_seed(request.seed, g) % 2**31} for g in range(n)],
            "return_logprob": True,
        }
        answers = await server.post("/generate", body)
        completions, versions = [], {str(answer["meta_info"].get("weight_version")) for answer in answers}
        for answer in answers:
            pairs, reason = answer["meta_info"]["output_token_logprobs"], answer["meta_info"]["finish_reason"]["type"]
            if reason in ("stop", "length"):
                logprobs, tokens = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
                completions.append(Completion(tokens, logprobs, answer["text"], reason))
        return completions, versions.pop() if len(versions) == 1 else f"mixed: {sorted(versions)}"

    async def scores(self, server: Server, ids: Sequence[int], top: int) -> TokenScores:
        body = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": top,
        }
        meta = (await server.post("/generate", body))["meta_info"]
        logprobs = [float(entry[0]) for entry in meta["input_token_logprobs"][1:]]
        words = meta["input_top_logprobs"][1:] if top else [[] for _ in logprobs]
        return TokenScores(logprobs, [[(int(entry[1]), float(entry[0])) for entry in entries] for entries in words])

    async def pause(self, server: Server, mark: str) -> None:
        await server.post("/pause_generation", {"mode": "abort"})

    async def load_files(self, server: Server, folder: str, files: Sequence[str], token: str) -> None:
        try:
            answer = await server.post("/update_weights_from_disk", {"model_path": folder, "weight_version": token})
        except ServerError as error:
            raise ValueError(f"{server.url} could not load the weights in {folder}: {error.text[:500]}") from error
        if not answer["success"]:
            raise ValueError(f"{server.url} could not load the weights in {folder}: {answer['message']}")

    async def resume(self, server: Server, token: str) -> None:
        await server.post("/flush_cache")  # answers in text, with status 400 on failure
        await server.post("/continue_generation", {})


def _sglang_sampling(sampling: SamplingParams) -> dict[str, Any]:
    params = {_SGLANG_NAMES.get(name, name): value for name, value in plain_sampling(sampling).items()}
    params["top_k"] = sampling.top_k or -1
    if sampling.regex is not None:
        params["regex"] = sampling.regex
    elif sampling.json_schema is not None:
        params["json_schema"] = json.dumps(sampling.json_schema)
    return params | (sampling.extra or {})


PROTOCOLS: dict[str, type[ServerProtocol]] = {"vllm": VLLMProtocol, "sglang": SGLangProtocol}
