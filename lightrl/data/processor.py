"""The Hugging Face processor of a model with images, videos, or sound, loaded with the first row that has some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lightrl.data.media import Grid, decode
from lightrl.data.rows import KINDS, Encoded, MediaError, MediaSource
from lightrl.data.templates import encode, render_prompt
from lightrl.models.turns import TOKEN_INPUT, begins_with_bos
from lightrl.records import ImageInputs, Media


class MediaProcessor:
    """A Hugging Face processor, run on one prompt at a time, and the checks on what it gives.

    Args:
        path: of the processor.
        tokenizer: the run's.
        placeholders: kind of media that the model takes -> id of the token that stands for a feature.
        kwargs: further arguments of `AutoProcessor.from_pretrained`.
    """

    def __init__(
        self,
        path: str,
        tokenizer: PreTrainedTokenizerBase,
        placeholders: Mapping[str, int],
        kwargs: Mapping[str, Any],
    ) -> None:
        self.path = path
        self.tokenizer = tokenizer
        self.placeholders = placeholders
        self._kwargs = dict(kwargs)
        self._loaded: Any = None
        self._blocks: bool | None = None

    @property
    def processor(self) -> Any:
        """The processor itself, loaded when it is first needed."""
        if self._loaded is None:
            from transformers import AutoProcessor

            try:
                self._loaded = AutoProcessor.from_pretrained(self.path, **self._kwargs)
            except ImportError as error:
                raise ValueError(
                    f"The processor of {self.path!r} cannot be loaded, and prompts with media need it: "
                    f"{str(error).strip().splitlines()[0]} Install what it names (pip install torchvision, a build "
                    "that fits torch)."
                ) from error
            if not hasattr(self._loaded, "tokenizer"):
                raise ValueError(f"{self.path!r} holds no processor (preprocessor_config.json), so it takes text only.")
            self._loaded.tokenizer = self.tokenizer
        return self._loaded

    def token(self, kind: str) -> str | None:
        """What stands for one medium in a prompt's text."""
        return getattr(self.processor, f"{kind}_token", None)

    @property
    def grid(self) -> Grid:
        """What the model cuts media into."""
        images, videos = (getattr(self.processor, f"{kind}_processor", None) for kind in ("image", "video"))
        sides = [getattr(p, "patch_size", None) for p in (images, videos)]
        cells = [
            side * (getattr(p, "merge_size", None) or 1) if isinstance(side, int) else 1
            for side, p in zip(sides, (images, videos), strict=True)
        ]
        return Grid(cells[0], cells[1], getattr(videos, "temporal_patch_size", None) or 1)

    @property
    def wants_blocks(self) -> bool:
        """Whether the chat template leaves out contents that are strings instead of lists of blocks."""
        if self._blocks is None:
            text, _ = render_prompt(self.tokenizer, [{"role": "user", "content": "x7q"}], chat_template=True)
            self._blocks = "x7q" not in text
        return self._blocks

    def __call__(self, text: str, media: Media, *, templated: bool) -> Encoded:
        """Runs the processor and checks that placeholders and features agree, by its own numbers.

        Args:
            text: the rendered prompt, one placeholder per medium.
            media: decoded. Its `token_ids` are set.
            templated: see `encode`.

        Raises:
            MediaError: another number of placeholders than media, or of tokens than features.
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
        """Images without a prompt: decoded, their model inputs, and the placeholders that stand for each.

        Args:
            values: n images, as content blocks hold them, or whole blocks with the options next to an image.

        Raises:
            MediaError: the model takes no images, or one cannot be read.
        """
        token = self.token("image")
        if token is None:
            raise MediaError(f"{type(self.processor).__name__} takes no images.")
        media = decode([("image", value) for value in values], MediaSource(rows=[{}]), self.grid)
        out = self._run(token * len(values), {"images": [media.images]}, templated=True)
        offsets = out.get("text_replacement_offsets")
        if not offsets or len(offsets[0]) != len(values):
            raise MediaError(f"{type(self.processor).__name__} does not say what stands for each image.")
        token_ids = out["input_ids"][0].tolist()
        inputs = self._inputs(out)
        names = [name for name in inputs if name.endswith(TOKEN_INPUT)]
        token_inputs = {name: dict(zip(token_ids, inputs.pop(name)[0].tolist(), strict=True)) for name in names}
        return ImageInputs(media.images, token, [part["replacement"] for part in offsets[0]], inputs, token_inputs)

    def _run(self, text: str, arguments: Mapping[str, Any], *, templated: bool) -> Any:
        """Runs the processor on a text and its media."""
        try:
            return self.processor(
                text=[text],
                add_special_tokens=not (templated or begins_with_bos(self.tokenizer, text)),
                return_tensors="pt",
                return_text_replacement_offsets=True,
                **arguments,
            )
        except (ValueError, StopIteration, IndexError, TypeError) as error:
            raise MediaError(f"{type(self.processor).__name__} refused it: {error}") from error

    @staticmethod
    def _inputs(out: Any) -> dict[str, torch.Tensor]:
        """The extra model inputs in it."""
        skipped = ("input_ids", "attention_mask", "labels")
        return {name: x for name, x in out.items() if isinstance(x, torch.Tensor) and name not in skipped}

    def _special_ids(self) -> set[int]:
        """Tokens that stand for a medium or for one of its features."""
        own = {i for kind in KINDS for i in getattr(self.processor, f"{kind}_token_ids", None) or ()}
        return own | set(self.placeholders.values())

    def _check_places(self, kind: str, token_ids: list[int], count: int) -> None:
        token = self.token(kind)
        if token is None:
            if count:
                raise MediaError(f"{count} {kind}s, which {type(self.processor).__name__} does not take.")
            return
        places = token_ids.count(self.tokenizer.convert_tokens_to_ids(token))
        if places != count:
            raise MediaError(f"the prompt has {places} placeholder(s) {token!r} for {count} {kind}(s).")

    def _check_features(self, token_ids: list[int], offsets: Any) -> None:
        """Compares the placeholder runs among the tokens with those that the processor says its features need."""
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
                    f"audio {number} has {rate} samples per second, the model takes {wanted}: resample it."
                )
        return wanted
