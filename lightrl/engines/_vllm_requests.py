"""Requests in vLLM's terms, and vLLM's answers in ours. vLLM is imported inside the functions."""

from __future__ import annotations

import hashlib
from typing import Any

from lightrl.types import Completion, Prompts, SamplingParams

__all__ = ["completion", "completion_seed", "engine_prompt", "prompt_name", "sampling_params", "scoring_params"]

_MEDIA_KEYS = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")


def completion_seed(prompt_seed: int, completion: int) -> int:
    """The seed of one completion: 63 bits of a hash of (seed of its prompt, its place in the group).

    vLLM's own `n=G` uses seed, seed + 1, ..., so that prompts with neighbouring seeds would share random numbers.
    """
    digest = hashlib.blake2b(f"{prompt_seed}:{completion}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sampling_params(sampling: SamplingParams, fire_temperature: float | None) -> Any:
    """vLLM's sampling parameters, without a seed; `sampling.extra` wins over everything."""
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    structured = None
    if sampling.regex is not None:
        structured = StructuredOutputsParams(regex=sampling.regex)
    elif sampling.json_schema is not None:
        structured = StructuredOutputsParams(json=sampling.json_schema)
    extra = dict(sampling.extra or {})
    if fire_temperature is not None:
        extra["extra_args"] = {"fire_temperature": fire_temperature} | (extra.get("extra_args") or {})
    arguments: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop": sampling.stop,
        "stop_token_ids": sampling.stop_token_ids,
        "ignore_eos": sampling.ignore_eos,
        "structured_outputs": structured,
        "include_stop_str_in_output": True,
        "logprobs": 0,  # the sampled token's alone
        "flat_logprobs": True,
        "output_kind": RequestOutputKind.FINAL_ONLY,
    }
    return VLLMSamplingParams(**(arguments | extra))


def scoring_params() -> Any:
    """Asks for the log-probs of the prompt's tokens, at temperature 1; one token must be generated with them."""
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind

    return VLLMSamplingParams(
        max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )


def prompt_name(prompts: Prompts, position: int) -> str:
    """How messages call a prompt."""
    return f"{position} (data-set row {prompts.indices[position]})" if prompts.indices else str(position)


def engine_prompt(prompts: Prompts, position: int) -> dict[str, Any]:
    """One prompt as vLLM takes it: token ids, with images and the like beside them where the prompt has any."""
    extra = prompts.inputs[position] if prompts.inputs else {}
    return {"prompt_token_ids": prompts.token_ids[position]} | {k: extra[k] for k in _MEDIA_KEYS if k in extra}


def completion(output: Any, sampling: SamplingParams, prompt: str) -> Completion:
    """vLLM's `CompletionOutput` as ours."""
    tokens = [int(token) for token in output.token_ids]
    flat = getattr(output.logprobs, "logprobs", None)
    if flat is not None and len(flat) == len(tokens):
        logprobs = [float(value) for value in flat]
    else:  # more than one per token: `extra` asked for it
        logprobs = [float(entry[token].logprob) for token, entry in zip(tokens, output.logprobs, strict=True)]
    if output.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended a completion of prompt {prompt} with finish_reason={output.finish_reason!r}.")
    if output.finish_reason == "length" and len(tokens) < sampling.max_new_tokens:
        raise ValueError(
            f"vLLM cut a completion of prompt {prompt} after {len(tokens)} tokens, before max_new_tokens="
            f"{sampling.max_new_tokens}: the prompt grew beyond max_model_len, as images do. Raise "
            "VLLMEngine.max_model_len or lower max_new_tokens."
        )
    return Completion(tokens, logprobs, output.text, output.finish_reason)
