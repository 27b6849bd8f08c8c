"""Policy losses: numbers worked by hand, gradients, metrics, invariances, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightrl.objectives import (
    CISPO,
    CPG,
    DPPO,
    GMPO,
    GSPO,
    SAPO,
    VESPO,
    GeometricRejection,
    LossInput,
    OffPolicyCorrection,
    OffPolicySequenceMask,
    PolicyLoss,
    PPOClip,
    RLOOSequence,
    RolloutRatio,
    SequenceMean,
    TokenMean,
)

ALL: list[PolicyLoss] = [
    PPOClip(),
    PPOClip(0.2, 0.28, dual_clip=3.0),
    PPOClip(dual_clip=1.5),
    GSPO(0.1, 0.1),
    RLOOSequence(0.5, 0.5),
    GMPO(0.2, 0.2),
    CISPO(1.2, 0.9),
    SAPO(),
    CPG(),
    CPG(drift_coef=0.3),
    OffPolicyCorrection(PPOClip(), "token", "truncate", high=1.3, low=0.8),
    OffPolicyCorrection(CISPO(), "sequence", "mask", high=1.5, low=0.5),
    OffPolicySequenceMask(PPOClip(), 0.05),
    VESPO(),
    RolloutRatio(PPOClip()),
    DPPO(0.05, 0.05, ratio_max=1.2),
    DPPO(0.05, 0.05, penalty_coef=0.1),
    GeometricRejection(PPOClip(), 0.9, 1.1),
]
IDS = [f"{type(x).__name__}-{i}" for i, x in enumerate(ALL)]

# two sequences: three tokens with ratios 1.5, 0.5, 1.0; one token with ratio 1.5 and an entry off the mask
RATIOS = torch.tensor([[1.5, 0.5, 1.0], [1.5, float("nan"), 1.0]])
MASK = torch.tensor([[True, True, True], [True, False, False]])
A = torch.tensor([[2.0, 2.0, 2.0], [-2.0, -2.0, -2.0]])
OLD = torch.full((2, 3), -1.0)


def losses(
    loss: PolicyLoss, ratios: Tensor = RATIOS, advantages: Tensor = A
) -> tuple[list[float], dict[str, Tensor], list[float]]:
    """Token losses and gradients with respect to log pi on the mask, and the metrics."""
    logprobs = (OLD + ratios.log()).requires_grad_()
    out, metrics = loss(LossInput(logprobs, OLD, advantages, MASK, engine_logprobs=OLD))
    out.sum().backward()
    assert logprobs.grad is not None and (out[~MASK] == 0).all() and (logprobs.grad[~MASK] == 0).all()
    assert all(m.shape == MASK.shape and not m.requires_grad and torch.isfinite(m).all() for m in metrics.values())
    return out[MASK].tolist(), metrics, logprobs.grad[MASK].tolist()


def mean(metric: Tensor) -> float:
    return metric[MASK].mean().item()


def approx(values: list[float]) -> Any:
    return pytest.approx(values, abs=1e-5)


def test_ppo_clip_by_hand() -> None:
    # -1.2 * 2 (clipped), -0.5 * 2, -1 * 2; A < 0: 1.5 * 2. The gradient of r * A in log pi is r * A
    values, metrics, gradient = losses(PPOClip())
    assert values == approx([-2.4, -1.0, -2.0, 3.0])
    assert gradient == approx([0.0, -1.0, -2.0, 3.0])
    assert mean(metrics["policy/clip_fraction_high"]) == 0.25 and mean(metrics["policy/clip_fraction_low"]) == 0
    assert metrics["policy/ratio_max"][MASK].max().item() == pytest.approx(1.5)
    # k3 of KL(old || pi): r - 1 - log r: 0.094535 (twice), 0.193147, 0
    assert mean(metrics["kl/old"]) == pytest.approx((2 * 0.094535 + 0.193147) / 4, abs=1e-5)
    # bounds of their own: 1 + 0.6 does not clip 1.5; with A < 0 everywhere 0.5 is clipped at 0.7
    assert losses(PPOClip(0.3, 0.6))[0][0] == pytest.approx(-3.0)
    values, metrics, _ = losses(PPOClip(0.3, 0.6), advantages=-A.abs())
    assert values == approx([3.0, 1.4, 2.0, 3.0]) and mean(metrics["policy/clip_fraction_low"]) == 0.25


def test_dual_clip_by_hand() -> None:
    values, metrics, gradient = losses(PPOClip(dual_clip=1.3))
    assert values == approx([-2.4, -1.0, -2.0, 2.6]) and gradient[3] == 0
    assert mean(metrics["policy/clip_fraction_dual"]) == 0.25


def test_gspo_by_hand() -> None:
    # sequence 0: s = (1.5 * 0.5 * 1)^(1/3) = 0.908560, above 1 - 0.2 or A > 0: -s * 2. sequence 1: 1.5, A < 0: 3
    values, metrics, gradient = losses(GSPO(0.2, 0.2))
    assert values == approx([-1.817121] * 3 + [3.0])
    # summed over the three equal tokens, each token's log pi moves s by s / 3
    assert gradient == approx([-1.817121] * 3 + [3.0])
    # A < 0 in sequence 0 with eps_low 0.05: 0.95 * 2, no gradient; its three tokens count as clipped
    values, metrics, gradient = losses(GSPO(0.05, 0.05), advantages=-A.abs())
    assert values[:3] == approx([1.9] * 3) and gradient[:3] == [0, 0, 0]
    assert mean(metrics["policy/clip_fraction_low"]) == 0.75


def test_rloo_sequence_by_hand() -> None:
    # sequence 0: s = 0.75: -1.5 per token, so -1.5 as a SequenceMean; every token's gradient is s * A, not s * A / 3
    values, metrics, gradient = losses(RLOOSequence(0.2, 0.2))
    assert values == approx([-1.5] * 3 + [3.0])
    assert gradient == approx([-4.5] * 3 + [3.0])  # of the unweighted sum; SequenceMean divides by 3
    assert metrics["policy/ratio_max"][MASK].max().item() == pytest.approx(1.5)
    # 0.75 < 0.8 and A < 0: clipped
    assert losses(RLOOSequence(0.2, 0.2), advantages=-A.abs())[0][:3] == approx([1.6] * 3)


def test_gmpo_by_hand() -> None:
    # A > 0, bound 0.4: log 1.5 = 0.405465 -> 0.4; log 0.5 stays; ratio exp((0.4 - 0.693147) / 3) = 0.906907
    values, metrics, gradient = losses(GMPO())
    assert values[:3] == approx([-1.813814] * 3)
    assert gradient[:3] == approx([0.0, -1.813814, -1.813814])
    # A < 0, bound -0.4: 1.5 stays, so exp(0.405465) = 1.5
    assert values[3] == pytest.approx(3.0, abs=1e-5)
    assert mean(metrics["policy/clip_fraction_high"]) == 0.25
    # A < 0 in sequence 0: log 0.5 -> -0.4: exp((0.405465 - 0.4) / 3) = 1.001823
    values, metrics, _ = losses(GMPO(), advantages=-A.abs())
    assert values[:3] == approx([2.003646] * 3) and mean(metrics["policy/clip_fraction_low"]) == 0.25


def test_cispo_by_hand() -> None:
    # weights min(r, 1.2): 1.2, 0.5, 1, 1.2; log pi = -1 + log r: -0.594535, -1.693147, -1, -0.594535
    values, metrics, gradient = losses(CISPO(ratio_max=1.2))
    assert values == approx([1.2 * 2 * 0.594535, 0.5 * 2 * 1.693147, 2.0, -1.2 * 2 * 0.594535])
    assert gradient == approx([-2.4, -1.0, -2.0, 2.4]), "no token loses its gradient"
    assert mean(metrics["policy/clip_fraction_high"]) == 0.5
    # a lower bound of 0.8
    assert losses(CISPO(1.2, 0.8))[2][1] == pytest.approx(-1.6)
    # both at 1: REINFORCE
    assert losses(CISPO(1.0, 1.0))[2] == approx([-2, -2, -2, 2])


def test_sapo_by_hand() -> None:
    # A > 0, tau 1: 4 * sigmoid(0.5) = 2.489837, 4 * sigmoid(-0.5) = 1.510163, 4 * 0.5 = 2
    # A < 0, tau 1.05: 4 / 1.05 * sigmoid(0.525) = 2.393585
    values, metrics, gradient = losses(SAPO())
    assert values == approx([-2 * 2.489837, -2 * 1.510163, -4.0, 2 * 2.393585])
    # gradient in log pi: 4 * s * (1 - s) * r * A; at r = 1 it is A
    assert gradient[2] == pytest.approx(-2.0)
    assert gradient[0] == pytest.approx(-4 * 0.622459 * 0.377541 * 1.5 * 2, abs=1e-5)
    assert "policy/clip_fraction_low" not in metrics
    # a sharper gate for A > 0, tau 2: 4 / 2 * sigmoid(1) = 1.462117
    assert losses(SAPO(tau_pos=2.0))[0][0] == pytest.approx(-2 * 1.462117, abs=1e-5)


def test_cpg_by_hand() -> None:
    # log 1.5 is clipped at log 1.2 = 0.182322; log 0.5 = -0.693147, 0; A < 0: log 1.5 = 0.405465
    values, metrics, gradient = losses(CPG())
    assert values == approx([-0.364643, 1.386294, 0.0, 0.810930])
    assert gradient == approx([0.0, -2.0, -2.0, 2.0]), "A itself, never weighted by the ratio"
    assert mean(metrics["policy/clip_fraction_high"]) == 0.25
    # drift: value k3 = r - 1 - log r, gradient min(r - 1, 0.2): 0.2, -0.5, 0, 0.2
    values, _, gradient = losses(CPG(drift_coef=0.5, drift_clip=0.2))
    assert values == approx([-0.364643 + 0.047267, 1.386294 + 0.096574, 0.0, 0.810930 + 0.047267])
    assert gradient == approx([0.1, -2.25, -2.0, 2.1])
    # the authors' bound of 2 lets r - 1 = 0.5 through: 0.5 * (0.5, -0.5, 0, 0.5)
    assert CPG().drift_clip == 2.0 and losses(CPG(drift_coef=0.5))[2] == approx([0.25, -2.25, -2.0, 2.25])
    assert CPG().zero_advantage_is_zero_loss and not CPG(drift_coef=0.5).zero_advantage_is_zero_loss


ENGINE = OLD - torch.tensor(
    [[math.log(1.5), math.log(0.5), 0.0], [math.log(3.0), 9.0, 9.0]]
)  # old / engine: 1.5 0.5 1 | 3


@pytest.mark.parametrize(
    ("level", "mode", "weights"),
    [
        ("token", "truncate", [1.4, 0.6, 1.0, 1.4]),
        ("token", "mask", [0.0, 0.0, 1.0, 0.0]),
        ("sequence", "truncate", [0.75, 0.75, 0.75, 1.4]),  # 1.5 * 0.5 * 1
        ("sequence", "mask", [0.75, 0.75, 0.75, 0.0]),
    ],
)
def test_off_policy_correction_by_hand(level: Any, mode: Any, weights: list[float]) -> None:
    loss = OffPolicyCorrection(PPOClip(), level, mode, high=1.4, low=0.6)
    out, metrics = loss(LossInput(OLD.clone().requires_grad_(), OLD, A, MASK, engine_logprobs=ENGINE))
    plain = torch.tensor([-2.0, -2.0, -2.0, 2.0])  # ratio 1
    assert out[MASK].tolist() == approx((plain * torch.tensor(weights)).tolist())
    token = level == "token"
    assert mean(metrics["off_policy/bounded_fraction"]) == (0.75 if token else 0.25)
    assert mean(metrics["off_policy/weight"]) == pytest.approx(6 / 4 if token else (3 * 0.75 + 3) / 4)
    assert metrics["off_policy/weight_max"][MASK].max().item() == pytest.approx(3.0)
    # k3 of KL(engine || old): 0.094535, 0.193147, 0, 3 - 1 - log 3 = 0.901388
    assert mean(metrics["off_policy/kl"]) == pytest.approx((0.094535 + 0.193147 + 0.901388) / 4, abs=1e-5)
    assert "policy/clip_fraction_low" in metrics, "the inner loss's metrics stay"


def test_off_policy_correction_needs_the_engines_logprobs() -> None:
    with pytest.raises(ValueError, match="engine_logprobs"):
        OffPolicyCorrection(PPOClip())(LossInput(OLD, OLD, A, MASK))


def test_a_loss_with_the_ratio_to_the_engine_takes_no_correction() -> None:
    doubled = [VESPO(), RolloutRatio(PPOClip()), OffPolicyCorrection(PPOClip()), OffPolicySequenceMask(VESPO())]
    for loss in doubled:
        with pytest.raises(ValueError, match=rf"loss={type(loss).__name__}\): "):
            OffPolicyCorrection(loss)
    assert OffPolicyCorrection(OffPolicySequenceMask(PPOClip())).engine_use == "ratio"


def test_off_policy_sequence_mask_by_hand() -> None:
    # mean of log(sampler / pi) with sampler = old, pi / old = 1.5, 0.5, 1: -(0.405465 - 0.693147) / 3 = 0.095894
    loss = OffPolicySequenceMask(PPOClip(), 0.09)
    assert losses(loss)[0][0] == pytest.approx(-2.4), "A > 0 stays"
    values, metrics, gradient = losses(loss, advantages=-A.abs())
    assert values[:3] == [0, 0, 0] and gradient[:3] == [0, 0, 0] and values[3] == pytest.approx(3.0)
    assert mean(metrics["off_policy/masked_fraction"]) == 0.75
    assert losses(OffPolicySequenceMask(PPOClip(), 0.1), advantages=-A.abs())[0][0] != 0, "below the threshold"
    # the engine's log-probs, where there are, are the sampler's: 1 nat above ours drops the second sequence as well
    out, _ = loss(LossInput(OLD, OLD, -A.abs(), MASK, engine_logprobs=OLD + 1.0))
    assert out.abs().sum() == 0


def test_dppo_by_hand() -> None:
    # pi_old = e^-1 = 0.367879: probabilities move by +0.183940, -0.183940, 0, and +0.183940 where A < 0
    values, metrics, gradient = losses(DPPO())
    assert gradient == approx([-3.0, -1.0, -2.0, 3.0]), "none moved by 0.2: -r A"
    assert values == approx([g * (math.log(r) - 1) for g, r in zip(gradient, (1.5, 0.5, 1.0, 1.5), strict=True)])
    values, metrics, gradient = losses(DPPO(0.18, 0.18))
    assert gradient == approx([0.0, -1.0, -2.0, 3.0]) and values[0] == 0, "a rise is masked where A > 0 only"
    assert mean(metrics["policy/clip_fraction_high"]) == 0.25 and mean(metrics["policy/clip_fraction_low"]) == 0
    _, metrics, gradient = losses(DPPO(0.18, 0.18), advantages=-A.abs())
    assert gradient == approx([3.0, 0.0, 2.0, 3.0]) and mean(metrics["policy/clip_fraction_low"]) == 0.25
    assert losses(DPPO(ratio_max=1.2))[2] == approx([-2.4, -1.0, -2.0, 2.4])
    # + 0.5 (log r)^2, whose gradient is log r: 0.405465, -0.693147, 0, 0.405465; also where masked
    assert losses(DPPO(0.18, 0.18, penalty_coef=0.5))[2] == approx([0.405465, -1.693147, -2.0, 3.405465])
    # a rare token may double, which no ratio clip allows: from 0.001 to 0.002 is a variation of 0.001
    rare = torch.tensor([[0.002]]).log().requires_grad_()
    one = torch.ones(1, 1)
    DPPO()(LossInput(rare, torch.tensor([[0.001]]).log(), one, one.bool()))[0].sum().backward()
    assert rare.grad is not None and rare.grad.item() == pytest.approx(-2.0)


def test_vespo_by_hand() -> None:
    # w = 1.5 * 0.5 * 1 = 0.75, A = 2: 0.75^2 e^(3 * 0.25) = 1.190813; w = 1.5, A = -2: 1.5^3 e^(-2 * 0.5) = 1.241593
    values, metrics, gradient = losses(VESPO())
    assert gradient == approx([-2.381626, -2.381626, -2.381626, 2.483186])
    assert values == approx([g * math.log(r / math.e) for g, r in zip(gradient, (1.5, 0.5, 1.0, 1.5), strict=True)])
    assert metrics["policy/ratio_max"].max().item() == pytest.approx(1.5)
    # the engine's log-probs are the sampler's: one that is log 1.5 above ours in one token makes w = 0.5 and 1
    engine = OLD + torch.tensor([[math.log(1.5), 0.0, 0.0]])
    leaf = (OLD + RATIOS.log()).requires_grad_()
    VESPO()(LossInput(leaf, OLD, A, MASK, engine_logprobs=engine))[0].sum().backward()
    assert leaf.grad is not None  # 0.5^2 e^(3 * 0.5) = 1.120422
    assert leaf.grad[MASK].tolist() == approx([-2.240845, -2.240845, -2.240845, 2.0])
    # no engine: the policy that starts the update
    assert torch.equal(
        VESPO()(LossInput(leaf, OLD, A, MASK))[0], VESPO()(LossInput(leaf, OLD, A, MASK, engine_logprobs=OLD))[0]
    )


def random_batch(dtype: torch.dtype = torch.float64, rows: int = 6) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Log-probs, old ones, advantages, mask (one row empty), the engine's log-probs."""
    gen = torch.Generator().manual_seed(4)
    logprobs = -torch.rand(rows, 8, generator=gen, dtype=dtype) - 0.5
    old, engine = (logprobs + 0.3 * torch.randn(rows, 8, generator=gen, dtype=dtype) for _ in range(2))
    mask = torch.rand(rows, 8, generator=gen) > 0.3
    mask[2] = False
    return logprobs, old, torch.randn(rows, 8, generator=gen, dtype=dtype), mask, engine


