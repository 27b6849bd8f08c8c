"""Conversion of requests and completions between LightRL and vLLM. vLLM is imported inside the functions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from lightrl.records import Completion, GenerationRequest, Routes, SamplingParams

HARMLESS_EXTRA = frozenset(
    (
        *("flat_logprobs", "include_stop_str_in_output", "logprobs", "skip_reading_prefix_cache"),
        *("skip_special_tokens", "spaces_between_special_tokens", "stream_interval"),
    )
)
"""Fields of vLLM's `SamplingParams` that change neither the sampling distribution nor the outputs LightRL uses."""


def completion_seed(prompt_seed: int, completion: int, begun: int = 0) -> int:
    """Returns the 63-bit hash of (prompt seed, index in the group) as the seed of a completion.

    vLLM's `n=G` uses seed, seed + 1, ..., so prompts with adjacent seeds would share random numbers. A completion that
    resumes after `begun` tokens gets a different seed, because its generator restarts.
    """
    name = f"{prompt_seed}:{completion}:{begun}" if begun else f"{prompt_seed}:{completion}"
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sampling_params(sampling: SamplingParams) -> Any:
    """Converts sampling settings to vLLM's, without a seed."""
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    structured = None
    if sampling.regex is not None:
        structured = StructuredOutputsParams(regex=sampling.regex)
    elif sampling.json_schema is not None:
        structured = StructuredOutputsParams(json=sampling.json_schema)
    extra = dict(sampling.extra or {})
    if isinstance(extra.get("structured_outputs"), dict):
        extra["structured_outputs"] = StructuredOutputsParams(**extra["structured_outputs"])
    fire = None if sampling.fire_temperature is None else {"fire_temperature": sampling.fire_temperature}
    arguments: dict[str, Any] = {
        **plain_sampling(sampling),
        "structured_outputs": structured,
        "extra_args": fire,
        "logprobs": 0,  # only the sampled token's
        "flat_logprobs": True,
        "output_kind": RequestOutputKind.FINAL_ONLY,
    }
    return VLLMSamplingParams(**(arguments | extra))


def plain_sampling(sampling: SamplingParams) -> dict[str, Any]:
    """Returns the settings shared by vLLM's sampling parameters and server requests, under vLLM's names."""
    return {
        "max_tokens": sampling.max_new_tokens,
        "min_tokens": sampling.min_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "stop": sampling.stop or [],
        "stop_token_ids": sampling.stop_token_ids or [],
        "ignore_eos": sampling.ignore_eos,
        "include_stop_str_in_output": True,
    }


def scoring_params() -> Any:
    """Returns parameters for the prompt's log-probs at temperature 1. vLLM must generate at least one token."""
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind

    return VLLMSamplingParams(
        max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )


def remaining(request: GenerationRequest, place: int) -> SamplingParams:
    """Returns the settings for the remaining tokens of a completion."""
    begun = len(request.so_far(place).token_ids)
    sampling, most = request.sampling, request.sampling.max_new_tokens - begun
    least = min(max(sampling.min_new_tokens - begun, 0), most)
    fire = sampling.fire_temperature if begun == 0 else None  # the first token's
    return replace(sampling, max_new_tokens=most, min_new_tokens=least, fire_temperature=fire)


def engine_prompt(request: GenerationRequest, place: int) -> dict[str, Any]:
    """Converts a prompt and the partial completion at `place` to vLLM's format.

    A prompt with media has one placeholder per item. vLLM's processor expands it once for all completions and caches
    the result by the item's name.
    """
    media, begun = request.media, request.so_far(place).token_ids
    if not media:
        return {"prompt_token_ids": request.token_ids + begun}
    data: dict[str, list[Any]] = {}
    if media.images:
        data["image"] = list(media.images)
    if media.videos:
        pairs = zip(media.videos, media.video_times, strict=True)
        from lightrl.models.multimodal import video_timing

        data["video"] = [(frames, video_timing(times)) for frames, times in pairs]
    if media.audios:
        data["audio"] = list(zip(media.audios, media.sampling_rates, strict=True))
    names = {kind: [f"{media.key}-{kind}-{i}" for i in range(len(items))] for kind, items in data.items()}
    return {"prompt_token_ids": media.token_ids + begun, "multi_modal_data": data, "multi_modal_uuids": names}


def check_prompt(output: Any, request: GenerationRequest, place: int) -> None:
    """Raises a ValueError if vLLM's processor expanded the media differently from the trainer's."""
    if not request.media:
        return
    theirs, ours = list(output.prompt_token_ids), request.token_ids + request.so_far(place).token_ids
    if theirs != ours:
        raise ValueError(
            f"{request.name}: vLLM's tokens ({len(theirs)}) and the model processor's ({len(ours)}) differ. Remove "
            "engine_args.mm_processor_kwargs, and check that media, inputs, and tokens of the prompt match."
        )


def completion(output: Any, request: GenerationRequest, place: int) -> Completion:
    """Converts vLLM's `CompletionOutput`, without earlier tokens. Unfinished completions are "suspended"."""
    begun = len(request.so_far(place).token_ids)
    most = request.sampling.max_new_tokens
    tokens = [int(token) for token in output.token_ids]
    flat = getattr(output.logprobs, "logprobs", None)
    if flat is not None and len(flat) == len(tokens):
        logprobs = [float(value) for value in flat]
        top = []
    else:  # several per token, requested by `extra`
        top = [{int(word): float(found.logprob) for word, found in entry.items()} for entry in output.logprobs]
        logprobs = [entry[token] for token, entry in zip(tokens, top, strict=True)]
    if output.finish_reason not in ("stop", "length", "abort"):
        raise RuntimeError(f"vLLM ended a completion of {request.name} with finish_reason={output.finish_reason!r}.")
    if output.finish_reason == "length" and begun + len(tokens) < most:
        raise ValueError(
            f"max_new_tokens={most}: vLLM cut a completion of {request.name} after {len(tokens)} tokens, because the "
            "prompt, expanded by images, exceeds max_model_len. Raise VLLMEngine.max_model_len, or lower "
            "max_new_tokens."
        )
    taken = getattr(output, "routed_experts", None)
    routes = (
        None if taken is None else Routes(torch.from_numpy(taken.astype("uint8" if taken.max() < 256 else "int16")))
    )
    ended = output.finish_reason != "abort" and (output.finish_reason == "stop" or begun + len(tokens) == most)
    reason: Any = output.finish_reason if ended else "suspended"
    return Completion(tokens, logprobs, output.text, reason, routes=routes, top=top)


def joined(
    new: Completion, request: GenerationRequest, place: int, versions: list[int], decode: Callable[[list[int]], str]
) -> Completion:
    """Joins the earlier and new tokens of a completion. vLLM searches for stop strings only in new tokens.

    Args:
        new: Result of `completion`.
        request: The request.
        place: Index of the completion in the group.
        versions: Weight version of each new token.
        decode: Function that converts tokens to text.
    """
    before = request.so_far(place)
    versions = before.policy_versions + versions
    if not before.token_ids:
        return replace(new, policy_versions=versions)
    tokens = before.token_ids + new.token_ids
    text = decode(tokens)
    if request.sampling.stop and new.finish_reason == "stop":  # vLLM cuts the text after the stop string
        text = text[: len(text) - len(decode(new.token_ids)) + len(new.text)]
    return Completion(tokens, before.logprobs + new.logprobs, text, new.finish_reason, policy_versions=versions)
