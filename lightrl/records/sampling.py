"""Prompts, generation requests, and completions."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from lightrl.records.conditions import Routes, Support


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters for completions.

    The trainer computes log-probs at this temperature, over the tokens left by top-p, top-k, and min-p if the engine
    records them (`Support`). `fire_temperature` and `min_new_tokens` change the distribution in other ways, so the
    affected tokens are excluded from the loss (`masked_tokens`). `repetition_penalty`, `regex`, `json_schema`, and most
    of `extra` are supported only in evaluation. Limits and stops (`max_new_tokens`, `stop`, `stop_token_ids`,
    `ignore_eos`) don't change the distribution.

    Args:
        max_new_tokens: Maximum number of tokens per completion, at least 1.
        min_new_tokens: Minimum number of tokens before end-of-sequence or a stop. The first `min_new_tokens` tokens are
            not trained, since they were drawn from a distribution without end-of-sequence.
        temperature: Divisor of logits, from 1e-6 to 1e6. 0 is greedy decoding, allowed only in evaluation and
            prediction.
        fire_temperature: Temperature of each completion's first token (FIRE sampling,
            https://arxiv.org/abs/2410.21236, which uses 10), from 1e-6 to 1e6. None disables it. No effect with greedy
            decoding. The first token is not trained.
        top_p: Nucleus sampling: keep the smallest set of tokens with at least this total probability, in (0, 1]. 1
            disables it.
        top_k: Keep the k most likely tokens. 0 disables it.
        min_p: Remove tokens less likely than this fraction of the most likely one, in [0, 1). 0 disables it.
        repetition_penalty: Divisor (positive logits) or factor (negative logits) for tokens seen before, from 1e-3 to
            1e3. 1 disables it.
        stop: Strings that end a completion. The completion includes the stop string.
        stop_token_ids: Token IDs that end a completion, in addition to EOS and the chat template's end of turn.
        ignore_eos: Continue after EOS and end of turn until `max_new_tokens`.
        regex: Regular expression that the completion must match. Requires an engine with structured outputs.
        json_schema: JSON schema that the completion must match. Requires an engine with structured outputs.
        extra: Additional sampling parameters of the engine, by the engine's names. In training, only those that don't
            change the distribution (`Engine.harmless_extra`).
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
        # A negative temperature would invert the distribution, and the other values would end a run that has begun.
        if self.temperature < 0 or (self.fire_temperature or 1) < 0:
            raise ValueError(f"SamplingParams.temperature={self.temperature}: is below 0. Use 0 (greedy) or more.")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens or self.max_new_tokens < 1:
            raise ValueError(
                f"SamplingParams.max_new_tokens={self.max_new_tokens}: must be at least 1 and at least min_new_tokens."
            )

    @property
    def masked_tokens(self) -> int:
        """Number of tokens at the start of each completion whose distribution the trainer doesn't compute."""
        return max(self.min_new_tokens, 0 if self.fire_temperature is None else 1)


