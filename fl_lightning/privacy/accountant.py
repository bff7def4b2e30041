"""Accountants: the epsilon that a number of noisy steps has cost, and the noise that a wanted epsilon needs.

A step sums vectors, one for each participant (a client or a sample), each of Euclidean norm at most C, and adds
Gaussian noise of standard deviation z C to each element of the sum. z is the noise multiplier. All steps together are
(ε, δ)-differentially private. What ε compares depends on how the participants of a step are drawn:

- Poisson sampling: each participates independently with probability q. ε compares data with and without one of them.
- Fixed size: a uniformly drawn set of constant size. ε compares data in which one of them is replaced by any other.

The functions use the accountants of the package opacus (`pip install 'fl-lightning[privacy]'`), and nothing else of it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

import numpy as np

from fl_lightning.core.errors import ConfigError, require_extra
from fl_lightning.core.lazy_import import load

MOST_NOISE = 1e4
"""Largest noise multiplier that `smallest_noise` tries."""

MOST_FOR_PRV = 20.0
"""Largest ε by Rényi DP for which ε is also computed by PRV, whose memory and time grow with ε."""


def poisson_epsilon(noise: float, rate: float, steps: int, delta: float) -> float:
    """Return ε of steps with Poisson sampling, by Rényi differential privacy (Mironov, Talwar and Zhang 2019).

    Args:
        noise: z, the noise multiplier, from 0.
        rate: q, the probability to participate in a step, in (0, 1].
        steps: Number of steps, from 0.
        delta: δ, in (0, 1).

    Returns:
        ε, for data with and without one participant. Infinity if `noise` is 0, and 0 if `steps` is 0.

    Raises:
        ConfigError: opacus is not installed.
    """
    return _epsilon(poisson_divergences, noise, rate, steps, delta)


def tight_poisson_epsilon(noise: float, rate: float, steps: int, delta: float) -> float:
    """Return ε of steps with Poisson sampling, by composing privacy losses numerically (PRV; Gopi et al. 2021).

    This bound is about a tenth lower than that of `poisson_epsilon`, which has the same arguments, and takes longer to
    compute. If that of `poisson_epsilon` is above 20, or if the computation fails, the result is the latter.
    """
    bound = poisson_epsilon(noise, rate, steps, delta)
    if not 0 < bound <= MOST_FOR_PRV:
        return bound
    try:
        accountant = _opacus("accountants").PRVAccountant()
        accountant.history = [(noise, rate, steps)]
        with _without_warnings():
            return min(bound, float(accountant.get_epsilon(delta=delta)))
    except (ValueError, RuntimeError):  # its discretization failed
        return bound


def fixed_size_epsilon(noise: float, rate: float, steps: int, delta: float) -> float:
    """Return ε of steps with a fixed number of participants, by Rényi differential privacy.

    To replace a participant changes the sum by up to 2 C. So the noise relative to this change is z / 2, and ε is much
    larger than with Poisson sampling.

    Args:
        noise: z, the noise multiplier, from 0.
        rate: q, the share of all that participate in a step, in (0, 1].
        steps: Number of steps, from 0.
        delta: δ, in (0, 1).

    Returns:
        ε, for data in which one participant is replaced. Infinity if `noise` is 0, and 0 if `steps` is 0.

    Raises:
        ConfigError: opacus is not installed.
    """
    return _epsilon(fixed_size_divergences, noise, rate, steps, delta)


@cache
def poisson_divergences(noise: float, rate: float, orders: tuple[float, ...]) -> np.ndarray:
    """Return one step's Rényi divergences with Poisson sampling, for data with and without one participant.

    Args:
        noise: z, the noise multiplier, above 0.
        rate: q, the probability to participate, in (0, 1].
        orders: The orders a, each above 1.

    Returns:
        The divergences, one for each order.
    """
    analysis = _opacus("accountants.analysis.rdp")
    return analysis.compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=list(orders))


@cache
def fixed_size_divergences(noise: float, rate: float, orders: tuple[float, ...]) -> np.ndarray:
    """Return bounds of one step's Rényi divergences with a fixed number of participants, one of whom is replaced.

    Let P and Q be the step's outputs if the replaced one participates for sure, with and without the replacement, in
    the worst case: normal distributions of standard deviation z / 2 with means 1 and 0. Let L = 1 - q + q P(x) / Q(x).
    With a uniformly drawn set of participants, each hockey-stick divergence, in both directions, is at most

        H(γ) = E_Q[max(L - γ, 0)],  γ >= 1

    (Balle, Barthe and Gaboardi 2018, theorem 9). A Rényi divergence is an integral over hockey-stick divergences of
    both directions (Sason and Verdú 2016, equation 80), so the divergence D of order a satisfies

        exp((a - 1) D) <= 1 + ∫_1^∞ a (a - 1) (γ^(a-2) + γ^(-a-1)) H(γ) dγ  =  E_Q[L^a] + E_Q[g(L)]

    with `g(L) = (a - 1) L - a + L^(1-a)` for L > 1, and `g(L) = -(L^a - a L + a - 1)` otherwise. The first expectation
    is that of Poisson sampling with noise z / 2. It is attained: all others send the same vector of norm C, and the
    replaced one sends the same or its opposite.

    Args:
        noise: z, the noise multiplier, above 0.
        rate: q, the share of all that participate, in (0, 1].
        orders: The orders a, each above 1.

    Returns:
        The bounds of D, one for each order.
    """
    a, scale = np.asarray(orders, dtype=np.float64), noise / 2
    poisson, integrate = poisson_divergences(scale, rate, orders), load("scipy.integrate")

    def correction(x: float) -> np.ndarray:
        log_p, log_q = (-0.5 * ((x - mean) / scale) ** 2 - math.log(scale * math.sqrt(2 * math.pi)) for mean in (1, 0))
        mixed = math.log(rate) + log_p if rate == 1 else np.logaddexp(math.log1p(-rate) + log_q, math.log(rate) + log_p)
        ratio = mixed - log_q
        if ratio > 0:
            return (a - 1) * np.exp(mixed) - a * np.exp(log_q) + np.exp((1 - a) * ratio + log_q)
        return -(np.exp(a * ratio + log_q) - a * np.exp(mixed) + (a - 1) * np.exp(log_q))

    reach = 40 * scale  # beyond it, normal densities are 0 in float64
    terms, _ = integrate.quad_vec(correction, -reach, 1 + reach, points=[0.0, 0.5, 1.0], epsabs=1e-14, epsrel=1e-10)
    exponents = (a - 1) * poisson
    return np.maximum(exponents + np.log1p(terms * np.exp(-exponents)), 0) / (a - 1)


def smallest_noise(wanted: float, epsilon_of: Callable[[float], float]) -> float:
    """Return the smallest noise multiplier with which ε is at most `wanted`, at most 0.01 % too large.

    Args:
        wanted: The wanted ε, above 0.
        epsilon_of: Returns ε for a noise multiplier, such as `lambda noise: poisson_epsilon(noise, 0.1, 100, 1e-5)`.

    Raises:
        ConfigError: No noise multiplier up to 10,000 is enough.
    """
    low = high = 0  # powers of 2
    while epsilon_of(2.0**high) > wanted:
        high += 1
        if 2**high > MOST_NOISE:
            fix = "Increase epsilon or delta, or train for fewer rounds."
            raise ConfigError(f"epsilon: {wanted:g} needs a noise multiplier above {MOST_NOISE:g}. {fix}")
    while epsilon_of(2.0**low) <= wanted:
        low -= 1
    tolerance = 5e-5
    power = load("scipy.optimize").brentq(lambda power: epsilon_of(2.0**power) - wanted, low, high, xtol=tolerance)
    return 2.0 ** (power + tolerance)


def _epsilon(
    divergences: Callable[[float, float, tuple[float, ...]], np.ndarray],
    noise: float,
    rate: float,
    steps: int,
    delta: float,
) -> float:
    """Return ε of a number of steps, at least 0, from one step's Rényi divergences at the orders that opacus takes."""
    if not steps or not noise:
        return math.inf if steps else 0.0
    orders = tuple(_opacus("accountants").RDPAccountant.DEFAULT_ALPHAS)
    analysis = _opacus("accountants.analysis.rdp")
    with _without_warnings():
        of_all = steps * divergences(noise, rate, orders)
        return max(0.0, float(analysis.get_privacy_spent(orders=orders, rdp=of_all, delta=delta)[0]))


def _opacus(name: str) -> ModuleType:
    """Return a module of opacus.

    Raises:
        ConfigError: opacus is not installed.
    """
    with require_extra("privacy", "privacy: the accountant needs opacus"):
        return load(f"opacus.{name}")


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Context that hides opacus' warnings: bounds are valid, too, if the best order is the first or last one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