def gradient_of(loss: PolicyLoss, aggregation: Any, cuts: list[slice], batch: Any, width: int = 8) -> Tensor:
    logprobs, old, advantages, mask, engine = batch
    count = aggregation.count(mask)
    leaf = torch.nn.functional.pad(logprobs, (0, width - 8)).requires_grad_()
    old, advantages, engine = (torch.nn.functional.pad(x, (0, width - 8), value=7.0) for x in (old, advantages, engine))
    mask = torch.nn.functional.pad(mask, (0, width - 8))
    for rows in cuts:
        token, _ = loss(LossInput(leaf[rows], old[rows], advantages[rows], mask[rows], engine_logprobs=engine[rows]))
        ((aggregation.weights(mask[rows]) * token).sum() / count).backward()
    assert leaf.grad is not None
    return leaf.grad[:, :8]


@pytest.mark.parametrize("loss", ALL, ids=IDS)
def test_invariances(loss: PolicyLoss) -> None:
    batch = random_batch()
    for aggregation in (TokenMean(), SequenceMean()):
        whole = gradient_of(loss, aggregation, [slice(0, 6)], batch)
        assert whole.abs().sum() > 0 and (whole[~batch[3]] == 0).all()
        assert torch.allclose(gradient_of(loss, aggregation, [slice(0, 1), slice(1, 4), slice(4, 6)], batch), whole)
        assert torch.allclose(gradient_of(loss, aggregation, [slice(0, 6)], batch, width=13), whole), "padding"
        order = torch.tensor([3, 0, 5, 1, 4, 2])
        shuffled = gradient_of(loss, aggregation, [slice(0, 6)], [x[order] for x in batch])
        assert torch.allclose(shuffled, whole[order]), "row order"