@dataclass(eq=False)
class Media:
    """Decoded media of one prompt, in the order of its placeholders. False if empty.

    Created once per prompt and shared by the G rows of a group. Must not be changed.

    Attributes:
        images: PIL images in RGB, at most `max_pixels` large.
        videos: (frames, height, width, 3) uint8 arrays of at most `max_frames` frames.
        video_times: Time of each frame in seconds, per video.
        audios: (samples,) float32 mono arrays.
        sampling_rates: Samples per second, per audio.
        token_ids: Prompt with one placeholder per medium, for engines that insert the feature tokens themselves.
            `Prompts.token_ids` already includes them.
        key: Key in an engine's cache of processed media, which avoids hashing their contents.
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


@dataclass
class Completion:
    """One sampled completion.

    Attributes:
        token_ids: Sampled tokens, including end-of-sequence if it was sampled.
        logprobs: Log-prob of each token under the distribution it was drawn from (including temperature and top-p).
        text: Decoded tokens without special tokens, up to and including the stop string if one ended it.
        finish_reason: "stop" (end-of-sequence or stop string), "length" (truncated at `max_new_tokens`), or "suspended"
            (unfinished; a request with it in `begun` continues it).
        support: Tokens that each token was drawn from, if sampling cut the vocabulary and the engine records it.
        routes: Experts of the prompt's and completion's tokens, except the last token, which is not fed to the model.
            None without experts, or if the engine doesn't record them.
        policy_versions: Version of the weights that sampled each token. Empty if it is the group's for all.
        top: Most likely token IDs with their log-probs, per token. Empty unless requested in `extra`.
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
    """Request to an engine to complete one prompt.

    Attributes:
        token_ids: Prompt, not padded, not empty.
        sampling: Sampling distribution and limits.
        seed: Seed. Completion g uses a seed derived only from (seed, g), so the result depends neither on the order nor
            on the number of requests.
        num_completions: G, at least 1.
        inputs: Additional model inputs as in `Prompts`, `{}` for text.
        media: Decoded media as in `Prompts`.
        name: Name of the prompt in messages.
        routes: Experts of its first tokens, from earlier turns. Engines that record experts reuse them. Others may
            ignore them, since their caches hold what was computed.
        begun: The G partial completions sampled before. "suspended" ones continue with the current weights, which also
            recompute their keys and values. Empty if all are new.
        trained: Whether its tokens are trained. If False, `sampling` may constrain them, and only completions with a
            `support` are trained.
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
        """Returns the partial completion at `place`, without tokens if it is new."""
        return self.begun[place] if self.begun else Completion([], [], "", "suspended")


@dataclass
class CompletionGroup:
    """The G completions of one prompt, returned when all are finished or suspended.

    Attributes:
        request: Request object that was passed to the engine.
        completions: G completions.
        policy_version: Version of the weights that sampled them; of the first tokens if it changed during generation.
    """

    request: GenerationRequest
    completions: list[Completion]
    policy_version: int

    def versions(self, place: int) -> list[int]:
        """Returns the version of the weights that sampled each token of a completion."""
        completion = self.completions[place]
        return completion.policy_versions or [self.policy_version] * len(completion.token_ids)


@dataclass
class Prompts:
    """P prompts as passed to the engine.

    Attributes:
        token_ids: P lists of token IDs, not padded, none empty.
        texts: P prompts as text, after the chat template and before tokenization.
        columns: All dataset columns, P values by name, for reward functions.
        indices: P row numbers in the dataset, for messages and trajectories.
        inputs: P dictionaries of additional model inputs (`pixel_values`, `image_grid_thw`, ...) as returned by the
            model's processor for each prompt; `{}` for text.
        raw: P prompts before any chat template: strings, or conversations as lists of {"role", "content"}.
        media: P decoded media for engines, rewards, and logs; `Media()` for text. Empty if prompts can't have media.
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
        """Selects prompts as another `Prompts`."""
        pick = range(len(self))[rows] if isinstance(rows, slice) else rows
        names = [each.name for each in fields(self) if each.name != "columns"]
        return Prompts(
            **{name: [values[i] for i in pick] if (values := getattr(self, name)) else [] for name in names},
            columns={name: [values[i] for i in pick] for name, values in self.columns.items()},
        )

    def request(self, i: int, sampling: SamplingParams, seed: int, num_completions: int) -> GenerationRequest:
        """Creates a request for completions of prompt `i`."""
        return GenerationRequest(
            self.token_ids[i],
            sampling,
            seed,
            num_completions,
            inputs=self.inputs[i] if self.inputs else {},
            media=self.media[i] if self.media else Media(),
            name=f"prompt {i} (dataset row {self.indices[i]})" if self.indices else f"prompt {i}",
        )


StopReason = Literal["stop", "length", "turns", "tokens", "time", "failure"]
"""Why a trajectory ended: "stop" by the policy or environment, "length" at `max_new_tokens` of its last turn, "turns",
"tokens", or "time" at a limit, "failure" for a reason that the policy did not cause."""


@dataclass(frozen=True)
class EngineContext:
    """Information about the run that is passed to an engine at startup. Constructor arguments take precedence.

    Attributes:
        model_path: Model directory or model ID with the policy's config and tokenizer.
        dtype: Compute dtype of the trainer: "float32", "bfloat16", or "float16".
        seed: Seed of the run. The caller derives per-request seeds, not the engine.
        rank: Global rank of this process.
        world_size: Number of processes.
        local_rank: Rank on this node.
        device: Device of the trainer: "cpu", "cuda:0", and so on.
        max_prompt_tokens: Maximum number of tokens of the run's prompts. None if unknown (streams, media).
        max_new_tokens: Largest `max_new_tokens` of any sampling settings in the run.
        max_sequences: Maximum number of completions sampled at a time on this rank. None if unknown.
        random_init: Whether the model directory has a config but no weights. The first sync sets them.
        lora_rank: Rank of the policy's adapter. 0 without one, or if it doesn't apply to the weights in `model_path`.
        fire: Whether some sampling settings of the run have a `fire_temperature`.
        keep_cache: Whether weights may be loaded while requests run, which keep their keys and values.
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
