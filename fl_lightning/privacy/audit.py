"""Statistics of membership attacks: how well scores separate training samples from others, and the epsilon they imply.

If training is (ε, δ)-differentially private for each record, then for every attack on a record

    TPR <= e^ε FPR + δ    and    TNR <= e^ε FNR + δ

(Kairouz, Oh and Viswanath 2015, Theorem 2.1). So an attack's measured rates give a lower bound of ε.

Guesses about canaries give another one from a single run, if each canary is in the training data with the probability
1/2: Steinke, Nasr, Jagielski: "Privacy Auditing with One (1) Training Run", NeurIPS 2023.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.special import expit
from scipy.stats import beta, binom, rankdata

Counts = tuple[np.ndarray, int]
"""Numbers of samples that are called positive at several thresholds, and the number of all samples."""


GUESSED = 1.0, 0.5, 0.25, 0.125
"""Shares of the canaries about which an audit guesses. Each has its own bound of ε, and the largest one is reported."""

LARGEST_EPSILON = 32.0
"""No bound from canaries is above this."""


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


class CanaryResult(NamedTuple):
    """How well the scores of canaries tell which of them were in the training data.

    Attributes:
        accuracy: The share of correct guesses about all canaries; 0.5 for random ones.
        epsilon: Lower bound of ε.
    """

    accuracy: float
    epsilon: float


def tail_of_guesses(epsilon: float, correct: int, guesses: int, canaries: int, delta: float) -> float:
    """Return an upper bound of the probability of so many correct guesses, if training is (ε, δ)-private.

    It is `f(v) + 2 m δ max_i (f(v - i) - f(v)) / i` with the numbers v of correct guesses and m of canaries, where
    `f(v)` is the probability of v or more successes in r trials with the probability `e^ε / (1 + e^ε)` (Steinke et al.
    2023, Theorem 5.2; r is the number of guesses).

    Args:
        epsilon: ε.
        correct: Number of correct guesses, v.
        guesses: Number of all guesses, r.
        canaries: Number of canaries, m, also of those about which nothing is guessed.
        delta: δ.
    """
    fewer = np.arange(1, correct + 1)
    tails = binom.sf(correct - 1 - np.arange(correct + 1), guesses, expit(epsilon))
    steepest = ((tails[1:] - tails[0]) / fewer).max(initial=0.0)
    return float(tails[0] + 2 * canaries * delta * steepest)


def epsilon_of_guesses(correct: int, guesses: int, canaries: int, delta: float, level: float) -> float:
    """Return the lower bound of ε from guesses about canaries: the largest one that the guesses refute, or 0.

    Args:
        correct: Number of correct guesses.
        guesses: Number of all guesses.
        canaries: Number of canaries.
        delta: δ.
        level: The probability that the bound is wrong, such as 0.05.
    """
    low, high = 0.0, LARGEST_EPSILON
    while high - low > 1e-9:
        middle = (low + high) / 2
        refuted = tail_of_guesses(middle, correct, guesses, canaries, delta) < level
        low, high = (middle, high) if refuted else (low, middle)
    return low


def audit_canaries(scores: np.ndarray, included: np.ndarray, delta: float, confidence: float) -> CanaryResult:
    """Return how well scores tell which canaries were in the training data, with a bound of ε.

    Of the canaries with the highest scores, the guess is that they were included, and of those with the lowest that
    they were not. There are several numbers of guesses, whose bounds hold together with the given confidence.

    Args:
        scores: Scores of the canaries, `(m,)`, m at least 2. Included ones should have higher ones.
        included: Whether they were included, `(m,)` bool.
        delta: δ of the guarantee that is tested.
        confidence: The probability with which the bound holds.
    """
    ranked, m = included[np.argsort(scores, kind="stable")], len(scores)
    halves = sorted({max(1, int(share * m) // 2) for share in GUESSED}, reverse=True)
    correct = [int((~ranked[:half]).sum() + ranked[-half:].sum()) for half in halves]
    level = (1 - confidence) / len(halves)
    bounds = [epsilon_of_guesses(v, 2 * half, m, delta, level) for v, half in zip(correct, halves, strict=True)]
    return CanaryResult(correct[0] / (2 * halves[0]), max(bounds))
