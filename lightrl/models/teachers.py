"""Full distributions for distillation: a teacher's output, and its divergence from the student's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightrl.models.logprobs import CHUNK_ELEMENTS, CUT, Distribution, LogitMap, chunks, outside_support
from lightrl.records import RowBatch

if TYPE_CHECKING:
    from lightrl.models.policy import BackboneOutput, PolicyModel

DIVERGENCE_ELEMENTS = 1 << 24  # logits of either model per chunk of a divergence; four times that on CUDA


class TopTokens(NamedTuple):
    """A teacher's top-K tokens at each of M positions."""

    ids: Tensor  # (M, K) int64
    logprobs: Tensor  # (M, K) float32


class TeacherStates(NamedTuple):
    """A teacher's full distribution at M tokens, stored as the input of its head to save memory."""

    hidden: Tensor  # (M, D') input of its head
    weight: Tensor  # (V', D')
    bias: Tensor | None  # (V',) or None
    logit_map: LogitMap  # as in `chunked_logprobs`


@dataclass
class Lesson:
    """A teacher's distribution at some tokens of a (B, T) batch."""

    targets: Tensor  # (N,) int64 flat indices (row times T plus column) of these tokens, each once
    states: TeacherStates | TopTokens  # full distributions, or the top-k tokens, in that order

    def among(self, targets: Tensor, size: int) -> tuple[Tensor, TeacherStates | TopTokens]:
        """Selects the part that covers some of (M,) `targets`, flat indices below `size`.

        Returns the (n,) indices of the covered targets among the M, and their distributions.
        """
        place = targets.new_full((size,), -1)
        place[self.targets] = torch.arange(len(self.targets), device=targets.device)
        found = place[targets]
        here = (found >= 0).nonzero().squeeze(1)
        rows = found[here]
        states = self.states
        if isinstance(states, TopTokens):
            return here, TopTokens(states.ids[rows], states.logprobs[rows])
        return here, states._replace(hidden=states.hidden[rows])


@torch.no_grad()
def teach(teacher: PolicyModel, rows: RowBatch, top: int | None = None) -> Lesson:
    """Returns a teacher's distributions at the response tokens of B rows.

    With `top`, only the top-k tokens. The full distribution includes the head itself, which must not be sharded.
    """
    out = teacher.stream(replace(rows, routes=[]))  # the teacher routes tokens itself
    head = teacher.lm.get_output_embeddings()
    if top is None:
        return Lesson(out.targets, TeacherStates(out.hidden, head.weight, head.bias, teacher.logit_map))
    distribution = teacher.distribution(rows, out)
    return Lesson(out.targets, head(out.hidden, compute=chunked_top, count=top, distribution=distribution))


def divergence_from(
    lessons: Sequence[Lesson],
    divergence: Callable[[Tensor, Tensor], Tensor],
    like: Tensor,
    out: BackboneOutput,
    head: Any,
    distribution_at: Callable[[Tensor], Distribution],
) -> Tensor:
    """Returns a student's divergence from its lessons at each of M targets, 0 without a lesson, in the dtype of `like`.

    A target has at most one lesson. `distribution_at` returns the sampling distribution at some targets.
    """
    apart = torch.zeros_like(like)
    for lesson in lessons:
        here, states = lesson.among(out.targets, out.shape[0] * out.shape[1])
        if len(here):
            own: dict[str, Any] = {"teacher": states, "divergence": divergence, "distribution": distribution_at(here)}
            apart = apart.index_add(0, here, head(out.hidden[here], compute=chunked_divergence, **own))
    return apart


def chunked_divergence(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher: TeacherStates | TopTokens,
    divergence: Callable[[Tensor, Tensor], Tensor],
    distribution: Distribution = Distribution(),  # noqa: B008 - an immutable tuple
    *,
    chunk_elements: int | None = None,
) -> Tensor:
    """Computes a divergence between the student's and a teacher's distribution at each of M tokens.

    Logits are computed in chunks of tokens, and recomputed in the backward pass. If the vocabularies of the heads
    differ, both distributions cover the common tokens. With `TopTokens`, there are K + 1 outcomes: each of the
    teacher's top tokens, and "any other". The result is never above the divergence of the full distributions.

    `divergence` maps (C, W) log-probs of student and teacher to (C,), differentiable in the first. Temperature and
    support also apply to the teacher. See `chunked_logprobs` for the other arguments; `chunk_elements` defaults to 2^26
    on CUDA, 2^24 elsewhere. Returns (M,) float32, with exact gradients for hidden, weight, and bias.
    """
    if chunk_elements is None:
        chunk_elements = DIVERGENCE_ELEMENTS << 2 if hidden.is_cuda else DIVERGENCE_ELEMENTS
    words = len(weight) if isinstance(teacher, TopTokens) else min(len(weight), len(teacher.weight))

    def logprobs(hidden: Tensor, weight: Tensor, bias: Tensor | None, logit_map: LogitMap, rows: slice) -> Tensor:
        z = F.linear(hidden, weight[:words], None if bias is None else bias[:words])
        z = z.to(torch.promote_types(z.dtype, torch.float32)) * logit_map.scale
        if logit_map.cap:
            z = torch.tanh(z / logit_map.cap) * logit_map.cap
        z = z / distribution.temperature
        if distribution.support is not None:
            z = z.masked_fill(outside_support(distribution.support, rows, words), CUT)
        return z.log_softmax(-1)

    def part(hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: slice) -> Tensor:
        own = logprobs(hidden, weight, bias, distribution.logit_map, rows)
        if isinstance(teacher, TopTokens):
            return divergence(_with_rest(own.gather(1, teacher.ids[rows])), _with_rest(teacher.logprobs[rows]))
        with torch.no_grad():
            theirs = logprobs(teacher.hidden[rows], teacher.weight, teacher.bias, teacher.logit_map, rows)
        return divergence(own, theirs)

    slices = chunks(len(hidden), max(1, chunk_elements // words))
    return torch.cat([checkpoint(part, hidden[c], weight, bias, c, use_reentrant=False) for c in slices])


def _with_rest(logprobs: Tensor) -> Tensor:
    """Appends the log-prob of all other tokens to (C, K) log-probs: (C, K + 1)."""
    others = 1.0 - logprobs.exp().sum(-1, keepdim=True)
    return torch.cat([logprobs, others.clamp(min=torch.finfo(others.dtype).eps).log()], -1)


@torch.no_grad()
def chunked_top(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    count: int,
    distribution: Distribution = Distribution(),  # noqa: B008 - an immutable tuple
    *,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> TopTokens:
    """Returns the `count` most likely tokens at each of M positions. See `chunked_logprobs` for arguments."""
    dtype = weight.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    hidden, weight, parts = hidden.to(dtype), weight.to(dtype), []
    for rows in chunks(len(hidden), max(1, chunk_elements // len(weight))):
        z = distribution.logits(hidden, weight, bias, rows)
        parts.append(torch.topk(z.log_softmax(-1), count))
    return TopTokens(torch.cat([p.indices for p in parts]), torch.cat([p.values for p in parts]))
