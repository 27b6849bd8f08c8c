"""What the cases of `tests.sim.cases` are made from, read here without its device."""

from __future__ import annotations

from lightrl import algorithms, objectives

BASE = "PolicyGradientLightningModule"  # requires an advantage estimator
NAMED = [name for name in algorithms.__all__ if name.endswith("LightningModule") and name != BASE]


def concrete(base: type) -> list[type]:
    """The exported classes below a base that are not bases themselves."""
    found = [getattr(objectives, name) for name in objectives.__all__]
    found = [x for x in found if isinstance(x, type) and issubclass(x, base) and x is not base]
    return [x for x in found if not getattr(x, "__abstractmethods__", None)]


KINDS = {
    f"{word} {kind.__name__}": kind
    for word, base in (
        ("loss", objectives.PolicyLoss),
        ("advantage", objectives.AdvantageEstimator),
        ("aggregation", objectives.Aggregation),
    )
    for kind in concrete(base)
}
