"""Means and standard deviations over runs, and paired t-tests with Holm's correction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

LEVELS = (0.05, 0.01, 0.001)
"""Significance levels: one star for each level that p is below."""

ROUNDING = 1e-12
"""Share of the largest value below which a mean or a standard deviation is a rounding error, and becomes 0."""


class Spread(NamedTuple):
    """Mean and sample standard deviation (n - 1) over several runs; `std` is None for a single run."""

    mean: float
    std: float | None
    n: int


class Difference(NamedTuple):
    """Statistics of the difference in a metric between two groups of runs, paired by seed.

    Args:
        pairs: Number of pairs.
        mean: Mean of the differences.
        std: Sample standard deviation of the differences; None for a single pair.
        effect: Cohen's d for paired samples, `mean / std`; None where the differences do not vary.
        p: p value of the two-sided paired t-test; None where the differences do not vary, since the test is undefined
            then. Equal differences are common with small test sets.
        p_holm: `p` after Holm's correction over all tested groups.
    """

    pairs: int
    mean: float
    std: float | None
    effect: float | None
    p: float | None
    p_holm: float | None = None

    @property
    def stars(self) -> str:
        """The significance stars: `*` for `p_holm` below 0.05, `**` below 0.01, `***` below 0.001."""
        return "*" * sum(self.p_holm < level for level in LEVELS) if self.p_holm is not None else ""

    def interval(self, confidence: float = 0.95) -> tuple[float, float] | None:
        """Return the confidence interval of the mean, by Student's t distribution; None for a single pair."""
        if self.std is None:
            return None
        from scipy.special import stdtrit  # imports ten times faster than scipy.stats

        half = float(stdtrit(self.pairs - 1, (1 + confidence) / 2)) * self.std / math.sqrt(self.pairs)
        return self.mean - half, self.mean + half


Figures = TypeVar("Figures", Spread, Difference)


def percent(figures: Figures | None) -> Figures | None:
    """Return statistics with the mean and the standard deviation in percent."""
    return figures and figures._replace(mean=100 * figures.mean, std=figures.std and 100 * figures.std)


def spread(values: Iterable[float], largest: float = 0) -> Spread | None:
    """Return the mean and the sample standard deviation of values; None if there are no values.

    Both are exactly 0 if they differ from 0 only by rounding errors.

    Args:
        values: The values.
        largest: Magnitude of the numbers that the values were computed from, if it is more than that of the values.
    """
    array = np.array(list(values), dtype=float)
    if not len(array):
        return None
    rounding = ROUNDING * max(np.abs(array).max(), largest)

    def clean(figure: float) -> float:
        return 0.0 if abs(figure) < rounding else float(figure)

    with np.errstate(all="ignore"):  # values may be infinite or NaN
        return Spread(clean(array.mean()), clean(array.std(ddof=1)) if len(array) > 1 else None, len(array))


def paired_difference(ours: Sequence[float], theirs: Sequence[float]) -> Difference | None:
    """Return the mean difference between two lists of paired values, with a paired t-test; None for empty lists."""
    with np.errstate(all="ignore"):
        deltas = np.array(ours, dtype=float) - np.array(theirs, dtype=float)
    deviation = spread(deltas, np.abs([*ours, *theirs]).max(initial=0))
    if deviation is None:
        return None
    mean, std, n = deviation
    if std is None or not std > 0:
        return Difference(n, mean, std, None, None)
    from scipy.special import stdtr  # imports ten times faster than scipy.stats

    t = mean / (std / math.sqrt(n))
    return Difference(n, mean, std, mean / std, float(2 * stdtr(n - 1, -abs(t))))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p values after Holm's step-down correction for multiple tests, in the given order."""
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(np.argsort(p_values, kind="stable")):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


def add_holm(differences: list[Difference | None]) -> list[Difference | None]:
    """Return the differences with `p_holm` set, by Holm's correction over all differences that have a p value."""
    corrected = iter(holm([each.p for each in differences if each and each.p is not None]))
    return [each._replace(p_holm=next(corrected)) if each and each.p is not None else each for each in differences]
