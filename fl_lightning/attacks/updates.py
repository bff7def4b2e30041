"""Attacks on updates: what attackers send to the server, in place of the updates that they have trained.

In the equations, `Δ_1, ..., Δ_{n-m}` are the honest updates of a round with `n` uploads, `m` of them by attackers, and
`μ` is the mean of the honest updates.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import field
from statistics import NormalDist
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fl_lightning.attacks.base import DataAttack, UpdateAttack
from fl_lightning.core.arguments import choice, number
from fl_lightning.core.errors import ConfigError
from fl_lightning.data.federated_data import FederatedData
from fl_lightning.data.lazy import Samples
from fl_lightning.data.loaded_data import LoadedData

Perturbation = Literal["unit", "std", "sign"]


class SignFlip(UpdateAttack):
    """Each attacker reverses its own update: it sends `-scale · Δ` (Li et al. 2019, RSA, AAAI).

    Args:
        scale: Factor on the reversed update, above 0.
    """

    scale: float = number(1.0, "(0, inf)")

    omniscient = False

    def craft(self, honest: Tensor, own: Tensor, generators: Sequence[np.random.Generator]) -> Tensor:
        """Return the attackers' own updates, reversed."""
        return -self.scale * own


class GaussianNoise(UpdateAttack):
    """Each attacker sends noise in place of its update: `N(0, std² I)` (Blanchard et al. 2017, NeurIPS).

    Args:
        std: Standard deviation of each number, above 0.
    """

    std: float = number(1.0, "(0, inf)")

    omniscient = False

    def craft(self, honest: Tensor, own: Tensor, generators: Sequence[np.random.Generator]) -> Tensor:
        """Return noise of each attacker's own random numbers."""
        return self.std * torch.stack([torch.from_numpy(each.standard_normal(own.shape[1])) for each in generators])


class IPM(UpdateAttack):
    """Inner product manipulation: all attackers send `-epsilon · μ` (Xie et al. 2020, Fall of Empires, UAI).

    Args:
        epsilon: Factor on the reversed mean, above 0. Below `n / m - 1`, the mean of all updates keeps its direction.
    """

    epsilon: float = number(0.1, "(0, inf)")

    def craft(self, honest: Tensor, own: Tensor, generators: Sequence[np.random.Generator]) -> Tensor:
        """Return the reversed mean of the honest updates."""
        return -self.epsilon * honest.mean(dim=0)


class ALIE(UpdateAttack):
    """A little is enough: all attackers send `μ - z σ` (Baruch et al. 2019, NeurIPS, Algorithm 3).

    `σ` is the standard deviation of each coordinate of the honest updates (that of the population).

    Args:
        z: Number of standard deviations. By default the largest with which, for normally distributed updates, enough
            honest clients are farther from the mean that attackers and these are a majority (`largest_deviation`). This
            is 0 in small rounds, such as 2 attackers of 10 clients; a warning then says so.
    """

    z: float | None = number(None, "[0, inf)")

    warned: bool = field(default=False, init=False)

    def craft(self, honest: Tensor, own: Tensor, generators: Sequence[np.random.Generator]) -> Tensor:
        """Return the mean of the honest updates, shifted by `z` standard deviations."""
        n, m = len(honest) + len(own), len(own)
        z = largest_deviation(n, m) if self.z is None else self.z
        if z == 0 and self.z is None and not self.warned:
            self.warned = True
            what = (
                f"with {n} uploads, {m} of them by attackers, z is 0, so attackers send the mean of the honest updates"
            )
            warnings.warn(f"adversary: {what}. Set adversary.z, such as 1.5", stacklevel=2)
        return honest.mean(dim=0) - z * honest.std(dim=0, correction=0)


