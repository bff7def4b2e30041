"""Statistics of membership attacks, against scipy and exhaustive counts."""

import math

import numpy as np
import pytest
from scipy.stats import binomtest

from fl_lightning.privacy.audit import (
    area_under_curve,
    audit_canaries,
    audit_scores,
    clopper_pearson,
    epsilon_of_counts,
    epsilon_of_guesses,
    tail_of_guesses,
)


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (3, 10), (10, 10), (1, 1), (97, 250)])
@pytest.mark.parametrize("level", [0.025, 0.005])
def test_clopper_pearson_is_scipys(successes, trials, level):
    expected = binomtest(successes, trials).proportion_ci(1 - 2 * level, method="exact")
    (low,), (high,) = clopper_pearson(np.array([successes]), trials, level)
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_the_area_counts_pairs():
    rng = np.random.default_rng(0)
    members, others = rng.integers(0, 6, 40).astype(float), rng.integers(0, 5, 30).astype(float)
    above, equal = members[:, None] > others, members[:, None] == others
    assert area_under_curve(members, others) == pytest.approx(float((above + equal / 2).mean()), abs=1e-12)


def test_epsilon_of_rates_is_the_logarithm_of_the_bounds():
    rate = binomtest(80, 100).proportion_ci(0.95, method="exact").low
    false_rate = binomtest(5, 90).proportion_ci(0.95, method="exact").high
    hits, alarms = (np.array([80, 50, 0]), 100), (np.array([5, 45, 45]), 90)
    found = epsilon_of_counts(hits, alarms, 0.01, 0.95)
    assert found == pytest.approx([math.log((rate - 0.01) / false_rate), 0, 0])


def test_a_perfect_attack_reaches_what_the_number_of_samples_allows():
    found = audit_scores(np.arange(100, 300.0), np.arange(-100, 100.0), 0.0, 0.95)
    assert found.auc == found.advantage == 1
    assert found.epsilon == pytest.approx(math.log(0.025**0.01 / (1 - 0.025**0.01)))


def test_guesses_have_no_advantage_and_no_epsilon():
    rng = np.random.default_rng(0)
    found = audit_scores(rng.normal(size=2000), rng.normal(size=2000), 0.0, 0.95)
    assert found.auc == pytest.approx(0.5, abs=0.03)
    assert found.advantage == pytest.approx(0.0, abs=0.06)
    assert found.epsilon < 0.2


def test_samples_that_are_surely_no_members_count_as_well():
    """A tenth of the others has scores that no member has, so that TNR / FNR is large and TPR / FPR is not."""
    rng = np.random.default_rng(0)
    members, others = rng.uniform(size=2000), rng.uniform(size=2000)
    others[rng.permutation(2000)[:200]] = -1
    assert audit_scores(members, others, 0.0, 0.95).epsilon > 1.5
    assert audit_scores(-others, -members, 0.0, 0.95).epsilon > 1.5


@pytest.mark.thorough
@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_the_bound_of_randomised_response_holds_with_the_stated_confidence(epsilon):
    """The score of a sample says truthfully whether it is a member with probability e^ε / (1 + e^ε)."""
    rng = np.random.default_rng(0)
    truth = math.exp(epsilon) / (1 + math.exp(epsilon))
    found = []
    for _ in range(200):
        members, others = (rng.uniform(size=400) < share for share in (truth, 1 - truth))
        found.append(audit_scores(members.astype(float), others.astype(float), 0.0, 0.9).epsilon)
    assert np.mean(np.array(found) > epsilon) <= 0.1
    assert np.mean(found) > 0.4 * epsilon


def test_the_threshold_is_not_chosen_on_the_measured_half():
    """Scores that separate only the first half prove nothing."""
    members, others = np.zeros(400), np.zeros(400)
    members[::2] = 1
    found = audit_scores(members, others, 0.0, 0.95)
    assert found.advantage == 0
    assert found.epsilon == 0


