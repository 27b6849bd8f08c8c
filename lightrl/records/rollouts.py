"""Trajectories, the scored batch of one training step, and its experience: what losses and updates read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from lightrl.records.sampling import Media, StopReason

if TYPE_CHECKING:
    from lightrl.records.conditions import Routes, Support


def pad_rows(rows: Sequence[Sequence[float]], value: float, dtype: torch.dtype) -> Tensor:
    """Right-pads B sequences of unequal length with `value` to a (B, T) tensor, where T is the longest length."""
    lengths = torch.tensor([len(row) for row in rows])
    real = torch.arange(max(map(len, rows), default=0)) < lengths[:, None]
    out = torch.full(real.shape, value, dtype=dtype)
    out[real] = torch.tensor(list(chain.from_iterable(rows)), dtype=dtype)
    return out


@dataclass
class TrajectoryRow:
    """One training row of a trajectory, with n tokens.

    Attributes:
        token_ids: n token IDs: context and sampled tokens in the order seen by the engine.
        turn_ids: n turn numbers of sampled tokens, -1 for context.
        logprobs: n log-probs of sampled tokens reported by the engine, 0 for context.
        policy_versions: n weight versions that sampled the tokens, -1 for context.
        support: Tokens that each token was drawn from (n entries). None if nothing was cut, or it was not recorded.
        routes: Experts of the tokens that the engine computed, including context, as first computed. At most n.
        inputs: Additional model inputs. Defaults to the prompt's.
        media: Decoded media. Defaults to the prompt's.
    """

    token_ids: list[int]
    turn_ids: list[int]
    logprobs: list[float]
    policy_versions: list[int]
    support: Support | None = None
    routes: Routes | None = None
    inputs: dict[str, Any] | None = None
    media: Media | None = None


@dataclass
class Trajectory:
    """One trajectory for a prompt.

    Attributes:
        rows: Training rows in order, at least one.
        completion: Sampled text of the last turn, for reward functions.
        stop_reason: Why the trajectory ended.
        messages: Whole conversation, for reward functions and logs. Empty if it has only the prompt.
        turn_rewards: Reward of each turn. Empty unless an environment gives any.
        states: Key of the state in which each turn began. Equal for equal states of a group.
        failure: What failed, if `stop_reason` is "failure". The trajectory is then excluded from losses and baselines.
        metrics: Numbers measured while running it (turns, tool calls, seconds).
        raised_at: Lines of user code that raised the failure, after a line break. Empty if none did.
    """

    rows: list[TrajectoryRow]
    completion: str
    stop_reason: StopReason = "stop"
    messages: list[dict[str, Any]] = field(default_factory=list)
    turn_rewards: list[float] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    failure: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    raised_at: str = ""

    @property
    def failed(self) -> bool:
        """Whether the trajectory failed for a reason that the policy did not cause."""
        return self.stop_reason == "failure"

    @property
    def sampled_ids(self) -> list[int]:
        """Sampled token IDs of all turns and rows, concatenated."""
        return [t for row in self.rows for t, turn in zip(row.token_ids, row.turn_ids, strict=True) if turn >= 0]


@dataclass
class Scores:
    """Rewards of n completions.

    Attributes:
        total: n weighted sums. NaN if no function scored the completion.
        parts: n unweighted rewards by function. NaN if the function returned None, failed, or was not called.
        metrics: Scalar means over completions or calls. `reward/<function>/failed` is the fraction of calls that
            failed. Others are values that functions logged.
        extra: n logged values by `<function>/<column>`. None if the function was not called.
    """

    total: list[float]
    parts: dict[str, list[float]]
    metrics: dict[str, float] = field(default_factory=dict)
    extra: dict[str, list[Any]] = field(default_factory=dict)

    def spread(self, rows: Sequence[int], count: int) -> Scores:
        """Expands to `count` completions, of which these are `rows`, in order; all others are unscored."""
        if len(rows) == count:
            return self

        def among(values: list[Any], empty: Any) -> list[Any]:
            of_row = dict(zip(rows, values, strict=True))
            return [of_row.get(row, empty) for row in range(count)]

        nan = float("nan")
        return Scores(
            total=among(self.total, nan),
            parts={name: among(part, nan) for name, part in self.parts.items()},
            metrics=self.metrics,
            extra={name: among(column, None) for name, column in self.extra.items()},
        )

    @staticmethod
    def concat(pieces: Sequence[Scores]) -> Scores:
        """Concatenates several scores. Metrics are means over the pieces that have them."""
        names = pieces[0].parts if pieces else {}
        columns = {name: None for piece in pieces for name in piece.extra}  # a dict preserves order
        metrics: dict[str, list[float]] = {}
        for piece in pieces:
            for name, value in piece.metrics.items():
                metrics.setdefault(name, []).append(value)
        return Scores(
            total=[value for piece in pieces for value in piece.total],
            parts={name: [value for piece in pieces for value in piece.parts[name]] for name in names},
            metrics={name: sum(values) / len(values) for name, values in metrics.items()},
            extra={name: [v for p in pieces for v in p.extra.get(name, [None] * len(p.total))] for name in columns},
        )


HOST_NAMES = ("token_ids", "attention_mask", "response_mask", "group_ids", "trajectory_ids")

R = TypeVar("R", bound="RowBatch")


def per_token(**settings: Any) -> Any:
    """Declares a `RowBatch` field with one entry per token: (B, T, ...) tensors, or a dictionary of them."""
    return field(metadata={"per": "token"}, **settings)


def per_row(**settings: Any) -> Any:
    """Declares a `RowBatch` field with one entry per row: (B, ...) tensors, lists of B, or dictionaries of them.

    An empty list means "unknown" and stays empty.
    """
    return field(metadata={"per": "row"}, **settings)


@dataclass(kw_only=True)
class RowBatch:
    """B rows of tokens, as models read them. Supervised examples are rows without other fields.

    Field declarations determine how rows are selected, cropped, and moved. Declare fields of subclasses with
    `per_token`, `per_row`, or neither for one value per batch.

    Attributes:
        token_ids: (B, T) int64 prompt and completion, right-padded with the pad token.
        attention_mask: (B, T) bool, True on real tokens.
        response_mask: (B, T) bool, True on trained tokens.
        group_ids: (B,) int64, equal for the completions of one prompt. None if rows share no prefix.
        temperature: Temperature of the sampling distribution.
        inputs: B dictionaries of additional model inputs, `{}` for text. Rows of a group share one object. They stay on
            the host until the model runs their micro-batch.
        supports: B supports, the tokens that a row's tokens were drawn from. None for rows without a cut. Empty if
            unknown. They stay on the host until the model scores the tokens.
        routes: B routes, the experts of a row's tokens. None for rows without. Empty if unknown. They stay on the host.
        host: Copies of tensors in host memory, see `on_host`.
    """

    token_ids: Tensor = per_token()
    attention_mask: Tensor = per_token()
    response_mask: Tensor = per_token()
    group_ids: Tensor | None = per_row(default=None)
    temperature: float = 1.0
    inputs: list[dict[str, Any]] = per_row(default_factory=list)
    supports: list[Support | None] = per_row(default_factory=list)
    routes: list[Routes | None] = per_row(default_factory=list)
    host: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return int(self.token_ids.shape[0])

    def on_host(self, name: str) -> Any:
        """Returns a tensor of the record in host memory; None for a field without one.

        `to`, `select`, and `crop` keep host copies of device tensors, so planning a micro-batch doesn't wait for the
        device. A tensor that was replaced later is copied once.
        """
        value = getattr(self, name)
        source, copy = self.host.get(name, (None, None))
        if source is value:
            return copy
        if value.device.type == "cpu":
            return value
        copy = value.cpu()
        self.host[name] = value, copy
        return copy

    def _mapped(self: R, change: Callable[[Any], Any], *kinds: str) -> R:
        """Applies `change` to each tensor and non-empty list of fields of these kinds, and to their host copies."""

        def one(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: one(item) for key, item in value.items()}
            return change(value) if isinstance(value, Tensor) or (isinstance(value, list) and value) else value

        names = [f.name for f in fields(self) if f.metadata.get("per") in kinds]
        changed = replace(self, **{name: one(getattr(self, name)) for name in names})
        current = {name: copy for name, (source, copy) in self.host.items() if getattr(self, name) is source}
        copies = {name: change(copy) if name in names else copy for name, copy in current.items()}
        changed.host = {name: (getattr(changed, name), copy) for name, copy in copies.items()}
        return changed

    def select(self: R, rows: Tensor) -> R:
        """Selects rows by index (int64, any order)."""
        rows = rows.cpu()
        picked = rows.tolist()
        own = rows.to(self.token_ids.device)

        def chosen(x: Any) -> Any:
            return [x[i] for i in picked] if isinstance(x, list) else x[own if x.device == own.device else rows]

        return self._mapped(chosen, "row", "token")

    def crop(self: R) -> R:
        """Removes columns that are padding in all rows."""
        used = self.on_host("attention_mask").any(0).nonzero()
        length = int(used[-1]) + 1 if len(used) else 1
        return self if length == self.token_ids.shape[1] else self._mapped(lambda x: x[:, :length], "token")

    def to(self: R, device: torch.device | str) -> R:
        """Moves all tensors except `inputs` to `device`. Lightning calls this to move a batch."""
        copies = {name: self.on_host(name) for name in HOST_NAMES if getattr(self, name, None) is not None}
        moved = self._mapped(lambda x: x.to(device) if isinstance(x, Tensor) else x, "row", "token")
        if moved.token_ids.device.type != "cpu":
            moved.host = {name: (getattr(moved, name), copy) for name, copy in copies.items()}
        return moved


@dataclass(kw_only=True)
class Rollouts(RowBatch):
    """B scored rows: one Lightning batch. Rows of a group are adjacent, and so are rows of a trajectory.

    Adds these attributes to `RowBatch`.

    Attributes:
        engine_logprobs: (B, T) float32 log-probs that the engine reports for sampled tokens, 0 elsewhere.
        rewards: (B,) float32 weighted sum of the reward functions plus turn rewards, equal for all rows of a
            trajectory. NaN if it is unscored or failed, which excludes it from losses and baselines.
        reward_parts: (B,) float32 raw rewards by function, NaN for None.
        reward_weights: Weights of functions in `rewards`, by function.
        truncated: (B,) bool, True if a limit truncated the trajectory (`stop_reasons` other than "stop").
        policy_version: Version of the weights that sampled the rows (the oldest if they differ).
        trajectory_ids: (B,) int64, equal for rows of one trajectory, different between groups. Defaults to a separate
            trajectory per row.
        turn_ids: (B, T) int64 turn of each token within its trajectory, -1 outside the response mask. None if every
            trajectory is one turn.
        turn_rewards: (B, T) float32 rewards by name, each on its turn's last token, 0 elsewhere. Empty without any.
        policy_versions: (B, T) int64 version per sampled token, -1 elsewhere. None if all equal `policy_version`.
        stop_reasons: B stop reasons (`StopReason`). Empty if unknown.
        messages: B whole conversations. Empty if there are only prompts.
        states: B lists of keys of the states in which turns began. Empty without an environment.
        prompts: B prompts as text.
        completions: B completions as text.
        answers: B answers that are compared in `eval/maj@n`. Empty outside evaluations.
        raw_prompts: B prompts before the policy's chat template, for reward models with a different template.
        columns: Dataset columns, B values by name.
        media: B decoded media as in `Prompts`. Rows of a group share one object. Empty if prompts can't have media.
        metrics: Scalars measured while collecting the rollout (seconds, tokens, counts), on this rank.
        filler: Whether the rows repeat a prompt so that an idle rank participates in an evaluation. They don't count.
        eval_set: Name of the set of evaluation prompts, if there are several.
        supervised: Examples of the supervised loss (`ptx_coef`). None without one.
    """

    engine_logprobs: Tensor = per_token()
    group_ids: Tensor = per_row()
    rewards: Tensor = per_row()
    reward_parts: dict[str, Tensor] = per_row()
    truncated: Tensor = per_row()
    policy_version: int
    trajectory_ids: Tensor = per_row(default=None)  # filled in below
    turn_ids: Tensor | None = per_token(default=None)
    turn_rewards: dict[str, Tensor] = per_token(default_factory=dict)
    policy_versions: Tensor | None = per_token(default=None)
    stop_reasons: list[str] = per_row(default_factory=list)
    messages: list[Any] = per_row(default_factory=list)
    states: list[list[str]] = per_row(default_factory=list)
    prompts: list[str] = per_row(default_factory=list)
    raw_prompts: list[Any] = per_row(default_factory=list)
    completions: list[str] = per_row(default_factory=list)
    answers: list[str] = per_row(default_factory=list)
    columns: dict[str, list[Any]] = per_row(default_factory=dict)
    media: list[Media] = per_row(default_factory=list)
    reward_weights: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    filler: bool = False
    eval_set: str = ""
    supervised: RowBatch | None = None

    def __post_init__(self) -> None:
        if self.trajectory_ids is None:
            self.trajectory_ids = torch.arange(len(self), device=self.token_ids.device)

    @property
    def failed(self) -> list[bool]:
        """B flags, True if the row's trajectory failed for a reason that the policy did not cause."""
        return [reason == "failure" for reason in self.stop_reasons] or [False] * len(self)

    def to(self, device: torch.device | str) -> Rollouts:
        """Moves all tensors, including `supervised`, to `device`."""
        moved = super().to(device)
        return moved if self.supervised is None else replace(moved, supervised=self.supervised.to(device))


