"""On-policy distillation: the policy samples, and teachers score what it sampled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer

from lightrl.algorithms.batches import batched_forward, policy_forward
from lightrl.algorithms.variants import CriticFreeLightningModule
from lightrl.distributed import strategies
from lightrl.distributed.metrics import MetricSums
from lightrl.distributed.reduction import Reduction
from lightrl.models.loading import load_causal_lm, require_model_folder
from lightrl.models.policy import PolicyModel
from lightrl.models.spec import ModelSpec
from lightrl.objectives.advantages import AdvantageEstimator, Reinforce, fraction, positive
from lightrl.objectives.kl import KLPenalty
from lightrl.objectives.trajectories import TrajectoryLayout
from lightrl.ops.advantages import returns_to_go
from lightrl.types import Experience, Rollouts

__all__ = ["DistillLightningModule"]


class DistillLightningModule(CriticFreeLightningModule):
    """Distils teachers into the policy on the policy's own samples, beside a reward or instead of one.

        A_t = [advantage of the rewards] + coef * D_t,    D_t = d_t + gamma * D_{t+1}
        d_t = log pi_teacher(y_t | y_<t) - log pi(y_t | y_<t),    the sampled reverse KL with the sign turned

    With gamma 0 each token answers for its own d_t: the gradient is that of the sum over sampled prefixes of
    KL(pi || pi_teacher) at the next token, prefixes held fixed. With gamma 1 it is the gradient of the KL of whole
    responses. The minimiser of both is the teacher; with a reward r too (`advantage` a Reinforce, or RLOO or
    GroupRelative(scale="none")) and gamma 1 it is `pi ~ pi_teacher * exp(r / coef)`.

    Teachers are frozen; they score the very tokens that were sampled, at the sampling temperature and over the tokens
    that top-p, top-k and min-p left. Metric: `kl/teacher`, the mean of -d_t.

    Args:
        teachers: name -> model: a folder or hub name, or a `ModelSpec`. Their tokenizers must give every token the
            policy's id.
        teacher_column: column of the data set that names each row's teacher; needed where there are several.
        advantage: estimator for the data module's rewards; None leaves rewards to the logs, and every trajectory that
            did not fail is trained.
        coef: weight of D_t, above 0.
        gamma: discount of later tokens' d_t, in [0, 1].
        kl: further penalty against a reference; None for none.
        kwargs: the other arguments of `PPOLightningModule`, but for `critic`.

    Raises:
        ValueError: an argument is out of range; before models are loaded, a teacher with another vocabulary; on a
            rollout, a row that names no teacher.

    Source: https://arxiv.org/abs/2306.13649 (on-policy distillation), https://arxiv.org/abs/2306.08543 (reverse KL by
        policy gradient), https://thinkingmachines.ai/blog/on-policy-distillation (per-token advantage, gamma 0).
    """

    default_group_size = 1
    teachers: nn.ModuleDict

    def __init__(
        self,
        actor: str | ModelSpec,
        teachers: dict[str, str | ModelSpec],
        teacher_column: str | None = None,
        *,
        advantage: AdvantageEstimator | None = None,
        coef: float = 1.0,
        gamma: float = 0.0,
        kl: KLPenalty | None = None,
        **kwargs: Any,
    ) -> None:
        if not teachers:
            raise ValueError("teachers={}: DistillLightningModule needs at least one, name -> model.")
        if len(teachers) > 1 and teacher_column is None:
            raise ValueError(
                f"teachers={sorted(teachers)} with teacher_column=None: name the column that says which teacher a row "
                "belongs to."
            )
        self.learns_rewards = advantage is not None
        super().__init__(actor, advantage=Reinforce() if advantage is None else advantage, kl=kl, **kwargs)
        self.teacher_specs = {name: ModelSpec(s) if isinstance(s, str) else s for name, s in teachers.items()}
        self.teacher_column = teacher_column
        self.distill_coef = positive("DistillLightningModule", "coef", coef)
        self.distill_gamma = fraction("DistillLightningModule", "gamma", gamma)

    def setup(self, stage: str) -> None:
        """See `PPOLightningModule.setup`; refuses teachers that read other tokens."""
        super().setup(stage)
        own = AutoTokenizer.from_pretrained(self.actor_spec.path).get_vocab()
        for name, spec in self.teacher_specs.items():
            require_model_folder(spec.path)
            _refuse_other_vocabulary(name, spec.path, own)

    def _build_models(self) -> None:
        super()._build_models()
        in_shards = strategies.loads_in_shards(self.trainer.strategy)
        self.teachers = nn.ModuleDict(
            {
                name: PolicyModel(
                    load_causal_lm(spec, trainable=False, in_shards=in_shards),
                    layout=spec.layout,
                    cpu_kernels=spec.cpu_kernels,
                )
                for name, spec in self.teacher_specs.items()
            }
        )

    def _models(self) -> list[Any]:
        return [*super()._models(), *self.teachers.values()]

    def _evaluate_models(self, experience: Experience, rollouts: Rollouts, reduction: Reduction) -> None:
        super()._evaluate_models(experience, rollouts, reduction)
        if experience.old_logprobs is None:
            experience.old_logprobs = self._scores(self.actor, experience, reduction)
        experience.teacher_logprobs = torch.zeros_like(experience.old_logprobs)
        for name, rows in self._rows_of_teachers(rollouts).items():
            rows = rows.to(experience.token_ids.device)
            part = experience.select(rows if len(rows) else torch.zeros(1, dtype=torch.long, device=rows.device))
            if not len(rows):  # sharded teachers run on all ranks or on none
                part.response_mask = torch.zeros_like(part.response_mask)
            scores = self._scores(self.teachers[name], part, reduction)
            experience.teacher_logprobs[rows] = scores[: len(rows)]

    def _scores(self, model: Any, rows: Experience, reduction: Reduction) -> Tensor:
        forward = batched_forward(
            lambda x: {"logprobs": policy_forward(model, x)["logprobs"]},
            rows, self.micro_batch_tokens, reduction.max, model.layout,
        )  # fmt: skip
        return forward["logprobs"]

    def _rows_of_teachers(self, rollouts: Rollouts) -> dict[str, Tensor]:
        """Teacher -> numbers of its rows."""
        if self.teacher_column is None:
            return {name: torch.arange(len(rollouts)) for name in self.teacher_specs}
        if self.teacher_column not in rollouts.columns:
            raise ValueError(
                f"teacher_column={self.teacher_column!r}: the data has the columns {sorted(rollouts.columns)}."
            )
        named = [str(value) for value in rollouts.columns[self.teacher_column]]
        unknown = sorted(set(named) - set(self.teacher_specs))
        if unknown:
            raise ValueError(
                f"teacher_column={self.teacher_column!r} names {unknown[0]!r}, but teachers are "
                f"{sorted(self.teacher_specs)}: add it, or mend the rows."
            )
        return {
            name: torch.tensor([row for row, value in enumerate(named) if value == name], dtype=torch.long)
            for name in self.teacher_specs
        }

    def _token_rewards(self, experience: Experience, rollouts: Rollouts, sums: MetricSums) -> Tensor:
        rewards = super()._token_rewards(experience, rollouts, sums)
        if self.learns_rewards:
            return rewards
        failed = [reason == "failure" for reason in rollouts.stop_reasons] or [False] * len(rollouts)
        experience.valid = ~torch.tensor(failed, device=rewards.device)
        return torch.zeros_like(rewards)

    def compute_advantages(
        self, experience: Experience, token_rewards: Tensor, rollouts: Rollouts
    ) -> tuple[Tensor, Tensor | None]:
        """See `PPOLightningModule.compute_advantages`; adds what the teachers say about each token."""
        advantages, returns = super().compute_advantages(experience, token_rewards, rollouts)
        layout = TrajectoryLayout(experience.trajectory_ids, experience.response_mask)
        gain = returns_to_go(layout.join(_gap(experience)), layout.mask, self.distill_gamma)
        return advantages + self.distill_coef * layout.split(gain) * experience.valid[:, None], returns

    def _finish_advantages(
        self, experience: Experience, advantages: Tensor, rollouts: Rollouts, reduction: Reduction, sums: MetricSums
    ) -> None:
        super()._finish_advantages(experience, advantages, rollouts, reduction, sums)
        sums.add({"kl/teacher": -_gap(experience)}, experience.response_mask)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """See `PPOLightningModule.state_dict`; without the teachers, which are loaded from where they came from."""
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if not name.startswith("teachers.")}


def _gap(experience: Experience) -> Tensor:
    """(B, T) log pi_teacher - log pi on the response mask, 0 elsewhere."""
    teacher, own = experience.teacher_logprobs, experience.old_logprobs
    assert teacher is not None and own is not None
    return torch.where(experience.response_mask, teacher - own, 0.0)


def _refuse_other_vocabulary(name: str, path: str, own: dict[str, int]) -> None:
    """Raises a ValueError unless the teacher's tokenizer and model know every token of the policy by the same id."""
    theirs = AutoTokenizer.from_pretrained(path).get_vocab()
    differing = sorted((i, token) for token, i in own.items() if theirs.get(token) != i)
    if differing:
        i, token = differing[0]
        raise ValueError(
            f"teachers[{name!r}]={path!r} has another vocabulary: {len(differing)} of the policy's {len(own)} tokens "
            f"have another id or none there, such as {token!r} ({i} here, {theirs.get(token)} there). It cannot score "
            "sampled tokens; take a teacher of the policy's family."
        )
    size = AutoConfig.from_pretrained(path).get_text_config().vocab_size
    if size <= max(own.values()):
        raise ValueError(
            f"teachers[{name!r}]={path!r} has a head of {size} words, fewer than the {max(own.values()) + 1} ids of "
            "the policy's tokenizer. Take a teacher of the policy's family."
        )