# --- Canaries -------------------------------------------------------------------------------------------------------


def tail(successes, trials, p):
    """Return the probability of so many successes or more, as a sum over all numbers."""
    terms = (math.comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in range(max(0, successes), trials + 1))
    return math.fsum(terms)


@pytest.mark.parametrize(("correct", "guesses", "canaries"), [(0, 5, 9), (5, 5, 5), (9, 12, 40), (31, 40, 100)])
@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.0), (0.7, 1e-3), (2.0, 1e-2), (2.0, 0.0)])
def test_the_probability_of_correct_guesses_is_that_of_the_theorem(correct, guesses, canaries, epsilon, delta):
    p = math.exp(epsilon) / (1 + math.exp(epsilon))
    first = tail(correct, guesses, p)
    slopes = [(tail(correct - i, guesses, p) - first) / i for i in range(1, correct + 1)]
    expected = first + 2 * canaries * delta * max(slopes, default=0.0)
    assert tail_of_guesses(epsilon, correct, guesses, canaries, delta) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("guesses", [4, 20, 300])
def test_the_bound_of_correct_guesses_is_that_of_a_closed_form(guesses):
    """If all r guesses are correct, (e^ε / (1 + e^ε))^r is the level."""
    p = 0.05 ** (1 / guesses)
    found = epsilon_of_guesses(guesses, guesses, guesses, 0.0, 0.05)
    assert found == pytest.approx(max(0.0, math.log(p / (1 - p))), abs=1e-8)
    low = binomtest(guesses - 1, guesses).proportion_ci(0.9, method="exact").low
    found = epsilon_of_guesses(guesses - 1, guesses, guesses, 0.0, 0.05)
    assert found == pytest.approx(max(0.0, math.log(low / (1 - low))), abs=1e-8)


def test_a_larger_delta_lowers_the_bound_and_chance_gives_none():
    bounds = [epsilon_of_guesses(90, 100, 200, delta, 0.05) for delta in (0.0, 1e-5, 1e-3, 1e-1)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > bounds[2] > bounds[3] == 0.0
    assert epsilon_of_guesses(50, 100, 200, 0.0, 0.05) == 0.0


def test_the_bound_of_canaries_holds_for_a_private_mechanism():
    """Randomised response reveals each coin with the probability e^ε / (1 + e^ε): it is exactly ε-private."""
    rng, epsilon, wrong = np.random.default_rng(0), 1.0, 0
    for _ in range(60):
        coins = rng.random(60) < 0.5
        told = np.where(rng.random(60) < math.e / (1 + math.e), coins, ~coins)
        wrong += audit_canaries(told + 0.1 * rng.random(60), coins, 0.0, 0.9).epsilon > epsilon
    assert wrong <= 6


def test_scores_that_rank_all_canaries_give_the_bound_of_correct_guesses():
    coins = np.random.default_rng(0).permutation([True, False] * 50)
    found = audit_canaries(coins + np.linspace(0, 0.5, 100), coins, 0.0, 0.95)
    assert found == (1.0, epsilon_of_guesses(100, 100, 100, 0.0, 0.05 / 4))
    assert audit_canaries(-1.0 * coins, coins, 0.0, 0.95) == (0.0, 0.0)


def test_guesses_about_a_few_canaries_find_what_all_guesses_hide():
    """The extreme scores are right, and those between are random."""
    rng = np.random.default_rng(1)
    coins = np.concatenate([[True] * 40, rng.random(240) < 0.5, [False] * 40])
    found = audit_canaries(-np.arange(320.0), coins, 0.0, 0.95)
    assert found.accuracy < 0.7
    assert found.epsilon == epsilon_of_guesses(80, 80, 320, 0.0, 0.05 / 4)
    assert audit_canaries(np.arange(3.0), np.array([False, True, True]), 0.0, 0.95).accuracy == 1.0
