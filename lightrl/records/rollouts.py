"""Trajectories as they are collected, and the scored batch that one training step gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightrl.records.sampling import Media, Routes, StopReason, Support


@dataclass
class TrajectoryRow:
    """One training row of a trajectory. n tokens.

    Attributes:
        token_ids: n token ids: context and sampled tokens in the order in which the engine saw them.
        turn_ids: n integers, the number of the sampled turn that a token is trained as; -1 for context.
        logprobs: n floats, what the engine reported for sampled tokens; 0 for context.
        policy_versions: n integers, of the weights that sampled a token; -1 for context.
        support: n entries, what each token was drawn from; None where nothing was cut, or it was not recorded.
        routes: of the tokens that the engine computed, context too, each as when it was first computed; at most n.
        inputs: extra model inputs; None takes the prompt's. media: the same of decoded media.
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
    """One attempt at a prompt.

    Attributes:
        rows: its training rows, in order; at least one.
        completion: text of what was sampled (of the last turn, where there are several), for reward functions.
        stop_reason: why it ended.
        messages: the whole conversation, for reward functions and logs; empty where there is none beyond the prompt.
        turn_rewards: reward of each turn, by turn number; empty without an environment that gives any.
        states: key of the state in which each turn began, by turn number: equal for equal states of a group.
        failure: what failed, where `stop_reason` is "failure": the trajectory is then in no loss and no baseline.
        metrics: numbers of its making (turns, tool calls, seconds).
        raised_at: the lines of the user's code that raised it, after a line break; "" where none did.
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
        """Whether something failed that the policy did not cause."""
        return self.stop_reason == "failure"

    @property
    def sampled_ids(self) -> list[int]:
        """What the policy sampled, all turns and rows one after another."""
        return [t for row in self.rows for t, turn in zip(row.token_ids, row.turn_ids, strict=True) if turn >= 0]


@dataclass
class Scores:
    """The rewards of n rows.

    Attributes:
        total: n floats, the weighted sums; NaN where no function scored the row.
        parts: function's name -> n floats, unweighted; NaN where it said None, failed or was not asked.
        metrics: scalars, each a mean over the rows or calls: `reward/<function>/failed` is the fraction of the rows
            that the function was asked for and failed on, the others are what the functions logged.
        extra: `<function>/<column>` -> n values that the function logged, None where it was not asked.
    """

    total: list[float]
    parts: dict[str, list[float]]
    metrics: dict[str, float] = field(default_factory=dict)
    extra: dict[str, list[Any]] = field(default_factory=dict)

    def spread(self, rows: Sequence[int], count: int) -> Scores:
        """The same as of `count` rows, of which these are the given ones, in order; all others were not scored."""
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
        """The rows of several submissions, one after another; metrics are means over the pieces that have them."""
        names = pieces[0].parts if pieces else {}
        columns = {name: None for piece in pieces for name in piece.extra}  # a dict keeps the order
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


HOST_NAMES = ("token_ids", "attention_mask", "response_mask", "group_ids")


@dataclass
class HostRows:
    """What the layout of some rows is planned from, in host memory. No tuple: FSDP2 moves the tensors of those.

    Attributes:
        token_ids, attention_mask: as in `Rollouts`.
        response_mask: as in `Rollouts`; None where each row's last token is read.
        group_ids: as in `Rollouts`; None where rows share nothing.
    """

    token_ids: Tensor
    attention_mask: Tensor
    response_mask: Tensor | None
    group_ids: Tensor | None


R = TypeVar("R", bound="RowBatch")


def per_token(**settings: Any) -> Any:
    """Declares a field of a `RowBatch` that has an entry per token: (B, T, ...) tensors, or a dictionary of them."""
    return field(metadata={"per": "token"}, **settings)


def per_batch(**settings: Any) -> Any:
    """Declares a field of a `RowBatch` that has one value for the whole batch, as fields without declaration do."""
    return field(metadata={"per": "batch"}, **settings)


def per_row(**settings: Any) -> Any:
    """Declares a field of a `RowBatch` that has an entry per row: (B, ...) tensors, lists of B, or dictionaries.

    An empty list stands for "unknown" and stays empty.
    """
    return field(metadata={"per": "row"}, **settings)


@dataclass
class RowBatch:
    """B rows of tokens. Selecting, cropping, and moving rows follow what the fields declare.

    A field is declared `per_token`, `per_row`, or, with neither, one value for the whole batch. Subclasses declare
    their own fields in the same way.
    """

    token_ids: Tensor = per_token()
    host: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict, kw_only=True, repr=False, compare=False)

    def __len__(self) -> int:
        return int(self.token_ids.shape[0])

    def on_host(self, name: str) -> Tensor:
        """A tensor of the record in host memory.

        Of a tensor on a device there is a copy that went along with `to`, `select` and `crop`, so that planning a
        micro-batch does not wait for the device; one that was replaced since is read, once.
        """
        value: Tensor = getattr(self, name)
        if value.device.type == "cpu":
            return value
        source, copy = self.host.get(name, (None, value))
        if source is not value:
            copy = value.cpu()
            self.host[name] = value, copy
        return copy

    def host_rows(self) -> HostRows:
        """What layouts are planned from, in host memory."""
        return HostRows(*(self.on_host(name) for name in HOST_NAMES))

    def with_host_of(self: R, other: RowBatch) -> R:
        """The same record with the other's copies of tensors that they have in common."""
        copies = other.host_copies().items()
        return self.with_host({n: copy for n, copy in copies if getattr(self, n, None) is getattr(other, n)})

    def with_host(self: R, host: dict[str, Tensor]) -> R:
        """The same record with these copies of its tensors."""
        pairs = {name: (getattr(self, name), copy) for name, copy in host.items()}
        return replace(self, host=pairs)

    def host_copies(self) -> dict[str, Tensor]:
        """The copies whose tensors are still the record's."""
        return {name: copy for name, (source, copy) in self.host.items() if getattr(self, name) is source}

    def _mapped(self: R, change: Callable[[Any], Any], *kinds: str) -> R:
        """The same record with `change` applied to each tensor and non-empty list of the fields of these kinds."""

        def one(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: one(item) for key, item in value.items()}
            return change(value) if isinstance(value, Tensor) or (isinstance(value, list) and value) else value

        names = [f.name for f in fields(self) if f.metadata.get("per") in kinds]
        return replace(self, **{name: one(getattr(self, name)) for name in names})

    def select(self: R, rows: Tensor) -> R:
        """The rows with the given indices (int64, any order), as a record of the same kind."""
        rows = rows.cpu()
        picked = rows.tolist()
        own = rows.to(self.token_ids.device)

        def chosen(x: Any) -> Any:
            return [x[i] for i in picked] if isinstance(x, list) else x[own if x.device == own.device else rows]

        copies = {name: copy[rows] for name, copy in self.host_copies().items()}
        return self._mapped(chosen, "row", "token").with_host(copies)

    def crop(self: R) -> R:
        """The same rows without the columns that are padding in all of them."""
        width = self.token_ids.shape[1]
        used = self.on_host("attention_mask").any(0).nonzero()
        length = int(used[-1]) + 1 if len(used) else 1
        if length == width:
            return self
        copies = {name: x[:, :length] if x.ndim > 1 else x for name, x in self.host_copies().items()}
        return self._mapped(lambda x: x[:, :length], "token").with_host(copies)

    def to(self: R, device: torch.device | str) -> R:
        """The same record with its tensors on `device`, but for `inputs`. Lightning calls this to move a batch."""
        names = [name for name in (*HOST_NAMES, "trajectory_ids") if hasattr(self, name)]
        host = {name: self.on_host(name) for name in names}
        moved = self._mapped(lambda x: x.to(device) if isinstance(x, Tensor) else x, "row", "token")
        return moved if moved.token_ids.device.type == "cpu" else moved.with_host(host)


