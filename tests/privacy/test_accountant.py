"""Accountants against opacus, dp-accounting (in an environment of its own), closed forms and attained worst cases."""

import math

import numpy as np
import pytest
from scipy.special import gammaln, logsumexp
from scipy.stats import norm

from fl_lightning import ConfigError
from fl_lightning.privacy.accountant import (
    fixed_size_divergences,
    fixed_size_epsilon,
    poisson_epsilon,
    smallest_noise,
    tight_poisson_epsilon,
)

opacus = pytest.importorskip("opacus.accountants")

SETTINGS = [(1.0, 0.05, 500, 1e-5), (0.6, 0.1, 20, 1e-3), (4.0, 0.5, 100, 1e-6), (2.0, 1.0, 10, 1e-5)]
DP_ACCOUNTING = dict(  # from `RdpAccountant` of dp-accounting 0.6.0, which pins another version of attrs than ours
    zip(SETTINGS, (8.301589421681909, 8.274281591095889, 7.025306475503637, 8.079406222420491), strict=True)
)


@pytest.mark.parametrize("setting", SETTINGS)
def test_poisson_epsilon_is_that_of_opacus_stepped_one_by_one(setting):
    noise, rate, steps, delta = setting
    accountant = opacus.RDPAccountant()
    for _ in range(steps):
        accountant.step(noise_multiplier=noise, sample_rate=rate)
    assert poisson_epsilon(*setting) == pytest.approx(accountant.get_epsilon(delta), abs=1e-9)


@pytest.mark.parametrize("setting", SETTINGS)
def test_poisson_epsilon_is_that_of_dp_accounting(setting):
    assert poisson_epsilon(*setting) == pytest.approx(DP_ACCOUNTING[setting], rel=0.005)


def exact_gaussian_epsilon(noise, delta):
    """Return the exact epsilon of the Gaussian mechanism (Balle and Wang 2018)."""
    low, high = 0.0, 100.0
    for _ in range(100):
        e = (low + high) / 2
        spent = norm.cdf(0.5 / noise - e * noise) - math.exp(e) * norm.cdf(-0.5 / noise - e * noise)
        low, high = (e, high) if spent > delta else (low, e)
    return high


@pytest.mark.parametrize("steps", [1, 4])
def test_prv_of_full_participation_is_the_exact_gaussian_mechanism(steps):
    exact = exact_gaussian_epsilon(2 / math.sqrt(steps), 1e-5)  # steps compose to one of a smaller noise
    assert exact <= tight_poisson_epsilon(2.0, 1.0, steps, 1e-5) <= exact + 0.02  # it is computed to 0.01
    assert poisson_epsilon(2.0, 1.0, steps, 1e-5) >= exact


def test_prv_is_a_lower_bound_than_rdp_and_falls_back_to_it(monkeypatch):
    assert 7 < tight_poisson_epsilon(1.0, 0.05, 500, 1e-5) < 8.2
    large = (0.5, 0.5, 10, 1e-5)
    assert tight_poisson_epsilon(*large) == poisson_epsilon(*large) > 30

    def fail(*args, **kwargs):
        raise RuntimeError("Discrete mean differs significantly from continuous mean")

    monkeypatch.setattr(opacus.PRVAccountant, "get_epsilon", fail)
    assert tight_poisson_epsilon(1.0, 0.05, 500, 1e-5) == poisson_epsilon(1.0, 0.05, 500, 1e-5)


@pytest.mark.parametrize("epsilon", [poisson_epsilon, tight_poisson_epsilon, fixed_size_epsilon])
def test_no_steps_cost_nothing_and_no_noise_protects_nobody(epsilon):
    assert epsilon(1.0, 0.1, 0, 1e-5) == epsilon(0.0, 0.1, 0, 1e-5) == 0
    assert epsilon(0.0, 0.1, 1, 1e-5) == math.inf


def divergence(log_p, log_q, order):
    """Return the Renyi divergence of two log densities on a fine grid."""
    grid, step = np.linspace(-60, 60, 60_001, retstep=True)
    return logsumexp(order * log_p(grid) + (1 - order) * log_q(grid), b=step) / (order - 1)


def mixture(rate, mean, scale):
    """Return the log density of a normal distribution, whose mean is 0 or, with a probability, `mean`."""
    return lambda x: np.logaddexp(
        math.log1p(-rate) + norm.logpdf(x, 0, scale), math.log(rate) + norm.logpdf(x, mean, scale)
    )


