"""The records that cross LightRL's layers.

Letters: P prompts, G completions per prompt (a *group*), B = P * G sequences, T tokens of the longest sequence.

Everything a user sees is rectangular: `(B, T)` tensors, right-padded, aligned with `token_ids`. Entry `t` of a
`(B, T)` tensor belongs to token `t`; where it means nothing (prompt, padding, log-prob of the first token) it is 0
and the matching mask is False.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

__all__ = [
    "Completion",
    "CompletionGroup",
    "Experience",
    "Media",
    "Prompts",
    "Rollouts",
    "SamplingParams",
    "SupervisedBatch",
    "pad_rows",
    "realized",
    "run_seed",
    "video_timing",
]


@dataclass(frozen=True)
class SamplingParams:
    """How completions are sampled.

    The trainer's log-probs are those of the softmax at this temperature. They leave out what else changes the
    distribution (top-p, top-k, min-p, repetition penalty, a minimum length, structured outputs): training with these
    is slightly off-policy, the data module says so once, and off-policy corrections refuse them.

    Args:
        max_new_tokens: upper bound on the completion's length in tokens, at least 1.
        min_new_tokens: no end-of-sequence or stop before this many tokens.
        temperature: logits are divided by it; 0 is greedy, which is only allowed for evaluation and prediction.
        top_p: nucleus: smallest set of tokens whose probabilities add up to this, in (0, 1]; 1 is off.
        top_k: keep the k likeliest tokens; 0 is off.
        min_p: drop tokens less likely than this times the likeliest, in [0, 1); 0 is off.
        repetition_penalty: divides (positive) or multiplies (negative) logits of seen tokens; 1 is off.
        stop: strings that end a completion; the tokens up to and with the stop string are kept.
        stop_token_ids: token ids that end a completion, beside the tokenizer's end-of-sequence token.
        ignore_eos: go on after end-of-sequence until `max_new_tokens`.
        regex: the completion must match this regular expression (engines with structured outputs only).
        json_schema: the completion must be JSON of this schema (engines with structured outputs only).
        extra: further arguments of the engine's own sampling parameters, passed through untouched.

    Raises:
        ValueError: a value is out of its range; the message names the argument.
    """

    max_new_tokens: int = 256
    min_new_tokens: int = 0
    temperature: float = 1.0
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
            "temperature": (self.temperature >= 0, "0 (greedy) or more"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]; 1 turns it off"),
            "top_k": (self.top_k >= 0, "0 (off) or more"),
            "min_p": (0 <= self.min_p < 1, "in [0, 1); 0 turns it off"),
            "repetition_penalty": (self.repetition_penalty > 0, "above 0; 1 turns it off"),
        }
        for name, (ok, allowed) in checks.items():
            if not ok:
                raise ValueError(f"SamplingParams.{name}={getattr(self, name)!r}: must be {allowed}.")
        if self.regex is not None and self.json_schema is not None:
            raise ValueError("SamplingParams: give regex or json_schema, not both.")


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
        key: its name in an engine's cache of processed media, which then need not be told apart by their contents.
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
            token_ids=[self.token_ids[i] for i in pick],
            texts=[self.texts[i] for i in pick],
            columns={name: [values[i] for i in pick] for name, values in self.columns.items()},
            indices=[self.indices[i] for i in pick] if self.indices else [],
            inputs=[self.inputs[i] for i in pick] if self.inputs else [],
            raw=[self.raw[i] for i in pick] if self.raw else [],
            media=[self.media[i] for i in pick] if self.media else [],
        )

    @staticmethod
    def concat(parts: Sequence[Prompts]) -> Prompts:
        """The rows of several, one after another; all have the same columns."""
        names = parts[0].columns if parts else {}
        return Prompts(
            token_ids=[row for part in parts for row in part.token_ids],
            texts=[text for part in parts for text in part.texts],
            columns={name: [value for part in parts for value in part.columns[name]] for name in names},
            indices=[index for part in parts for index in part.indices],
            inputs=[inputs for part in parts for inputs in part.inputs],
            raw=[raw for part in parts for raw in part.raw],
            media=[media for part in parts for media in part.media],
        )


@dataclass
class Completion:
    """One sampled answer.

    Attributes:
        token_ids: the sampled tokens, the end-of-sequence token included when it was sampled. Never one that was not.
        logprobs: per token, the log-probability under the distribution it was drawn from (temperature, top-p ... in).
        text: the decoded tokens without special tokens.
        finish_reason: "stop" (end-of-sequence or stop string) or "length" (cut by `max_new_tokens`).
    """

    token_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: Literal["stop", "length"]


@dataclass
class CompletionGroup:
    """All G completions of one prompt, handed out as soon as the last of them is done.

    Attributes:
        prompt_index: position of the prompt in the `Prompts` given to `Engine.generate`.
        completions: the G completions.
        policy_version: version of the weights that sampled them.
    """

    prompt_index: int
    completions: list[Completion]
    policy_version: int


def video_timing(times: Sequence[float]) -> dict[str, Any]:
    """What processors want to know of a video of which they get every frame that is to be used.

    Args:
        times: second of each frame, evenly spread.
    """
    step = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
    rate = 1 / step if step else 2.0
    frames = {"total_num_frames": len(times), "frames_indices": list(range(len(times))), "do_sample_frames": False}
    return {"fps": rate, "duration": len(times) / rate, "video_backend": "lightrl", **frames}


R = TypeVar("R", bound="_Rows")
T = TypeVar("T")


@dataclass
class _Rows:
    """Row selection and device moves shared by `Rollouts` and `Experience`: every (B, ...) tensor and B-long list."""

    token_ids: Tensor

    def __len__(self) -> int:
        return int(self.token_ids.shape[0])

    def _map(self: R, tensor_fn: Any, list_fn: Any) -> R:
        def one(value: Any) -> Any:
            if isinstance(value, Tensor) and value.ndim and value.shape[0] == len(self):
                return tensor_fn(value)
            if isinstance(value, list) and len(value) == len(self):
                return list_fn(value)
            if isinstance(value, dict):
                return {key: one(item) for key, item in value.items()}
            return value

        return replace(self, **{f.name: one(getattr(self, f.name)) for f in fields(self)})

    def select(self: R, rows: Tensor) -> R:
        """The rows with the given indices (int64, any order), as a record of the same kind."""
        picked = rows.tolist()
        return self._map(lambda x: x[rows.to(x.device)], lambda x: [x[i] for i in picked])

    def crop(self: R) -> R:
        """The same rows without the columns that are padding in all of them."""
        width = self.token_ids.shape[1]
        used = self.attention_mask.any(0).nonzero()  # type: ignore[attr-defined]
        length = int(used[-1]) + 1 if len(used) else 1
        if length == width:
            return self
        return self._map(lambda x: x[:, :length] if x.ndim == 2 and x.shape[1] == width else x, lambda x: x)

    def to(self: R, device: torch.device | str) -> R:
        """The same record with its tensors on `device`, but for `inputs`. Lightning calls this to move a batch."""
        return self._map(lambda x: x.to(device), lambda rows: rows)


@dataclass
class SupervisedBatch(_Rows):
    """Rows with completions to be learnt as they are, for the supervised loss beside reinforcement learning.

    Attributes:
        token_ids: (B, T) int64, right-padded. attention_mask: (B, T) bool, True on real tokens.
        response_mask: (B, T) bool, True on the tokens to learn.
        group_ids: (B,) int64, a group for each row.
        temperature: of the distribution that is trained: 1.
        normalizer: what summed losses are divided by: the tokens to learn in the whole optimizer batch, all ranks,
            divided by the number of ranks.
        inputs: B dictionaries of extra model inputs; empty for text.
    """

    attention_mask: Tensor
    response_mask: Tensor
    group_ids: Tensor
    temperature: float = 1.0
    normalizer: float = 1.0
    inputs: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Rollouts(_Rows):
    """B = P * G scored sequences: one Lightning batch. Rows of a group are neighbours.

    Attributes:
        token_ids: (B, T) int64, prompt then completion, right-padded with the pad token.
        attention_mask: (B, T) bool, True on real tokens.
        response_mask: (B, T) bool, True on tokens that the policy sampled.
        engine_logprobs: (B, T) float32, log-prob the engine reports for each sampled token, 0 elsewhere.
        group_ids: (B,) int64, equal for the completions of one prompt.
        rewards: (B,) float32, weighted sum of the reward functions; NaN where no function scored the row.
        reward_parts: name -> (B,) float32, each function's raw rewards; NaN for None.
        reward_weights: name -> weight of each function in `rewards`.
        truncated: (B,) bool, True where the completion was cut by `max_new_tokens`.
        policy_version: version of the weights that sampled the rows (the oldest, if they differ).
        temperature: of the sampling distribution.
        prompts: B strings. completions: B strings.
        raw_prompts: B prompts before the policy's chat template, for reward models with a template of their own.
        columns: data-set columns, name -> B values.
        inputs: B dictionaries of extra model inputs, `{}` for text; one object for the rows of a group. They stay on
            the host: the model ships those of a micro-batch when it runs it.
        media: B decoded media as in `Prompts`, one object for the rows of a group; empty where no prompt can have any.
        metrics: scalars measured while the rollout was made (seconds, tokens, counts), summed over nothing.
        filler: the rows repeat a prompt so that a rank without one takes part in an evaluation; they do not count.
        supervised: rows of a second stream for the supervised loss (`ptx_coef`); None without one.
    """

    attention_mask: Tensor
    response_mask: Tensor
    engine_logprobs: Tensor
    group_ids: Tensor
    rewards: Tensor
    reward_parts: dict[str, Tensor]
    truncated: Tensor
    policy_version: int
    temperature: float = 1.0
    prompts: list[str] = field(default_factory=list)
    raw_prompts: list[Any] = field(default_factory=list)
    completions: list[str] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    inputs: list[dict[str, Any]] = field(default_factory=list)
    media: list[Media] = field(default_factory=list)
    reward_weights: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    filler: bool = False
    supervised: SupervisedBatch | None = None

    def to(self, device: torch.device | str) -> Rollouts:
        """The same record with its tensors on `device`, those of `supervised` too."""
        moved = super().to(device)
        return moved if self.supervised is None else replace(moved, supervised=self.supervised.to(device))


@dataclass
class Experience(_Rows):
    """What the losses need: rollouts with log-probs, values and advantages. All (B, T) float32 unless said.

    Attributes:
        token_ids, attention_mask, response_mask, group_ids, temperature, inputs: as in `Rollouts`.
        old_logprobs: log-probs under the policy that starts the update; None when there is exactly one update per
            rollout, where they equal the current ones and are not computed twice.
        ref_logprobs: log-probs under the reference; None without one.
        engine_logprobs: as in `Rollouts`.
        advantages: 0 off the mask.
        values: critic's values at the start of the update; None without critic.
        returns: targets for the critic; None without critic.
        rewards: (B,) sequence rewards after shaping; valid: (B,) bool, False where no reward function scored.
        normalizer: what summed policy losses of a micro-batch are divided by: the aggregation's count over the whole
            optimizer batch, all micro-batches and ranks, divided by the number of ranks (which average gradients).
        token_normalizer: the same for losses that are means over tokens (the critic's).
        metrics: scalars of the making, already reduced over ranks.
        entropy: entropies of the policy that starts the update; None where nothing uses them.
        supervised: this mini-batch's share of `Rollouts.supervised`.
    """

    attention_mask: Tensor
    response_mask: Tensor
    group_ids: Tensor
    engine_logprobs: Tensor
    advantages: Tensor
    rewards: Tensor
    valid: Tensor
    temperature: float = 1.0
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    normalizer: float = 1.0
    token_normalizer: float = 1.0
    inputs: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    entropy: Tensor | None = None
    supervised: SupervisedBatch | None = None


def realized(value: T) -> T:
    """The object that a lazy default of a constructor stands for; any other object as it is.

    Signatures show defaults such as `lazy_instance(GAE)` so that the command line can print them. A stand-in sets
    itself up when its first method is called, so attributes read before that would be missing.
    """
    if not hasattr(value, "lazy_get_init_args"):
        return value
    return type(value).__mro__[2](**value.lazy_get_init_args().as_dict())  # type: ignore[no-any-return]


def run_seed() -> int:
    """What `seed_everything` was given; 0 where it was not called."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))


def pad_rows(rows: Sequence[Sequence[float]], value: float, dtype: torch.dtype, length: int | None = None) -> Tensor:
    """Right-pads rows of unequal length to a (B, T) tensor.

    Args:
        rows: B sequences of numbers.
        value: what to fill with.
        dtype: of the result.
        length: T; the longest row where None.
    """
    length = max((len(row) for row in rows), default=0) if length is None else length
    out = torch.full((len(rows), length), value, dtype=dtype)
    for i, row in enumerate(rows):
        if len(row):
            out[i, : len(row)] = torch.as_tensor(row, dtype=dtype)
    return out