@dataclass
class SupervisedBatch(RowBatch):
    """Rows with completions to be learnt as they are, for the supervised loss beside reinforcement learning.

    Attributes:
        token_ids: (B, T) int64, right-padded. attention_mask: (B, T) bool, True on real tokens.
        response_mask: (B, T) bool, True on the tokens to learn.
        group_ids: (B,) int64, a group for each row.
        temperature: of the distribution that is trained: 1.
        inputs: B dictionaries of extra model inputs; empty for text.
        supports, routes: empty: nothing is cut from what is learnt as it is, and no engine has computed it.
    """

    attention_mask: Tensor = per_token()
    response_mask: Tensor = per_token()
    group_ids: Tensor = per_row()
    temperature: float = 1.0
    inputs: list[dict[str, Any]] = per_row(default_factory=list)
    supports: list[Support | None] = per_row(default_factory=list)
    routes: list[Routes | None] = per_row(default_factory=list)


@dataclass
class Rollouts(RowBatch):
    """B scored rows: one Lightning batch. Rows of a group are neighbours, and among them those of a trajectory.

    Attributes:
        token_ids: (B, T) int64, prompt then completion, right-padded with the pad token.
        attention_mask: (B, T) bool, True on real tokens.
        response_mask: (B, T) bool, True on tokens that the policy sampled and that are trained.
        engine_logprobs: (B, T) float32, log-prob the engine reports for each sampled token, 0 elsewhere.
        group_ids: (B,) int64, equal for the completions of one prompt.
        rewards: (B,) float32, weighted sum of the reward functions plus the trajectory's turn rewards, the same in all
            rows of a trajectory; NaN where no function scored it or it failed: it is then in no loss and no baseline.
        reward_parts: name -> (B,) float32, each function's raw rewards; NaN for None.
        reward_weights: name -> weight of each function in `rewards`.
        truncated: (B,) bool, True where a limit cut the trajectory (`stop_reasons` other than "stop").
        policy_version: version of the weights that sampled the rows (the oldest, if they differ).
        trajectory_ids: (B,) int64, equal for the rows of one trajectory, different between groups; each row's own
            number where not given.
        turn_ids: (B, T) int64, number of the sampled turn a token belongs to within its trajectory, -1 off the
            response mask; None where every trajectory is one turn.
        turn_rewards: name -> (B, T) float32, a turn's reward on its last token, 0 elsewhere; empty without any.
        policy_versions: (B, T) int64 of each sampled token, -1 elsewhere; None where all are `policy_version`.
        stop_reasons: B words (`StopReason`); empty where unknown.
        messages: B conversations, the whole of each trajectory; empty where there is none beyond the prompt.
        states: B lists with the key of the state in which each turn of the trajectory began; empty without environment.
        temperature: of the sampling distribution.
        supports: B times what a row's tokens were drawn from, None for a row without a cut; empty where unknown. They
            stay on the host: the model ships those of the tokens that it scores.
        routes: B times which experts a row's tokens were sent to, None for a row without; in the same way.
        prompts: B strings. completions: B strings.
        answers: B strings that completions vote for in `eval/maj@n`; empty outside of evaluations.
        raw_prompts: B prompts before the policy's chat template, for reward models with a template of their own.
        columns: data-set columns, name -> B values.
        inputs: B dictionaries of extra model inputs, `{}` for text; one object for the rows of a group. They stay on
            the host: the model ships those of a micro-batch when it runs it.
        media: B decoded media as in `Prompts`, one object for the rows of a group; empty where no prompt can have any.
        metrics: scalars measured while the rollout was made (seconds, tokens, counts), summed over nothing.
        filler: the rows repeat a prompt so that a rank without one takes part in an evaluation; they do not count.
        eval_set: name of the evaluation prompts that it comes from, where there are several sets.
        supervised: rows of a second stream for the supervised loss (`ptx_coef`); None without one.
    """

    attention_mask: Tensor = per_token()
    response_mask: Tensor = per_token()
    engine_logprobs: Tensor = per_token()
    group_ids: Tensor = per_row()
    rewards: Tensor = per_row()
    reward_parts: dict[str, Tensor] = per_row()
    truncated: Tensor = per_row()
    policy_version: int = per_batch()
    trajectory_ids: Tensor = per_row(default=None)  # filled in below
    turn_ids: Tensor | None = per_token(default=None)
    turn_rewards: dict[str, Tensor] = per_token(default_factory=dict)
    policy_versions: Tensor | None = per_token(default=None)
    stop_reasons: list[str] = per_row(default_factory=list)
    messages: list[Any] = per_row(default_factory=list)
    states: list[list[str]] = per_row(default_factory=list)
    temperature: float = 1.0
    supports: list[Support | None] = per_row(default_factory=list)
    routes: list[Routes | None] = per_row(default_factory=list)
    prompts: list[str] = per_row(default_factory=list)
    raw_prompts: list[Any] = per_row(default_factory=list)
    completions: list[str] = per_row(default_factory=list)
    answers: list[str] = per_row(default_factory=list)
    columns: dict[str, list[Any]] = per_row(default_factory=dict)
    inputs: list[dict[str, Any]] = per_row(default_factory=list)
    media: list[Media] = per_row(default_factory=list)
    reward_weights: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    filler: bool = False
    eval_set: str = ""
    supervised: SupervisedBatch | None = None

    def __post_init__(self) -> None:
        if self.trajectory_ids is None:
            self.trajectory_ids = torch.arange(len(self), device=self.token_ids.device)

    @property
    def failed(self) -> list[bool]:
        """B times whether the row's trajectory failed for a cause that is not the policy's."""
        return [reason == "failure" for reason in self.stop_reasons] or [False] * len(self)

    def to(self, device: torch.device | str) -> Rollouts:
        """The same record with its tensors on `device`, those of `supervised` too."""
        moved = super().to(device)
        return moved if self.supervised is None else replace(moved, supervised=self.supervised.to(device))
