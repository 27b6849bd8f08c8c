"""Requests in vLLM's terms, and vLLM's answers in ours. vLLM is imported inside the functions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from lightrl.types import Completion, Media, Prompts, SamplingParams, video_timing

__all__ = [
    "check_prompt",
    "completion",
    "completion_seed",
    "engine_prompt",
    "prompt_name",
    "sampling_params",
    "scoring_params",
]


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
        **plain_sampling(sampling),
        "structured_outputs": structured,
        "logprobs": 0,  # the sampled token's alone
        "flat_logprobs": True,
        "output_kind": RequestOutputKind.FINAL_ONLY,
    }
    return VLLMSamplingParams(**(arguments | extra))


def plain_sampling(sampling: SamplingParams) -> dict[str, Any]:
    """What vLLM's sampling parameters and its server's requests have in common, under vLLM's names."""
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
    """Asks for the log-probs of the prompt's tokens, at temperature 1; one token must be generated with them."""
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind

    return VLLMSamplingParams(
        max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
    )


def prompt_name(prompts: Prompts, position: int) -> str:
    """How messages call a prompt."""
    return f"{position} (data-set row {prompts.indices[position]})" if prompts.indices else str(position)


def check_request(
    prompts: Prompts,
    sampling: SamplingParams,
    num_completions: int,
    seeds: Sequence[int],
    *,
    limit: tuple[str, int],
    way_out: str,
) -> None:
    """Refuses counts that do not fit, and prompts that do not.

    Args:
        prompts: to be completed.
        sampling: how.
        num_completions: of each prompt.
        seeds: one for each prompt.
        limit: whose max_model_len it is, and how much.
        way_out: what raises it.
    """
    if num_completions < 1:
        raise ValueError(f"num_completions={num_completions}: must be at least 1.")
    if len(seeds) != len(prompts):
        raise ValueError(f"seeds: {len(seeds)} given for {len(prompts)} prompts; one each is needed.")
    for position, ids in enumerate(prompts.token_ids):
        if len(ids) + sampling.max_new_tokens > limit[1]:
            raise ValueError(
                f"Prompt {prompt_name(prompts, position)} has {len(ids)} tokens; with max_new_tokens="
                f"{sampling.max_new_tokens} that is more than the {limit[0]} max_model_len={limit[1]}. Lower "
                f"max_new_tokens, {way_out}, or drop or truncate prompts of this length."
            )


def engine_prompt(prompts: Prompts, position: int) -> dict[str, Any]:
    """One prompt as vLLM takes it: token ids; with media, one placeholder for each, and the media under their names.

    vLLM's processor puts the features' tokens in itself, once for all completions of a prompt: the names are its cache.
    """
    media = prompts.media[position] if prompts.media else Media()
    if not media:
        return {"prompt_token_ids": prompts.token_ids[position]}
    data: dict[str, list[Any]] = {}
    if media.images:
        data["image"] = list(media.images)
    if media.videos:
        pairs = zip(media.videos, media.video_times, strict=True)
        data["video"] = [(frames, video_timing(times)) for frames, times in pairs]
    if media.audios:
        data["audio"] = list(zip(media.audios, media.sampling_rates, strict=True))
    names = {kind: [f"{media.key}-{kind}-{i}" for i in range(len(items))] for kind, items in data.items()}
    return {"prompt_token_ids": media.token_ids, "multi_modal_data": data, "multi_modal_uuids": names}


def check_prompt(output: Any, prompts: Prompts, position: int) -> None:
    """Compares the prompt that vLLM computed with the trainer's.

    Raises:
        ValueError: their processors made different placeholders of the media.
    """
    if not (prompts.media and prompts.media[position]):
        return
    theirs, ours = list(output.prompt_token_ids), prompts.token_ids[position]
    if theirs != ours:
        raise ValueError(
            f"Prompt {prompt_name(prompts, position)}: vLLM made {len(theirs)} tokens of it, the model's processor "
            f"{len(ours)}, and they differ: engine and trainer would not see the same. Leave engine_args' "
            "mm_processor_kwargs out, and check that media, inputs and tokens of the prompt belong together."
        )


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
