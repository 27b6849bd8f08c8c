"""Conversion of requests that plain runs don't have: prompts with media, and completions of which a part was sampled
before, by another engine or under earlier weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightrl.models.multimodal import video_timing
from lightrl.records import Completion, GenerationRequest, Media, SamplingParams


def media_prompt(media: Media, begun: list[int]) -> dict[str, Any]:
    """Returns a prompt with one placeholder per item, followed by the tokens of a partial completion.

    vLLM's processor expands the placeholders once for all completions, and caches the result by the item's name.
    """
    data: dict[str, list[Any]] = {}
    if media.images:
        data["image"] = list(media.images)
    if media.videos:
        pairs = zip(media.videos, media.video_times, strict=True)
        data["video"] = [(frames, video_timing(times)) for frames, times in pairs]
    if media.audios:
        data["audio"] = list(zip(media.audios, media.sampling_rates, strict=True))
    names = {kind: [f"{media.key}-{kind}-{i}" for i in range(len(items))] for kind, items in data.items()}
    return {"prompt_token_ids": media.token_ids + begun, "multi_modal_data": data, "multi_modal_uuids": names}


def check_prompt(output: Any, request: GenerationRequest, place: int) -> None:
    """Raises a ValueError if vLLM's processor expanded the media differently from the trainer's."""
    theirs, ours = list(output.prompt_token_ids), request.token_ids + request.so_far(place).token_ids
    if theirs != ours:
        raise ValueError(
            f"{request.name}: vLLM's tokens ({len(theirs)}) and the model processor's ({len(ours)}) differ. Remove "
            "engine_args.mm_processor_kwargs, and check that media, inputs, and tokens of the prompt match."
        )


def remaining(request: GenerationRequest, place: int) -> SamplingParams:
    """Returns the settings for the remaining tokens of a completion."""
    begun = len(request.so_far(place).token_ids)
    sampling, most = request.sampling, request.sampling.max_new_tokens - begun
    least = min(max(sampling.min_new_tokens - begun, 0), most)
    fire = sampling.fire_temperature if begun == 0 else None  # the first token's
    return replace(sampling, max_new_tokens=most, min_new_tokens=least, fire_temperature=fire)


def joined(
    new: Completion, request: GenerationRequest, place: int, versions: list[int], decode: Callable[[list[int]], str]
) -> Completion:
    """Joins the earlier and new tokens of a completion, up to the first stop string that begins in earlier tokens.

    vLLM searches for stop strings only in new tokens, whose weight versions are `versions`. `decode` converts tokens.
    """
    before = request.so_far(place)
    versions = before.policy_versions + versions
    tokens, logprobs = before.token_ids + new.token_ids, before.logprobs + new.logprobs
    begun = len(before.token_ids)
    stops = (request.sampling.stop or []) if begun >= request.sampling.min_new_tokens else []
    reach = max((len(stop.encode()) for stop in stops), default=0) + 8  # a visible token has at least one byte
    start = max(begun - reach, 0)
    earlier = len(decode(tokens[start:begun]))
    for end in range(begun + 1, min(begun + reach, len(tokens)) + 1 if stops else 0):
        near = decode(tokens[start:end])
        found = [at + len(s) for s in stops if (at := near.find(s, max(earlier - len(s) + 1, 0))) >= 0]
        if found:
            text = decode(tokens[:end])
            text = text[: len(text) - len(near) + min(found)]
            return Completion(tokens[:end], logprobs[:end], text, "stop", policy_versions=versions[:end])
    text = decode(tokens)
    if request.sampling.stop and new.finish_reason == "stop":  # vLLM cuts the text after the stop string
        text = text[: len(text) - len(decode(new.token_ids)) + len(new.text)]
    return Completion(tokens, logprobs, text, new.finish_reason, policy_versions=versions)
