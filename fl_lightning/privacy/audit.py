"""Statistics of membership attacks: how well scores separate training samples from others, and the epsilon they imply.

If training is (ε, δ)-differentially private for each record, then for every attack on a record

    TPR <= e^ε FPR + δ    and    TNR <= e^ε FNR + δ

(Kairouz, Oh and Viswanath 2015, Theorem 2.1). So an attack's measured rates give a lower bound of ε.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.stats import beta, rankdata

Counts = tuple[np.ndarray, int]
"""Numbers of samples that are called positive at several thresholds, and the number of all samples."""


class AttackResult(NamedTuple):
    """How well an attack distinguishes members (training samples) from other samples.

    Attributes:
        auc: The probability that a member has a higher score than another sample; 0.5 for guesses.
        advantage: TPR - FPR at the threshold; 0 for guesses.
        epsilon: Lower bound of ε.
    """

    auc: float
    advantage: float
    epsilon: float


def clopper_pearson(successes: np.ndarray, trials: int, level: float) -> tuple[np.ndarray, np.ndarray]:
    """Return lower and upper bounds of probabilities, where each bound is wrong with a probability of at most `level`.

    Args:
        successes: Numbers of successes in independent trials, `(n,)`.
        trials: Number of trials, 1 or more.
        level: Probability of an error of one bound, such as 0.025.
    """
    failures = trials - successes
    low = beta.ppf(level, np.maximum(successes, 1), failures + 1)
    high = beta.ppf(1 - level, successes + 1, np.maximum(failures, 1))
    return np.where(successes == 0, 0.0, low), np.where(failures == 0, 1.0, high)


def area_under_curve(members: np.ndarray, others: np.ndarray) -> float:
    """Return the probability that a member's score is above that of another sample. Ties count one half."""
    ranks = rankdata(np.concatenate([members, others]))[: len(members)]
    return float((ranks.sum() - len(members) * (len(members) + 1) / 2) / (len(members) * len(others)))


def epsilon_of_counts(hits: Counts, alarms: Counts, delta: float, confidence: float) -> np.ndarray:
    """Return lower bounds of ε, `ln((TPR - δ) / FPR)` and at least 0, from what an attack calls positive.

    The true positive rate is replaced by its lower bound, and the false positive rate by its upper bound.

    Args:
        hits: Numbers of positives that the attack calls positive, `(n,)`, of all positives.
        alarms: Numbers of negatives that it calls positive, `(n,)`, of all negatives.
        delta: δ.
        confidence: The probability with which a bound holds, such as 0.95.
    """
    level = (1 - confidence) / 2  # of each of the two bounds
    rate, _ = clopper_pearson(*hits, level)
    _, false_rate = clopper_pearson(*alarms, level)
    return np.log(np.maximum((rate - delta) / false_rate, 1.0))


def audit_scores(members: np.ndarray, others: np.ndarray, delta: float, confidence: float) -> AttackResult:
    """Return how well scores identify members, with a bound of ε that holds with the given confidence.

    The first half of each group chooses the thresholds, and the other half is used to measure the rates.

    Args:
        members: Scores of training samples in random order, `(n,)`. Members should have higher ones.
        others: Scores of samples that were not used in training, in random order, `(m,)`.
        delta: δ of the guarantee that is tested.
        confidence: The probability with which the bound holds.
    """
    chosen, measured = ((members[half::2], others[half::2]) for half in (0, 1))
    thresholds = np.unique(np.concatenate(chosen))
    bounds = epsilon_bounds(chosen, thresholds, delta, confidence)
    calls_members, place = np.unravel_index(bounds.argmax(), bounds.shape)
    epsilon = epsilon_bounds(measured, thresholds, delta, confidence)[calls_members, place]
    best = advantages(chosen, thresholds).argmax()
    advantage = advantages(measured, thresholds)[best]
    return AttackResult(area_under_curve(members, others), float(advantage), float(epsilon))


def advantages(groups: tuple[np.ndarray, np.ndarray], thresholds: np.ndarray) -> np.ndarray:
    """Return TPR - FPR at each threshold, given the scores of members and of others."""
    rates = [counts_above(scores, thresholds) / len(scores) for scores in groups]
    return rates[0] - rates[1]


def epsilon_bounds(
    groups: tuple[np.ndarray, np.ndarray], thresholds: np.ndarray, delta: float, confidence: float
) -> np.ndarray:
    """Return the bound of ε at each threshold, `(2, n)`: from the samples below it, and from the others.

    Args:
        groups: The scores of members and of others.
        thresholds: The thresholds, `(n,)`.
        delta: δ.
        confidence: The probability with which a bound holds.
    """
    (above, size), (false, rest) = ((counts_above(scores, thresholds), len(scores)) for scores in groups)
    no_members = epsilon_of_counts((rest - false, rest), (size - above, size), delta, confidence)
    return np.stack([no_members, epsilon_of_counts((above, size), (false, rest), delta, confidence)])


def counts_above(scores: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Return how many scores are at least as large as each threshold."""
    return len(scores) - np.searchsorted(np.sort(scores), thresholds, side="left")
