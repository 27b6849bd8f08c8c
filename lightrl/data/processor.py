"""Hugging Face processors of models with images, videos, or audio, loaded on first use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lightrl.data.media import decode
from lightrl.data.rows import KINDS, Encoded, MediaError, MediaSource
from lightrl.data.templates import encode, render_prompt
from lightrl.models.turns import TOKEN_INPUT, begins_with_bos
from lightrl.records import Media


@dataclass
class ImageInputs:
    """n images as model inputs."""

    images: list[Any]
    token: str  # placeholder that the chat template writes for an image
    texts: list[str]  # n strings of placeholders that replace `token`
    inputs: dict[str, Tensor]  # model inputs, except those with an entry per token
    token_inputs: dict[str, dict[int, int]]  # entries per token ID (0 for missing IDs), by input name


class MediaProcessor:
    """Runs a Hugging Face processor on single prompts and checks its output."""

    def __init__(self, path: str, tokenizer: PreTrainedTokenizerBase, placeholders: Mapping[str, int]) -> None:
        self.path = path
        self.tokenizer = tokenizer
        self.placeholders = placeholders

    @cached_property
    def processor(self) -> Any:
        from transformers import AutoProcessor

        loaded = AutoProcessor.from_pretrained(self.path)
        loaded.tokenizer = self.tokenizer
        return loaded

    def token(self, kind: str) -> str | None:
        """Returns the placeholder of one media item in a prompt's text."""
        return getattr(self.processor, f"{kind}_token", None)

    @cached_property
    def wants_blocks(self) -> bool:
        """Whether the chat template requires lists of content blocks instead of strings."""
        return "x7q" not in render_prompt(self.tokenizer, [{"role": "user", "content": "x7q"}])[0]

    def __call__(self, text: str, media: Media, *, templated: bool) -> Encoded:
        """Runs the processor on a rendered prompt with one placeholder per media item. Sets the media's `token_ids`.

        Raises a `MediaError` if the numbers of placeholders and media, or of tokens and features, differ.
        """
        media.token_ids = encode(self.tokenizer, text, templated=templated)
        for kind, items in (("image", media.images), ("video", media.videos), ("audio", media.audios)):
            self._check_places(kind, media.token_ids, len(items))
        arguments: dict[str, Any] = {}
        if media.images:
            arguments["images"] = [list(media.images)]
        if media.videos:
            from lightrl.models.multimodal import video_timing

            timings = [video_timing(times) for times in media.video_times]
            arguments["do_sample_frames"] = any(timing.pop("do_sample_frames") for timing in timings)
            arguments["videos"], arguments["video_metadata"] = list(media.videos), timings
        if media.audios:
            arguments["audio"], arguments["sampling_rate"] = list(media.audios), self._sampling_rate(media)
        out = self._run(text, arguments, templated=templated)
        token_ids = out["input_ids"][0].tolist()
        self._check_features(token_ids, out.get("text_replacement_offsets"))
        inputs = self._inputs(out)
        special = self._special_ids()
        first = next((i for i, token in enumerate(token_ids) if token in special), len(token_ids))
        differ = (i for i, (a, b) in enumerate(zip(token_ids, media.token_ids, strict=False)) if a != b)
        return Encoded(text, token_ids, inputs, media, max(0, min(first, next(differ, first)) - 1))

    def images(self, values: Sequence[Any]) -> ImageInputs:
        """Decodes n images, as in content blocks or whole blocks with options, and processes them without a prompt.

        Raises a `MediaError` if the model doesn't support images, or an image can't be read.
        """
        token = self.token("image")
        if token is None:
            raise MediaError(f"{type(self.processor).__name__} does not support images. Use a vision-language model.")
        media = decode([("image", value) for value in values], MediaSource(rows=[{}]))
        out = self._run(token * len(values), {"images": [media.images]}, templated=True)
        offsets = out.get("text_replacement_offsets")
        if not offsets or len(offsets[0]) != len(values):
            raise MediaError(f"{type(self.processor).__name__} does not return the placeholders of each image.")
        token_ids = out["input_ids"][0].tolist()
        inputs = self._inputs(out)
        names = [name for name in inputs if name.endswith(TOKEN_INPUT)]
        token_inputs = {name: dict(zip(token_ids, inputs.pop(name)[0].tolist(), strict=True)) for name in names}
        return ImageInputs(media.images, token, [part["replacement"] for part in offsets[0]], inputs, token_inputs)

    def _run(self, text: str, arguments: Mapping[str, Any], *, templated: bool) -> Any:
        try:
            return self.processor(
                text=[text],
                add_special_tokens=not (templated or begins_with_bos(self.tokenizer, text)),
                return_tensors="pt",
                return_text_replacement_offsets=True,
                **arguments,
            )
        except (ValueError, StopIteration, IndexError, TypeError) as error:
            raise MediaError(f"{type(self.processor).__name__} rejected the prompt: {error}") from error

    @staticmethod
    def _inputs(out: Any) -> dict[str, torch.Tensor]:
        skipped = ("input_ids", "attention_mask", "labels")
        return {name: x for name, x in out.items() if isinstance(x, torch.Tensor) and name not in skipped}

    def _special_ids(self) -> set[int]:
        """Returns the placeholder token IDs of media and features."""
        own = {i for kind in KINDS for i in getattr(self.processor, f"{kind}_token_ids", None) or ()}
        return own | set(self.placeholders.values())

    def _check_places(self, kind: str, token_ids: list[int], count: int) -> None:
        token = self.token(kind)
        places = 0 if token is None else token_ids.count(self.tokenizer.convert_tokens_to_ids(token))
        if places != count:
            raise MediaError(f"the prompt has {places} placeholder(s) {token!r} for {count} {kind}(s). Fix the prompt.")

    def _check_features(self, token_ids: list[int], offsets: Any) -> None:
        """Compares the placeholders among the tokens with those that the processor reports for its features."""
        if not offsets:
            return
        special = self._special_ids()
        own = [i for i in token_ids if i in special]
        parts = (self.tokenizer(part["replacement"], add_special_tokens=False)["input_ids"] for part in offsets[0])
        wanted = [i for part in parts for i in part if i in special]
        if own != wanted:
            raise MediaError(f"{len(own)} placeholder tokens for {len(wanted)} features.")

    def _sampling_rate(self, media: Media) -> int:
        extractor = getattr(self.processor, "feature_extractor", None) or getattr(
            self.processor, "audio_processor", None
        )
        wanted = int(getattr(extractor, "sampling_rate", 0))
        for number, rate in enumerate(media.sampling_rates, 1):
            if rate not in (0, wanted):
                raise MediaError(
                    f"audio {number}: the sampling rate is {rate} Hz, but the model needs {wanted} Hz. Resample it."
                )
        return wanted