STOPS_A_GRADIENT = (
    6,
    9,
    11,
    13,
    15,
    16,
)  # CISPO, CPG's drift, a wrapped CISPO, VESPO, DPPO: their gradients are in the tests by hand


@pytest.mark.parametrize("loss", [x for i, x in enumerate(ALL) if i not in STOPS_A_GRADIENT])
def test_gradient_by_finite_differences(loss: PolicyLoss) -> None:
    logprobs, old, advantages, mask, engine = random_batch()
    logprobs.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: loss(LossInput(x, old, advantages, mask, engine_logprobs=engine))[0], logprobs
    )


@pytest.mark.parametrize("loss", ALL, ids=IDS)
def test_zero_advantages_and_huge_ratios(loss: PolicyLoss) -> None:
    logprobs, old, advantages, mask, engine = random_batch(torch.float32)
    leaf = logprobs.clone().requires_grad_()
    loss(LossInput(leaf, old, torch.zeros_like(advantages), mask, engine_logprobs=engine))[0].sum().backward()
    assert leaf.grad is not None
    assert (leaf.grad.abs().sum() == 0) == loss.zero_advantage_is_zero_loss
    leaf = (logprobs + 500).requires_grad_()  # exp overflows float32
    loss(LossInput(leaf, old, advantages.abs(), mask, engine_logprobs=engine))[0].sum().backward()
    assert leaf.grad is not None and torch.isfinite(leaf.grad).all()


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: CISPO(ratio_max=0.2), "ratio_max=0.2"),
        (lambda: OffPolicyCorrection(PPOClip(), level="row"), "level='row'"),  # type: ignore[arg-type]
        (lambda: OffPolicyCorrection(PPOClip(), mode="clip"), "mode='clip'"),  # type: ignore[arg-type]
        (lambda: RolloutRatio(VESPO()), "loss=VESPO"),
    ],
)
def test_arguments_that_would_train_another_loss_are_refused(build: Callable[[], Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        build()


def test_a_changed_loss_is_not_taken_for_zero() -> None:
    """Rows without advantage may only be left out where somebody says that they have no gradient."""

    class Regularized(PPOClip):
        def __call__(self, given: LossInput) -> Any:
            loss, metrics = super().__call__(given)
            return loss + 0.01 * given.logprobs.square(), metrics

    class Mixin:
        def __call__(self, given: LossInput) -> Any:
            return PPOClip.__call__(self, given)[0] + 0.01 * given.logprobs.square(), {}  # type: ignore[arg-type]

    class Mixed(Mixin, PPOClip):  # type: ignore[misc]
        """The penalty of a mixin."""

    class Declared(PPOClip):
        zero_advantage_is_zero_loss = True

    for loss in (Regularized(), Mixed(), OffPolicyCorrection(Regularized()), OffPolicySequenceMask(Mixed())):
        assert not loss.zero_advantage_is_zero_loss and loss.needs_whole_trajectories
    assert Declared().zero_advantage_is_zero_loss and OffPolicyCorrection(Declared()).zero_advantage_is_zero_loss


class OwnRatio(PolicyLoss):
    """A loss of a user that corrects for the engine itself, and declares nothing."""

    def __call__(self, given: LossInput) -> Any:
        assert given.engine_logprobs is not None
        ratio = (given.logprobs - given.engine_logprobs).exp()
        return -(ratio * given.advantages) * given.mask, {}


def test_a_correction_is_never_applied_twice() -> None:
    logprobs, old, advantages, mask, engine = random_batch()
    given = LossInput(logprobs, old, advantages, mask, engine_logprobs=engine)
    with pytest.raises(ValueError, match="loss=OwnRatio.*engine_use"):  # it gets no log-probs of the engine
        OffPolicyCorrection(OwnRatio())(given)
    assert not torch.equal(OffPolicyCorrection(PPOClip())(given)[0], PPOClip()(given)[0])

    class OwnMask(OwnRatio):
        engine_use = "compared"

    assert not torch.equal(OffPolicyCorrection(OwnMask())(given)[0], OwnMask()(given)[0])


def test_the_kl_to_the_old_policy_is_exact_far_away() -> None:
    zero, one = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    metrics = PPOClip()(LossInput(zero - 30, zero, zero, one))[1]
    assert metrics["kl/old"].item() == pytest.approx(29.0)  # exp(-30) - 1 + 30


def test_the_engine_ratio_is_that_to_the_engine() -> None:
    logprobs, old, advantages, mask, engine = random_batch()
    ours, metrics = RolloutRatio(PPOClip())(LossInput(logprobs, old, advantages, mask, engine_logprobs=engine))
    expected, plain = PPOClip()(LossInput(logprobs, engine, advantages, mask))
    assert torch.equal(ours, expected) and metrics.keys() == plain.keys()
    with pytest.raises(ValueError, match="engine_logprobs=None"):
        RolloutRatio(PPOClip())(LossInput(logprobs, old, advantages, mask))


def test_geometric_engine_mask_by_hand() -> None:
    # geometric means of old / engine: (1.2 * 1.2 * 1 / 1.2)^(1/3) = 1.062659 and 1.2; the product would be 1.2 in both
    engine = OLD - torch.tensor([[1.2, 1.2, 1 / 1.2], [1.2, 1.0, 1.0]]).log()
    logprobs = OLD + RATIOS.log()
    loss, metrics = GeometricRejection(PPOClip(), 0.9, 1.1)(LossInput(logprobs, OLD, A, MASK, engine_logprobs=engine))
    assert loss[MASK].tolist() == approx([-2.4, -1.0, -2.0, 0.0]), "kept as it is, or left out whole"
    assert mean(metrics["off_policy/geometric_masked_fraction"]) == 0.25
    loss, _ = GeometricRejection(PPOClip(), 0.9, 1.06)(LossInput(logprobs, OLD, A, MASK, engine_logprobs=engine))
    assert loss.abs().sum() == 0
    loss, _ = GeometricRejection(PPOClip(), 0.9, 1.1)(
        LossInput(logprobs, OLD, A, MASK, engine_logprobs=2 * OLD - engine)
    )
    assert loss[MASK].tolist() == approx([-2.4, -1.0, -2.0, 0.0]), "below 0.9: 1 / 1.2"
    with pytest.raises(ValueError, match="engine_logprobs=None"):
        GeometricRejection(PPOClip())(LossInput(logprobs, OLD, A, MASK))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (PPOClip(0.2, 0.2), PPOClip(0.1, 0.2)),
        (PPOClip(0.2, 0.2), PPOClip(0.2, 0.1)),
        (PPOClip(), PPOClip(dual_clip=1.1)),
        (GSPO(0.05, 0.1), GSPO(0.01, 0.1)),
        (GSPO(0.1, 0.05), GSPO(0.1, 0.01)),
        (RLOOSequence(0.2, 0.2), RLOOSequence(0.01, 0.2)),
        (RLOOSequence(0.2, 0.2), RLOOSequence(0.2, 0.01)),
        (GMPO(0.2, 0.2), GMPO(0.1, 0.2)),
        (GMPO(0.2, 0.2), GMPO(0.2, 0.1)),
        (CISPO(1.2), CISPO(1.1)),
        (CISPO(ratio_min=0.5), CISPO(ratio_min=0.9)),
        (SAPO(1.0), SAPO(2.0)),
        (SAPO(tau_neg=1.0), SAPO(tau_neg=2.0)),
        (CPG(0.2), CPG(0.1)),
        (CPG(0.2, 0.2), CPG(0.2, 0.1)),
        (CPG(), CPG(drift_coef=0.1)),
        (CPG(drift_coef=0.1), CPG(drift_coef=0.1, drift_clip=0.05)),
        (OffPolicyCorrection(PPOClip()), OffPolicyCorrection(PPOClip(), level="sequence")),
        (OffPolicyCorrection(PPOClip(), high=1.1), OffPolicyCorrection(PPOClip(), high=1.1, mode="mask")),
        (OffPolicyCorrection(PPOClip(), high=1.2), OffPolicyCorrection(PPOClip(), high=1.1)),
        (OffPolicyCorrection(PPOClip(), low=0.0), OffPolicyCorrection(PPOClip(), low=0.9)),
        (OffPolicySequenceMask(PPOClip(), 10.0), OffPolicySequenceMask(PPOClip(), 0.05)),
        (VESPO(), VESPO(k_pos=1.0)),
        (VESPO(), VESPO(lam_pos=1.0)),
        (VESPO(), VESPO(k_neg=1.0)),
        (VESPO(), VESPO(lam_neg=1.0)),
        (DPPO(0.1), DPPO(0.01)),
        (DPPO(0.1, 0.1), DPPO(0.1, 0.01)),
        (DPPO(ratio_max=2.0), DPPO(ratio_max=1.1)),
        (DPPO(), DPPO(penalty_coef=0.1)),
    ],
)
def test_every_argument_has_an_effect(one: PolicyLoss, other: PolicyLoss) -> None:
    batch = random_batch(rows=60)
    a, b = (gradient_of(x, TokenMean(), [slice(0, 60)], batch) for x in (one, other))
    assert (a - b).abs().max() > 1e-5