@pytest.mark.parametrize("rate", [0.05, 0.5])
@pytest.mark.parametrize("order", [1.5, 5.0])
@pytest.mark.parametrize("noise", [1.0, 3.0])
def test_fixed_size_divergences_bound_pairs_of_neighbours_and_are_nearly_attained(rate, order, noise):
    """One sends 1 or instead -1, the others send `rest`. Without the one, another of the others takes part."""
    bound, worst = fixed_size_divergences(noise, rate, (order,))[0], 0.0
    for rest, replaced in ((-1.0, -1.0), (0.0, -1.0), (-0.5, -1.0)):
        pair = [mixture(rate, sent - rest, noise) for sent in (1.0, replaced)]
        for log_p, log_q in (pair, pair[::-1]):
            worst = max(worst, divergence(log_p, log_q, order))
    assert worst <= bound * (1 + 1e-9)
    assert worst >= divergence(mixture(rate, 2.0, noise), mixture(rate, 0.0, noise), order)
    assert bound <= 1.5 * worst


def test_everybody_at_once_is_the_gaussian_mechanism():
    orders = [1.5, 2, 8, 63]
    np.testing.assert_allclose(
        fixed_size_divergences(3.0, 1.0, tuple(orders)), [2 * a / 3.0**2 for a in orders], rtol=1e-9
    )


def wang(rate, scale, order):
    """Return the bound of Wang, Balle and Kasiviswanathan (2019, theorem 9) for Gaussian noise of relative size."""
    log_choose = gammaln(order + 1) - gammaln(np.arange(order + 1) + 1) - gammaln(order - np.arange(order + 1) + 1)
    single = lambda j: j / (2 * scale**2)  # noqa: E731
    second = min(math.log(4 * math.expm1(single(2))), single(2) + math.log(2))
    terms = [0.0, 2 * math.log(rate) + log_choose[2] + second]
    terms += [j * math.log(rate) + log_choose[j] + math.log(2) + (j - 1) * single(j) for j in range(3, order + 1)]
    return logsumexp(terms) / (order - 1)


@pytest.mark.parametrize("noise", [1.0, 2.0, 6.0])
def test_the_bound_is_below_that_of_wang_balle_and_kasiviswanathan(noise):
    orders = range(2, 12)
    ours = fixed_size_divergences(noise, 0.05, tuple(orders))
    theirs = [wang(0.05, noise / 2, order) for order in orders]  # to replace one changes the sum by 2 C
    assert (ours < theirs).all()


def test_fifty_of_a_thousand_clients_for_500_rounds():
    """The figures of docs/privacy.md. Rounds of a fixed size cost as much as Poisson rounds with half of the noise."""
    assert poisson_epsilon(1.0, 0.05, 500, 1e-5) == pytest.approx(8.3, abs=0.05)
    assert tight_poisson_epsilon(1.0, 0.05, 500, 1e-5) == pytest.approx(7.5, abs=0.05)
    assert fixed_size_epsilon(1.0, 0.05, 500, 1e-5) == pytest.approx(49.9, abs=0.05)
    assert fixed_size_epsilon(2.0, 0.05, 500, 1e-5) == pytest.approx(9.7, abs=0.05)
    for noise in (1.0, 2.0):
        assert fixed_size_epsilon(noise, 0.05, 500, 1e-5) >= poisson_epsilon(noise / 2, 0.05, 500, 1e-5)


@pytest.mark.parametrize("epsilon", [poisson_epsilon, fixed_size_epsilon])
@pytest.mark.parametrize("wanted", [0.8, pytest.param(8.0, marks=pytest.mark.thorough)])
def test_smallest_noise_is_just_enough(epsilon, wanted):
    noise = smallest_noise(wanted, lambda noise: epsilon(noise, 0.1, 50, 1e-5))
    assert epsilon(noise, 0.1, 50, 1e-5) <= wanted < epsilon(0.999 * noise, 0.1, 50, 1e-5)


def test_too_small_an_epsilon_is_refused():
    with pytest.raises(ConfigError, match=r"^epsilon: "):
        smallest_noise(1e-3, lambda noise: poisson_epsilon(noise, 0.1, 50, 1e-5))


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "opacus.accountants", None)
    with pytest.raises(ConfigError, match=r"^privacy: .*fl-lightning\[privacy\]"):
        poisson_epsilon(1.0, 0.1, 1, 1e-5)