@dataclass
class ModelOutputs:
    """Outputs of the module's models on a rollout, before its updates. All (B, T) float32, 0 outside the mask.

    Attributes:
        old_logprobs: Log-probs of the policy that starts the updates. None if exactly one update follows, whose own
            log-probs are the old ones.
        ref_logprobs: Log-probs of the reference. None without one.
        values: Values of the critic. None without a critic.
        entropy: Entropy of the policy that starts the updates. None if unused.
        token_extras: Additional (B, T, ...) tensors by name, which follow their rows into micro-batches.
        row_extras: Additional (B, ...) tensors or lists of B by name, which follow their rows into micro-batches.
    """

    old_logprobs: Tensor | None = per_token(default=None)
    ref_logprobs: Tensor | None = per_token(default=None)
    values: Tensor | None = per_token(default=None)
    entropy: Tensor | None = per_token(default=None)
    token_extras: dict[str, Tensor] = per_token(default_factory=dict)
    row_extras: dict[str, Any] = per_row(default_factory=dict)


@dataclass
class Advantages:
    """Result of `compute_advantages`.

    Attributes:
        advantages: (B, T) float32, 0 outside the response mask, before whitening and clipping.
        returns: (B, T) float32 targets for the critic. None without one.
        rewards: (B,) float32 sequence rewards after shaping, 0 on rows that are not `valid`.
        valid: (B,) bool, False on rows without a reward, which are excluded from all losses.
    """

    advantages: Tensor = per_token()
    returns: Tensor | None = per_token()
    rewards: Tensor = per_row()
    valid: Tensor = per_row()