def largest_deviation(n: int, m: int) -> float:
    """Return ALIE's `z`: the normal quantile of `(n - m - s) / (n - m)` with `s = ⌊n/2 + 1⌋ - m`, at least 0.

    `s` is the number of honest clients that attackers need for a majority, at least 1 here: attackers that are a
    majority alone have no largest `z`.

    Args:
        n: Number of uploads.
        m: Number of attackers among them.

    Example:
        >>> round(largest_deviation(50, 12), 4), largest_deviation(10, 2)
        (0.336, 0.0)
    """
    supporters = max(1, n // 2 + 1 - m)
    share = (n - m - supporters) / (n - m)
    return max(0.0, NormalDist().inv_cdf(share)) if share > 0 else 0.0


class _Distant(UpdateAttack):
    """Base class of attacks that go as far from the mean `μ` as a bound on distances allows: `μ + γ p`.

    The condition is a quadratic inequality in `γ`, so the largest `γ` is computed directly. The paper searches for it
    by bisection.
    """

    perturbation: Perturbation = choice("unit", Perturbation)

    def craft(self, honest: Tensor, own: Tensor, generators: Sequence[np.random.Generator]) -> Tensor:
        """Return the mean of the honest updates, moved by the largest `γ`."""
        mean, direction = honest.mean(dim=0), perturbation_of(honest, self.perturbation)
        return mean + self.factor(honest, mean, direction) * direction

    def factor(self, honest: Tensor, mean: Tensor, direction: Tensor) -> float:
        """Return the largest `γ`, at least 0."""
        raise NotImplementedError


class MinMax(_Distant):
    """All attackers send `μ + γ p`, as far away as two honest updates are (Shejwalkar & Houmansadr 2021, NDSS).

    `γ` is the largest number with which no honest update is farther from the crafted one than the largest distance
    between two honest updates (Eq. 7).

    Args:
        perturbation: The direction `p` (Eq. 4): `unit`, `-μ / ||μ||`; `std`, minus the standard deviation of each
            coordinate; or `sign`, minus the sign of each coordinate of `μ`.
    """

    def factor(self, honest: Tensor, mean: Tensor, direction: Tensor) -> float:
        """Return the largest `γ` with `max_i ||μ + γ p - Δ_i||² ≤ max_ij ||Δ_i - Δ_j||²`."""
        bound = squared_distances(honest).max()
        offsets = mean - honest
        return float(largest_roots(direction.square().sum(), offsets @ direction, offsets.square().sum(1), bound).min())


class MinSum(_Distant):
    """All attackers send `μ + γ p`, whose distances are bounded in sum (Shejwalkar & Houmansadr 2021, NDSS).

    `γ` is the largest number with which the sum of squared distances to the honest updates is at most that of any
    honest update (Eq. 8).

    Args:
        perturbation: The direction `p` (Eq. 4): `unit`, `-μ / ||μ||`; `std`, minus the standard deviation of each
            coordinate; or `sign`, minus the sign of each coordinate of `μ`.
    """

    def factor(self, honest: Tensor, mean: Tensor, direction: Tensor) -> float:
        """Return the largest `γ` with `Σ_i ||μ + γ p - Δ_i||² ≤ max_i Σ_j ||Δ_i - Δ_j||²`."""
        bound = squared_distances(honest).sum(dim=1).max()
        offsets = mean - honest
        linear = (offsets @ direction).sum()
        return float(largest_roots(len(honest) * direction.square().sum(), linear, offsets.square().sum(), bound))


def perturbation_of(honest: Tensor, kind: Perturbation) -> Tensor:
    """Return the direction `p` of MinMax and MinSum, `(P,)`, from the honest updates `(n - m, P)`.

    Its length does not matter, because `γ` is the largest possible. So `unit` is not normalized.
    """
    mean = honest.mean(dim=0)
    if kind == "std":
        return -honest.std(dim=0, correction=0)
    if kind == "sign":
        return -mean.sign()
    return -mean


def squared_distances(updates: Tensor) -> Tensor:
    """Return the squared distance of each two updates, `(n, n)`. They are computed from differences."""
    return torch.stack([(updates - each).square().sum(dim=1) for each in updates])


def largest_roots(a: Tensor, b: Tensor, c: Tensor, bound: Tensor) -> Tensor:
    """Return the largest `γ` with `a γ² + 2 b γ + c ≤ bound`, elementwise. It is 0 if `a` is 0, and at least 0."""
    if a <= 0:
        return torch.zeros_like(b)
    slack = (bound - c).clamp(min=0)  # by rounding, it may be below 0
    return ((-b + (b.square() + a * slack).sqrt()) / a).clamp(min=0)


class ModelReplacement(UpdateAttack):
    """Attackers boost their updates, so that the mean of all uploads becomes their model (Bagdasaryan et al. 2020).

    Each sends `scale · Δ` with its own update (AISTATS, Eq. 3). With a weight of 1 for each upload and other updates
    near 0, the mean is the attackers' mean model. Combine it with an attack on data, such as `Backdoor`.

    Args:
        scale: Factor on the update, above 0. By default `n / m`.
        data: What the attackers train on: a `LabelFlip` or `Backdoor`, without `clients`. By default their own data.

    Raises:
        ConfigError: `clients` of `data` is set, or `scale` is not above 0.
    """

    scale: float | None = number(None, "(0, inf)")
    data: DataAttack | None = None

    omniscient = False

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if self.data and self.data.clients is not None:
            raise ConfigError("adversary.data.clients: the attackers are those of adversary.clients. Leave it out.")

    def start(self, clients: int, seed: int) -> None:
        """Choose the attackers, who also carry out the attack on data."""
        super().start(clients, seed)
        if self.data:
            self.data.attackers, self.data.seed = self.attackers, seed

    def poison(self, data: FederatedData) -> FederatedData:
        """Return the data on which clients train, changed by the attack on data."""
        return self.data.poison(data) if self.data else data

    def wanted_predictions(self, data: LoadedData) -> tuple[Samples, Tensor] | None:
        """Return the goal of the attack on data."""
        return self.data.wanted_predictions(data) if self.data else None

    def craft(self, honest: Tensor, own: Tensor, generators: Sequence[np.random.Generator]) -> Tensor:
        """Return the attackers' own updates, boosted."""
        return own * ((len(honest) + len(own)) / len(own) if self.scale is None else self.scale)
