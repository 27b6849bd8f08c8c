"""Prompts, requests to engines, and completions."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """How completions are sampled.

    The trainer computes log-probs of the softmax at this temperature, over the tokens that top-p, top-k, and min-p left
    if the engine records them (`Support`). Settings that change the distribution in another way leave tokens out of the
    loss (`fire_temperature`, `min_new_tokens`; see `masked_tokens`) or are not supported in training
    (`repetition_penalty`, `regex`, `json_schema`, most of `extra`). Evaluation supports all of them. Limits and stops
    (`max_new_tokens`, `stop`, `stop_token_ids`, `ignore_eos`) don't change what each token is drawn from.

    Args:
        max_new_tokens: upper bound on the completion's length in tokens, at least 1.
        min_new_tokens: Minimum number of tokens before end-of-sequence or a stop. That many tokens of each completion
            are not trained, because the end was left out of what they were drawn from.
        temperature: logits are divided by it, from 1e-6 to 1e6; 0 is greedy, which is only allowed for evaluation and
            prediction.
        fire_temperature: temperature of each completion's first token in its place (FIRE sampling,
            https://arxiv.org/abs/2410.21236, which takes 10), from 1e-6 to 1e6; None is off. Greedy sampling is left
            alone. The first token is not trained.
        top_p: nucleus: smallest set of tokens whose probabilities add up to this, in (0, 1]; 1 is off.
        top_k: keep the k likeliest tokens; 0 is off.
        min_p: drop tokens less likely than this times the likeliest, in [0, 1); 0 is off.
        repetition_penalty: divides (positive) or multiplies (negative) logits of seen tokens, from 1e-3 to 1e3; 1 is
            off.
        stop: strings that end a completion; its tokens and its text are kept up to and with the stop string.
        stop_token_ids: token IDs that end a completion, in addition to the EOS and the chat template's end of turn.
        ignore_eos: continue after EOS and end of turn until `max_new_tokens`.
        regex: the completion must match this regular expression (engines with structured outputs only).
        json_schema: the completion must be JSON of this schema (engines with structured outputs only).
        extra: Further arguments of the engine's own sampling parameters, by the engine's names. In training only those
            that leave the distribution alone (`Engine.extra`).

    Raises:
        ValueError: a value is out of its range; the message names the argument.
    """

    max_new_tokens: int = 256
    min_new_tokens: int = 0
    temperature: float = 1.0
    fire_temperature: float | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    regex: str | None = None
    json_schema: dict[str, Any] | None = None
    extra: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        checks = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "min_new_tokens": (0 <= self.min_new_tokens <= self.max_new_tokens, "between 0 and max_new_tokens"),
            "temperature": (
                self.temperature == 0 or 1e-6 <= self.temperature <= 1e6,
                "0 (greedy) or more, from 1e-6 to 1e6",
            ),
            "fire_temperature": (
                self.fire_temperature is None or 1e-6 <= self.fire_temperature <= 1e6,
                "above 0, from 1e-6 to 1e6, or null (off)",
            ),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]; 1 turns it off"),
            "top_k": (self.top_k >= 0, "0 (off) or more"),
            "min_p": (0 <= self.min_p < 1, "in [0, 1); 0 turns it off"),
            "repetition_penalty": (
                1e-3 <= self.repetition_penalty <= 1e3,
                "above 0, from 1e-3 to 1e3; 1 turns it off",
            ),
            "stop": ("" not in (self.stop or []), "texts that are not empty"),
            "stop_token_ids": (all(token >= 0 for token in self.stop_token_ids or []), "token ids, 0 or more"),
        }
        for name, (ok, allowed) in checks.items():
            if not ok:
                raise ValueError(f"SamplingParams.{name}={getattr(self, name)!r}: must be {allowed}.")
        if self.regex is not None and self.json_schema is not None:
            raise ValueError("SamplingParams: give regex or json_schema, not both.")

    @property
    def masked_tokens(self) -> int:
        """Tokens at the start of each completion whose distribution the trainer does not compute."""
        return max(self.min_new_tokens, 0 if self.fire_temperature is None else 1)


@dataclass(eq=False)
class Media:
    """What one prompt shows, decoded, in the order of its placeholders. False where it shows nothing.

    Made once per prompt and shared by reference: the G rows of a group hold the same object. Nobody changes it.

    Attributes:
        images: PIL images in RGB, at most `max_pixels` large.
        videos: arrays (frames, height, width, 3) of uint8, at most `max_frames` long.
        video_times: per video, the second at which each of its frames is shown.
        audios: mono arrays (samples,) of float32.
        sampling_rates: per audio, samples per second.
        token_ids: the prompt with one placeholder per medium, for engines that put the features' tokens in themselves;
            `Prompts.token_ids` is the same prompt with them.
        key: its name in an engine's cache of processed media, so that it need not hash their contents.
    """

    images: list[Any] = field(default_factory=list)
    videos: list[Any] = field(default_factory=list)
    video_times: list[list[float]] = field(default_factory=list)
    audios: list[Any] = field(default_factory=list)
    sampling_rates: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __bool__(self) -> bool:
        return bool(self.images or self.videos or self.audios)

    def columns(self, count: int) -> dict[str, list[Any]]:
        """`images`, `videos` and `audios` as reward functions get them: for each of `count` rows the same list."""
        return {name: [getattr(self, name)] * count for name in ("images", "videos", "audios")}


@dataclass
class ImageInputs:
    """n images as a model reads them.

    Attributes:
        images: decoded, PIL in RGB.
        token: the one placeholder that a chat template writes for an image.
        texts: n strings of placeholders that stand for each image in the end.
        inputs: model inputs of all images, but for those that have an entry per token.
        token_inputs: name -> token id -> entry; 0 for ids that are not there.
    """

    images: list[Any]
    token: str
    texts: list[str]
    inputs: dict[str, Tensor]
    token_inputs: dict[str, dict[int, int]]


@dataclass(eq=False)
class Support:
    """Which ids each of n tokens was drawn from, where top-p, top-k or min-p cut the vocabulary; sparse, on the host.

    Attributes:
        counts: (n,) int64, how many ids were left; 0 means all of them (nothing was cut, or the token is context).
        ids: (sum of counts,) int32, the ids that were left, token after token.
    """

    counts: Tensor
    ids: Tensor

    def __len__(self) -> int:
        return len(self.counts)

    @staticmethod
    def of(kept: Sequence[Any]) -> Support:
        """From the ids left for each token, lists or tensors."""
        parts = [torch.as_tensor(ids, dtype=torch.int32) for ids in kept]
        counts = torch.tensor([len(part) for part in parts], dtype=torch.long)
        return Support(counts, torch.cat(parts) if parts else torch.empty(0, dtype=torch.int32))

    @staticmethod
    def whole(count: int) -> Support:
        """Of `count` tokens for which nothing was cut."""
        return Support(torch.zeros(count, dtype=torch.long), torch.empty(0, dtype=torch.int32))

    @staticmethod
    def joined(*parts: tuple[int, Support | None]) -> Support | None:
        """Concatenation of (number of tokens, support); None for a part without a cut, and if no part has any."""
        if all(support is None for _, support in parts):
            return None
        found = [Support.whole(count) if support is None else support for count, support in parts]
        assert all(len(s) == count for s, (count, _) in zip(found, parts, strict=True)), "an entry for each token"
        return Support(torch.cat([s.counts for s in found]), torch.cat([s.ids for s in found]))

    def upto(self, end: int) -> Support:
        """Of the first `end` tokens."""
        counts = self.counts[:end]
        return Support(counts, self.ids[: int(counts.sum())])

    @staticmethod
    def at(supports: Sequence[Support | None], targets: Tensor, width: int) -> Support | None:
        """Of tokens picked from several rows; None where nothing was cut for any.

        Args:
            supports: B rows' entries. targets: (M,) int64, row times `width` plus the token's place in its row.
            width: T.

        Returns:
            M entries, on the device of `targets`.
        """
        if all(support is None for support in supports):
            return None
        counts = torch.zeros(len(supports), width, dtype=torch.long)
        for row, support in enumerate(supports):
            if support is not None:
                counts[row, : len(support)] = support.counts
        ids = torch.cat([support.ids for support in supports if support is not None])
        flat = counts.view(-1)
        starts, wanted = (flat.cumsum(0) - flat), targets.cpu()
        own = flat[wanted]
        index = torch.repeat_interleave(starts[wanted] - (own.cumsum(0) - own), own) + torch.arange(int(own.sum()))
        return Support(own.to(targets.device), ids[index].to(targets.device))


@dataclass(eq=False)
class Routes:
    """Which experts each of the first n tokens of a row was sent to, by a mixture of experts; on the host.

    Attributes:
        experts: (n, L, K) uint8, or int16 where there are more than 256: the K experts in each of L layers. L counts
            the layers with a router, or all layers of the model where the engine numbers them so.
    """

    experts: Tensor

    def __len__(self) -> int:
        return len(self.experts)

    def upto(self, end: int) -> Routes:
        """Of the first `end` tokens."""
        return Routes(self.experts[:end])

    @staticmethod
    def extended(own: Routes | None, longer: Routes | None) -> Routes | None:
        """`own`, and the later tokens of `longer`, which was recorded when the same row had more tokens."""
        if own is None or longer is None:
            return own or longer
        return Routes(torch.cat([own.experts, longer.experts[len(own) :]]))

    @staticmethod
    def at(routes: Sequence[Routes | None], places: Tensor, width: int) -> Tensor | None:
        """The experts of tokens picked from several rows; None where nothing was recorded for any row.

        Args:
            routes: B rows' entries. places: (N,) int64, row times `width` plus the token's place in its row.
            width: T.

        Returns:
            (N, L, K) int64 on the device of `places`, -1 for tokens of which nothing was recorded.
        """
        known = [entry.experts for entry in routes if entry is not None]
        if not known:
            return None
        table = torch.cat([torch.full_like(known[0][:1], -1, dtype=torch.int16), *known])
        counts = torch.tensor([0 if entry is None else len(entry) for entry in routes])
        row, place = places.cpu() // width, places.cpu() % width
        index = torch.where(place < counts[row], (counts.cumsum(0) - counts)[row] + place + 1, 0)
        return table[index].to(places.device).long()

    @staticmethod
    def told_apart(token_ids: Tensor, routes: Sequence[Routes | None]) -> Tensor:
        """(B, T) numbers that are equal where token and experts are; the tokens where nothing was recorded."""
        experts = Routes.at(routes, torch.arange(token_ids.numel()), token_ids.shape[1])
        if experts is None:
            return token_ids
        both = torch.cat([token_ids.reshape(-1, 1), experts.flatten(1)], 1)
        numbers = np.unique(both.numpy(), axis=0, return_inverse=True)[1]
        return torch.from_numpy(numbers).view(token_ids.shape)


class TopTokens(NamedTuple):
    """A teacher's top-K tokens at each of M positions.

    Attributes:
        ids: (M, K) int64. logprobs: (M, K) float32.
    """

    ids: Tensor
    logprobs: Tensor


@dataclass
class Completion:
    """One sampled answer.

    Attributes:
        token_ids: the sampled tokens, the end-of-sequence token included when it was sampled. Never one that was not.
        logprobs: per token, the log-probability under the distribution it was drawn from (temperature, top-p ... in).
        text: the decoded tokens without special tokens, up to and with the stop string where one ended it.
        finish_reason: "stop" (end-of-sequence or stop string), "length" (cut by `max_new_tokens`), or "suspended": not
            over, a request whose `begun` has it goes on from here.
        support: what each token was drawn from, where sampling cut the vocabulary and the engine records it.
        routes: of the prompt's tokens and the completion's, but for its last, which was not fed to the model; None
            where the model has no experts, or the engine records nothing.
        policy_versions: per token, of the weights that sampled it; empty where that is the group's for all.
        top: per token, the likeliest token IDs and their log-probs; empty unless the request's `extra` asks for them.
    """

    token_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: Literal["stop", "length", "suspended"]
    support: Support | None = None
    routes: Routes | None = None
    policy_versions: list[int] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)


@dataclass(eq=False)
class GenerationRequest:
    """One prompt that an engine is asked to complete.

    Attributes:
        token_ids: the prompt, not padded, not empty.
        sampling: the distribution and the limits.
        seed: completion g is drawn with a seed derived from (seed, g) alone, so the result depends neither on the
            order nor on the number of requests.
        num_completions: G, at least 1.
        inputs: extra model inputs as in `Prompts`, `{}` for text.
        media: decoded media as in `Prompts`.
        name: how messages call it.
        routes: of its first tokens, from earlier turns. An engine that records experts takes these again; others, whose
            caches hold what was computed then, may ignore it.
        begun: the G completions as far as they were sampled before; those that are "suspended" continue, with the
            current weights, which also recompute their keys and values. Empty: all begin.
        trained: Whether its tokens are trained. If False, `sampling` may constrain them, and only completions with a
            `support` are.
    """

    token_ids: list[int]
    sampling: SamplingParams
    seed: int
    num_completions: int = 1
    inputs: dict[str, Any] = field(default_factory=dict)
    media: Media = field(default_factory=lambda: Media())
    name: str = "a prompt"
    routes: Routes | None = None
    begun: list[Completion] = field(default_factory=list)
    trained: bool = True

    def so_far(self, place: int) -> Completion:
        """What was sampled of a completion before; one without tokens where it begins."""
        return self.begun[place] if self.begun else Completion([], [], "", "suspended")

    @property
    def live(self) -> list[int]:
        """Places of the completions that lack tokens."""
        if not self.begun:
            return list(range(self.num_completions))
        return [place for place, part in enumerate(self.begun) if part.finish_reason == "suspended"]


@dataclass
class CompletionGroup:
    """All G completions of one prompt, handed out as soon as the last of them is done or suspended.

    Attributes:
        request: what was asked, the very object.
        completions: the G completions.
        policy_version: version of the weights that sampled them; of the first tokens, where that changed on the way.
    """

    request: GenerationRequest
    completions: list[Completion]
    policy_version: int

    def versions(self, place: int) -> list[int]:
        """Of the weights that sampled each token of a completion."""
        completion = self.completions[place]
        return completion.policy_versions or [self.policy_version] * len(completion.token_ids)

    @property
    def suspended(self) -> bool:
        """Whether a completion is not over."""
        return any(completion.finish_reason == "suspended" for completion in self.completions)


@dataclass
class Prompts:
    """P prompts as the engine gets them.

    Attributes:
        token_ids: P lists of token ids, not padded, none empty.
        texts: P strings, what the tokens decode to before tokenisation (after the chat template).
        columns: every column of the data set's rows, `name -> P values`; reward functions get them.
        indices: P row numbers in the data set, for messages and for trajectories.
        inputs: P dictionaries of extra model inputs, tensors as the model's processor gave them for this one prompt
            (`pixel_values`, `image_grid_thw`, ...), carried opaquely; `{}` for text.
        raw: P prompts before any chat template: strings, or conversations as lists of {"role", "content"}.
        media: P decoded media, for engines, rewards and logs; `Media()` for text. Empty where no prompt can have any.
    """

    token_ids: list[list[int]]
    texts: list[str]
    columns: dict[str, list[Any]] = field(default_factory=dict)
    indices: list[int] = field(default_factory=list)
    inputs: list[dict[str, Any]] = field(default_factory=list)
    raw: list[Any] = field(default_factory=list)
    media: list[Media] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, rows: slice | Sequence[int]) -> Prompts:
        """The given rows, as another `Prompts`."""
        pick = range(len(self))[rows] if isinstance(rows, slice) else rows
        return Prompts(
            **{name: [values[i] for i in pick] if (values := getattr(self, name)) else [] for name in self._lists()},
            columns={name: [values[i] for i in pick] for name, values in self.columns.items()},
        )

    def request(self, i: int, sampling: SamplingParams, seed: int, num_completions: int) -> GenerationRequest:
        """Asks for completions of prompt `i`; see `GenerationRequest`."""
        return GenerationRequest(
            self.token_ids[i],
            sampling,
            seed,
            num_completions,
            inputs=self.inputs[i] if self.inputs else {},
            media=self.media[i] if self.media else Media(),
            name=f"prompt {i} (data-set row {self.indices[i]})" if self.indices else f"prompt {i}",
        )

    @classmethod
    def _lists(cls) -> list[str]:
        """Names of the attributes with an entry per prompt: all but the columns."""
        return [f.name for f in fields(cls) if f.name != "columns"]


StopReason = Literal["stop", "length", "turns", "tokens", "time", "failure"]
"""Why a trajectory ended: the policy or environment ended it, `max_new_tokens` cut its last turn, it ran out of turns,
of tokens or of time, or something failed that the policy did not cause."""


@dataclass(frozen=True)
class EngineContext:
    """What the run tells an engine when it starts. An argument given to the engine's constructor wins.

    Attributes:
        model_path: folder or hub name whose configuration and tokenizer describe the policy.
        dtype: "float32", "bfloat16" or "float16": the trainer's compute dtype.
        seed: the run's seed; per-request seeds are derived by the caller, not from this.
        rank: global rank of this process. world_size: number of processes.
        local_rank: rank on this machine.
        device: "cpu" or "cuda:0" and so on, the trainer's device.
        max_prompt_tokens: Upper bound on the tokens of the run's prompts; None if unknown (streams, media).
        max_new_tokens: largest `max_new_tokens` of any sampling settings in the run.
        max_sequences: Most completions that the run samples at a time on this rank; None if unknown.
        random_init: the model folder has a configuration but no weights; the first sync brings them.
        lora_rank: rank of the policy's adapter; 0 where there is none, or none that fits on the folder's weights.
        fire: some sampling settings of the run have a `fire_temperature`.
        keep_cache: weights may be loaded while requests run, which keep their keys and values.
        long_rope: a model with LongRoPE uses its factors for long sequences.
    """

    model_path: str
    dtype: str = "float32"
    seed: int = 0
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    device: str = "cpu"
    max_prompt_tokens: int | None = None
    max_new_tokens: int = 256
    max_sequences: int | None = None
    random_init: bool = False
    lora_rank: int = 0
    fire: bool = False
    keep_cache: bool = False
    long_rope: bool = False
