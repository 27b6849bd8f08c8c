"""The kinds of servers that `ServerEngine` can use, and their routes.

vLLM: its OpenAI-compatible `/v1/completions` and the routes of its development mode. SGLang: its native routes.
G completions per prompt.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightrl.engines.base import ExtraKeys
from lightrl.engines.server.client import Server, ServerError
from lightrl.engines.vllm.requests import (
    EVALUATION_EXTRA,
    OWN_EXTRA,
    completion_seed,
    plain_sampling,
)
from lightrl.records import Completion, GenerationRequest, SamplingParams

WORKER = "lightrl.engines.server.worker.ServerWorker"


@dataclass
class Facts:
    """What a server reports about itself.

    Attributes:
        model: name under which it serves the model.
        max_model_len: most tokens of prompt and completion; None where it does not say.
        dtype: of its weights; None where it does not say.
        transfer_backend: of its weight-transfer engine; None without one.
    """

    model: str
    max_model_len: int | None = None
    dtype: str | None = None
    transfer_backend: str | None = None


@dataclass
class TokenScores:
    """A model's log-probs of tokens 1..n-1 of a row of n, at temperature 1.

    Attributes:
        logprobs: n - 1 floats, of the tokens given those before.
        top: n - 1 lists of the likeliest words there, (id, log-prob), the likeliest first; empty lists where none were
            asked for.
    """

    logprobs: list[float]
    top: list[list[tuple[int, float]]]


class ServerProtocol(ABC):
    """A kind of server. Methods talk to one server and raise `ServerError` or `ServerLostError`.

    Attributes:
        extra: see `Engine.extra`.
    """

    extra: ExtraKeys

    @abstractmethod
    async def served(self, server: Server, model: str | None) -> Facts:
        """Asks what the server serves, without what only a server whose weights are changed must have."""

    @abstractmethod
    async def facts(self, server: Server, model: str | None) -> Facts:
        """Asks what the server serves, and how.

        Raises:
            ValueError: it lacks something that every use of it needs; the message says how to start it.
        """

    async def tokenize(self, server: Server, text: str) -> list[int] | None:
        """The server's tokens of `text`, without special ones; None where it cannot say."""
        return None

    @abstractmethod
    async def sample(self, server: Server, request: GenerationRequest) -> tuple[list[Completion], str]:
        """The request's completions, and the version of the weights afterwards.

        Fewer than asked for come back where the server aborted some.
        """

    @abstractmethod
    async def scores(self, server: Server, ids: Sequence[int], top: int) -> TokenScores:
        """Log-probs at temperature 1 of tokens 1..n-1 given those before, and the `top` most likely tokens there."""

    @abstractmethod
    async def pause(self, server: Server, mark: str) -> None:
        """Aborts running requests and holds new ones back; sets the version to `mark`."""

    @abstractmethod
    async def load_files(self, server: Server, folder: str, files: Sequence[str], token: str) -> None:
        """Replaces the weights by those of a folder with safetensors files.

        Raises:
            ValueError: the weights do not fit the server's model.
        """

    @abstractmethod
    async def resume(self, server: Server, token: str) -> None:
        """Drops the caches of the old weights, sets the version to `token` and serves again."""


