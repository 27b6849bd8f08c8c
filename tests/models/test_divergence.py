"""Divergences over whole distributions: by hand, against a dense float64 softmax, in every layout."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from lightrl.models.logprobs import Distribution, LogitMap
from lightrl.models.policy import PolicyModel
from lightrl.models.spec import Layout
from lightrl.models.teachers import (
    Lesson,
    TeacherStates,
    TopTokens,
    chunked_divergence,
    chunked_top,
    divergence_from,
    teach,
)
from lightrl.objectives import Divergence, ForwardKL, JensenShannon, ReverseKL
from lightrl.records import Support
from tests.models.conftest import Batch
from tests.rows import as_experience, as_rows
from tests.toys import build

DIVERGENCES = [ReverseKL(), ForwardKL(), JensenShannon(0.3)]


def test_by_hand() -> None:
    # student (1/4, 3/4), teacher (1/2, 1/2), mixture at beta 0.5 (3/8, 5/8)
    p, q = torch.tensor([[0.25, 0.75]]).log(), torch.tensor([[0.5, 0.5]]).log()
    assert ReverseKL()(p, q).item() == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5))
    assert ForwardKL()(p, q).item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    by_teacher = 0.5 * math.log(4 / 3) + 0.5 * math.log(4 / 5)
    by_student = 0.25 * math.log(2 / 3) + 0.75 * math.log(6 / 5)
    assert JensenShannon()(p, q).item() == pytest.approx(0.5 * by_teacher + 0.5 * by_student, abs=1e-6)
    # of three words with student (1, 2, 5) / 8 and teacher (4, 3, 1) / 8, its likeliest and "any other" stay
    head = torch.tensor([1.0, 2.0, 5.0]).log()[:, None]
    value = chunked_divergence(
        torch.ones(1, 1), head, None, TopTokens(torch.tensor([[0]]), torch.tensor([[0.5]]).log()), ForwardKL()
    )
    assert value.item() == pytest.approx(0.5 * math.log(4) + 0.5 * math.log(4 / 7), abs=1e-6)


def slopes(divergence: Divergence, p: Tensor, q: Tensor) -> Tensor:
    """dD / dz, as the table of `lightrl.objectives.divergences` has it."""
    if isinstance(divergence, ForwardKL):
        return p - q
    logs, weight = (p / q).log(), 1.0
    if isinstance(divergence, JensenShannon):
        logs, weight = (p / (0.3 * q + 0.7 * p)).log(), 0.7
    return weight * p * (logs - (p * logs).sum(-1, keepdim=True))


def drawn(*sizes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*size, generator=generator, dtype=torch.float64).requires_grad_() for size in sizes]


@pytest.mark.parametrize("divergence", DIVERGENCES, ids=lambda d: type(d).__name__)
@pytest.mark.parametrize("chunk_elements", [40, 10_000])
@pytest.mark.parametrize("cut", [False, True])
def test_values_and_gradients_equal_a_dense_softmax(divergence: Divergence, chunk_elements: int, cut: bool) -> None:
    hidden, weight, bias, theirs, their_weight = drawn((7, 5), (11, 5), (11,), (7, 3), (13, 3))
    keep = torch.rand(7, 11, generator=torch.Generator().manual_seed(1)) < 0.5
    keep[:, 4] = True
    support = Support.of([row.nonzero().squeeze(1) for row in keep]) if cut else None
    teacher = TeacherStates(theirs.detach(), their_weight.detach(), None, LogitMap(0.5))
    got = chunked_divergence(
        hidden, weight, bias, teacher, divergence, Distribution(0.7, LogitMap(1.5, 2.0), support),
        chunk_elements=chunk_elements,
    )  # fmt: skip
    z = torch.tanh((hidden @ weight.T + bias) * 1.5 / 2.0) * 2.0 / 0.7
    own, q = z, (theirs @ their_weight.T)[:, :11].detach() * 0.5 / 0.7  # words that only the teacher has stay out
    if cut:
        own, q = own.masked_fill(~keep, -math.inf), q.masked_fill(~keep, -math.inf)
    p, q = own.softmax(-1), q.softmax(-1)
    inside = keep if cut else torch.ones_like(keep)
    flat = [(p[i][inside[i]], q[i][inside[i]]) for i in range(7)]
    want = torch.stack([divergence(a.log()[None], b.log()[None])[0] for a, b in flat])
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-9)
    weights = torch.arange(1.0, 8.0, dtype=torch.float64)
    of_logits = torch.zeros_like(z)
    for i, (a, b) in enumerate(flat):
        of_logits[i, inside[i]] = slopes(divergence, a, b).detach() * weights[i]
    expected = torch.autograd.grad(z, (hidden, weight, bias), of_logits)
    for a, b in zip(torch.autograd.grad(got @ weights, (hidden, weight, bias)), expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("divergence", DIVERGENCES, ids=lambda d: type(d).__name__)
def test_top_words_equal_a_dense_softmax_over_them_and_any_other(divergence: Divergence) -> None:
    hidden, weight, theirs, their_weight = drawn((7, 5), (11, 5), (7, 3), (11, 3))
    top = chunked_top(theirs.detach(), their_weight.detach(), None, 3, Distribution(0.7), chunk_elements=30)
    q = (theirs @ their_weight.T / 0.7).softmax(-1).detach()
    torch.testing.assert_close(top.logprobs, q.log().topk(3).values)
    got = chunked_divergence(hidden, weight, None, top, divergence, Distribution(0.7), chunk_elements=30)
    p = (hidden @ weight.T / 0.7).softmax(-1)
    coarse = [torch.cat([x.gather(1, top.ids), 1 - x.gather(1, top.ids).sum(1, keepdim=True)], 1) for x in (p, q)]
    want = divergence(coarse[0].log(), coarse[1].log())
    torch.testing.assert_close(got, want)
    assert bool((want <= divergence(p.log(), q.log()) + 1e-12).all()), "what is not told apart does not count"
    expected = torch.autograd.grad(want.sum(), (hidden, weight), retain_graph=True)
    for a, b in zip(torch.autograd.grad(got.sum(), (hidden, weight)), expected, strict=True):
        torch.testing.assert_close(a, b)


def model(layout: Layout, seed: int) -> PolicyModel:
    lm = build("qwen2")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return PolicyModel(lm, layout=layout)


@pytest.mark.parametrize("top", [None, 5])
def test_every_layout_of_student_and_teacher_gives_the_same(top: int | None, batch: Batch) -> None:
    """Two teachers, each of every other row; the student's and the teachers' tokens come in different orders."""
    rows = as_experience(batch)
    width, numbers = rows.token_ids.shape[1], torch.arange(len(rows)) % 2
    results: list[tuple[Tensor, list[Tensor | None]]] = []
    layouts: tuple[tuple[Layout, Layout], ...] = (
        ("padded", "padded"), ("packed", "shared_prefix"), ("shared_prefix", "packed")
    )  # fmt: skip
    for layout, of_teacher in layouts:
        student, lessons = model(layout, 0), []
        for number in (0, 1):
            own = (numbers == number).nonzero().squeeze(1)
            lesson = teach(model(of_teacher, number + 5), rows.select(own), top)
            targets = own[lesson.targets // width] * width + lesson.targets % width
            lessons.append(Lesson(targets, lesson.states))
        distance = partial(divergence_from, lessons, ReverseKL())
        out = student(as_rows(*batch[:3], group_ids=batch.group_ids), divergence=distance)
        out.divergence.sum().backward()
        results.append((out.divergence.detach(), [p.grad for p in student.parameters()]))
    value, gradients = results[0]
    assert bool((value[rows.response_mask] > 1e-4).all()) and not value[~rows.response_mask].any()
    for other, others in results[1:]:
        torch.testing.assert_close(other, value, atol=1e-4, rtol=1e-4)
        for a, b in zip(others, gradients, strict=True):
            assert a is not None and b is not None
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)
