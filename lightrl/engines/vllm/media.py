"""Prompts with media in vLLM's format."""

from __future__ import annotations

from typing import Any

from lightrl.models.multimodal import video_timing
from lightrl.records import GenerationRequest, Media


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