class VLLMProtocol(ServerProtocol):
    """vLLM 0.32's server in development mode."""

    extra = ExtraKeys(
        harmless=frozenset(
            (
                *("cache_salt", "include_stop_str_in_output", "priority", "request_id", "skip_special_tokens"),
                *("spaces_between_special_tokens", "user"),
            )
        ),
        evaluation=EVALUATION_EXTRA,
        own=OWN_EXTRA | {"vllm_xargs": "sampling.fire_temperature"},
    )

    async def served(self, server: Server, model: str | None) -> Facts:
        models = (await server.get("/v1/models"))["data"]
        served = {entry["id"]: entry for entry in models}
        name = model or next(iter(served))
        if name not in served:
            raise ValueError(
                f"model={model!r}: {server.url} serves {', '.join(served)}. Name one of these (or none), or start the "
                "server with --served-model-name."
            )
        return Facts(name, int(served[name]["max_model_len"]))

    async def facts(self, server: Server, model: str | None) -> Facts:
        served = await self.served(server, model)
        try:
            config = (await server.get("/server_info", params={"config_format": "json"}))["vllm_config"]
        except ServerError as error:
            if error.status != 404:
                raise
            raise ValueError(
                f"{server.url} is not in development mode, so its weights cannot be changed: start it with "
                "VLLM_SERVER_DEV_MODE=1 in its environment, in a private network only."
            ) from error
        if config["model_config"]["logprobs_mode"] != "processed_logprobs":
            raise ValueError(
                f"{server.url} reports log-probs before temperature and top-p "
                f"(logprobs_mode={config['model_config']['logprobs_mode']}): start it with "
                "--logprobs-mode processed_logprobs."
            )
        return Facts(
            served.model,
            served.max_model_len,
            str(config["model_config"]["dtype"]).removeprefix("torch."),
            (config.get("weight_transfer_config") or {}).get("backend"),
        )

    async def tokenize(self, server: Server, text: str) -> list[int] | None:
        body = {"model": server.facts.model, "prompt": text, "add_special_tokens": False}
        return list((await server.post("/tokenize", body))["tokens"])

    async def sample(self, server: Server, request: GenerationRequest) -> tuple[list[Completion], str]:
        sampling, n = request.sampling, request.num_completions
        greedy = sampling.temperature == 0  # vLLM takes n=1 only: all would be equal
        # n=G takes the seeds s, s + 1, ...; a hashed s keeps prompts with neighbouring seeds apart.
        body = {
            "model": server.facts.model,
            "prompt": list(request.token_ids),
            "n": 1 if greedy else n,
            "seed": completion_seed(request.seed, 0) >> 1,
            "logprobs": 0,
            "return_token_ids": True,
        }
        answer = await server.post("/v1/completions", body | _vllm_sampling(sampling))
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        completions = [
            _completion(c["token_ids"], c["logprobs"]["token_logprobs"], c["text"], c["finish_reason"])
            for c in choices
            if c["finish_reason"] in ("stop", "length")
        ]
        return completions * n if greedy else completions, await self._version(server)

    async def _version(self, server: Server) -> str:
        return str((await server.get("/weight_info"))["weight_version"])

    async def scores(self, server: Server, ids: Sequence[int], top: int) -> TokenScores:
        body = {"model": server.facts.model, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0}
        answer = await server.post("/v1/completions", body | {"prompt_logprobs": top})
        entries = answer["choices"][0]["prompt_logprobs"][1:]
        logprobs = [float(entry[str(token)]["logprob"]) for token, entry in zip(ids[1:], entries, strict=True)]
        likeliest = []
        for entry in entries:  # the token itself is in it, too
            ranked = sorted((said["rank"], int(word), float(said["logprob"])) for word, said in entry.items())
            likeliest.append([(word, logprob) for _, word, logprob in ranked[:top]])
        return TokenScores(logprobs, likeliest)

    async def pause(self, server: Server, mark: str) -> None:
        await server.post("/pause", params={"mode": "abort"})
        await server.post("/update_weight_version", {"new_version": mark})

    async def load_files(self, server: Server, folder: str, files: Sequence[str], token: str) -> None:
        answers = await self.rpc(server, "lightrl_load_files", [f"{folder}/{file}" for file in files], True)
        errors = [answer["error"] for answer in answers if answer["error"]]
        if errors:
            raise ValueError(f"{server.url} could not take the weights: {errors[0]}")
        missing = sorted({name for answer in answers for name in answer["missing"]})
        if missing:
            raise ValueError(
                f"Weight sync left {len(missing)} parameter(s) of {server.url} without new values (or brought NaN): "
                f"{', '.join(missing[:8])}{' ...' if len(missing) > 8 else ''}. It must serve the policy's own model."
            )

    async def rpc(self, server: Server, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of the server's worker extension; one answer per worker."""
        try:
            answer = await server.post("/collective_rpc", {"method": method, "args": list(arguments)})
        except ServerError as error:
            if "has no attribute" not in error.text:
                raise
            raise ValueError(
                f"{server.url} cannot load weights from a folder: start it with --worker-extension-cls {WORKER} (and "
                "LightRL installed beside vLLM), or use weights: transfer."
            ) from error
        return list(answer["results"])

    async def resume(self, server: Server, token: str) -> None:
        # The order keeps multimodal requests alive.
        await server.post("/reset_mm_cache")
        await server.post("/reset_encoder_cache")
        answer = await server.post("/reset_prefix_cache", params={"reset_running_requests": "true"})
        if not answer["success"]:
            raise RuntimeError(f"{server.url} did not drop its prefix cache: log-probs would mix old and new weights.")
        await server.post("/update_weight_version", {"new_version": token})
        await server.post("/resume")


def _completion(token_ids: Any, logprobs: Any, text: Any, finish_reason: Any) -> Completion:
    """A completion from a server's answer."""
    plain = all(isinstance(values, list) for values in (token_ids, logprobs)) and isinstance(text, str)
    if not (
        plain
        and len(token_ids) == len(logprobs) > 0
        and all(type(token) is int and token >= 0 for token in token_ids)
        and all(type(p) in (int, float) and -math.inf < p < 0.01 for p in logprobs)  # rounding may pass 0
    ):
        raise ValueError(f"token_ids={str(token_ids)[:80]}, logprobs={str(logprobs)[:80]}, text={str(text)[:40]!r}")
    return Completion(token_ids, [float(p) for p in logprobs], text, finish_reason)


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
"""vLLM's name -> SGLang's, if they differ."""


class SGLangProtocol(ServerProtocol):
    """SGLang's native routes, as documented for 0.5. Not run against a real server yet.

    Seeds count only where the server runs with `--enable-deterministic-inference`. Source:
    https://docs.sglang.io/docs/basic_usage/native_api.md, https://docs.sglang.io/docs/advanced_features/sglang_for_rl.md
    """

    extra = ExtraKeys(
        harmless=frozenset({"skip_special_tokens", "spaces_between_special_tokens"}),
        evaluation=frozenset(
            ("custom_params", "ebnf", "frequency_penalty", "logit_bias", "presence_penalty", "structural_tag")
        ),
        own={
            **{_SGLANG_NAMES.get(name, name): setting for name, setting in OWN_EXTRA.items() if name != "extra_args"},
            "json_schema": "sampling.json_schema",
            "regex": "sampling.regex",
            "sampling_seed": "data.seed",
        },
    )

    async def facts(self, server: Server, model: str | None) -> Facts:
        return await self.served(server, model)

    async def served(self, server: Server, model: str | None) -> Facts:
        info = await server.get("/get_model_info")
        if not info.get("is_generation", True):
            raise ValueError(f"{server.url} serves {info['model_path']}, which does not generate text.")
        served = (await server.get("/v1/models"))["data"]
        return Facts(model or str(info["model_path"]), next((e.get("max_model_len") for e in served), None))

    async def sample(self, server: Server, request: GenerationRequest) -> tuple[list[Completion], str]:
        # One seed per request, so a group is a batch of requests: n=G would draw the same completion G times.
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
                completions.append(_completion(tokens, logprobs, answer["text"], reason))
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
            raise ValueError(f"{server.url} could not take the weights in {folder}: {error.text[:500]}") from error
        if not answer["success"]:
            raise ValueError(f"{server.url} could not take the weights in {folder}: {answer['message']}")

    async def resume(self, server: Server, token: str) -> None:
        await server.post("/flush_cache")  # an error where it could not
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