@dataclass(kw_only=True)
class Experience(RowBatch, ModelOutputs, Advantages):
    """Rollouts with log-probs, values, and advantages: everything that an update reads.

    Adds these attributes to `RowBatch`, `ModelOutputs`, and `Advantages`, whose `advantages` are now whitened
    and clipped. Log-probs and entropies cover the tokens in `supports`. The response mask excludes rows without a
    reward and, if the module masks them, truncated rows.

    Attributes:
        trajectory_ids, turn_ids, engine_logprobs: As in `Rollouts`.
        in_policy_loss: (B, T) bool, True on tokens whose policy loss has a gradient. None for all masked tokens. Other
            tokens still count in the normalizer, the KL penalty, the entropy bonus, and the critic's loss.
        is_stale: Whether the rows were sampled by older weights than those that start the updates.
        supervised: Examples of the supervised loss (`ptx_coef`). None without one.
        metrics: Scalars measured while creating the experience, reduced over ranks.
    """

    group_ids: Tensor = per_row()
    trajectory_ids: Tensor = per_row()
    engine_logprobs: Tensor = per_token()
    returns: Tensor | None = per_token(default=None)
    in_policy_loss: Tensor | None = per_token(default=None)
    is_stale: bool = False
    turn_ids: Tensor | None = per_token(default=None)
    supervised: RowBatch | None = None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class MicroBatch:
    """Sequences of one forward/backward pass, with weights that make micro-batch losses sum to the mini-batch loss.

    Attributes:
        rows: b sequences, cropped to their longest.
        policy_weights: (b, T) float32 weights of the policy loss: the aggregation's, divided by its count over
            the whole mini-batch on all ranks. None for supervised examples.
        token_weight: Weight of each token in token-mean losses: 1 / tokens of the whole mini-batch.
    """

    rows: Any  # Experience, or RowBatch of supervised examples
    policy_weights: Tensor | None
    token_weight: float

    def total(self, losses: Mapping[str, Tensor]) -> Tensor:
        """Computes the scalar loss: `policy` weighted by the aggregation, every other loss as a mean over tokens.

        Takes (b, T) token losses by name. Values outside the response mask are ignored. Raises a ValueError if a loss
        is not per token: a mean inside `compute_loss` would grow with the number of micro-batches.
        """
        mask = self.rows.response_mask
        total = torch.zeros((), device=mask.device)
        for name, loss in losses.items():
            if not isinstance(loss, Tensor) or loss.shape != mask.shape:
                found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
                raise ValueError(
                    f"compute_loss: the loss {name!r} has {found}, but tokens have shape {tuple(mask.shape)}. Return "
                    "one loss per token; LightRL averages them over the whole mini-batch."
                )
            on_mask = torch.where(mask, loss, torch.zeros_like(loss))
            weighs_tokens = name != "policy" or self.policy_weights is None
            weights: Any = self.token_weight if weighs_tokens else self.policy_weights
            total = total + (weights * on_mask).sum()
        return total
