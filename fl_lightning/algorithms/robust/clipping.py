"""Rules that limit the norm of each client's update.

- `NormBound`: Sun, Kairouz, Suresh, McMahan: "Can You Really Backdoor Federated Learning?", 2019, Section 4.
- `CenteredClipping`: Karimireddy, He, Jaggi: "Learning from History for Byzantine Robust Optimization", ICML 2021,
  Algorithm 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.algorithms.aggregators import Aggregator, Weighting
from fl_lightning.algorithms.robust.rule import CENTRE, RobustRule
from fl_lightning.algorithms.robust.vectors import Vectors
from fl_lightning.core.arguments import count, number
from fl_lightning.core.flat_tensors import Tensors
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import State


def clip_factors(norms: Tensor, bound: float) -> Tensor:
    """Return the factors `min(1, bound / norm)`, `(n,)`, that clip vectors of given norms; 1 for a norm of 0."""
    return torch.where(norms > bound, bound / norms, 1.0)


class NormBound(RobustRule, Aggregator):
    """Mean of the clients' updates, each scaled down to a norm of at most `bound`.

    It limits what a client can do in a round, and tolerates no number of attackers. With `bound` inf it is the mean,
    bit for bit.

    Args:
        bound: M, the largest norm of an update, above 0.
        weighting: Weight clients equally (`uniform`), or by their number of `samples`. Attackers can send any number.

    Raises:
        ConfigError: `bound` is not above 0.
    """

    bound: float = number(1.0, "(0, inf]")
    weighting: Weighting = "uniform"

    def combine(self, vectors: Vectors, round: Round) -> Tensors:
        """Return the origin plus the mean of the clipped updates."""
        at_origin = vectors.coefficients(torch.zeros(vectors.count, dtype=torch.float64), origin=1.0)
        kept = vectors.weights * clip_factors(vectors.distances_to(at_origin), self.bound)
        return vectors.combine(vectors.coefficients(kept, origin=(vectors.weights - kept).sum()))


class CenteredClipping(RobustRule, Aggregator):
    """Mean of the updates, each clipped to a distance of at most τ from the previous round's aggregated update `v`.

    An iteration is `v ← v + 1/n · Σ_k (Δ_k - v) · min(1, τ / ||Δ_k - v||)`, with the updates `Δ_k`. `v` is 0 before
    round 1, and part of the server's state. The paper clips the clients' momenta, which change less from round to round
    than updates do. All clients weigh the same. With `tau` inf it is the unweighted mean, bit for bit.

    Args:
        tau: τ, the largest distance, above 0. It depends on the size of the updates. The paper uses 10 for gradients.
        iterations: Number of iterations, 1 or more.

    Raises:
        ConfigError: An option is out of range.
    """

    tau: float = number(10.0, "(0, inf]")
    iterations: int = count(1)

    def initial(self, model: Tensors, num_classes: int) -> State:
        """Return an aggregated update of zero."""
        return {CENTRE: {name: torch.zeros_like(value) for name, value in model.items() if value.is_floating_point()}}

    def combine(self, vectors: Vectors, round: Round) -> Tensors:
        """Return the origin plus the new aggregated update `v`."""
        n = vectors.count
        point = vectors.coefficients(torch.zeros(n, dtype=torch.float64), centre=n)
        for _ in range(self.iterations):
            factors = clip_factors(vectors.distances_to(point), self.tau)
            point = (n - factors.sum()) / n * point  # coefficients sum to n
            point[:n] += factors
        return vectors.combine(point)

    def next_state(self, model: Tensors, origin: Tensors) -> State:
        """Return the aggregated update, from which the next round's updates are clipped."""
        floats = {name: value for name, value in model.items() if value.is_floating_point()}
        return {CENTRE: {name: v - origin[name] if name in origin else v for name, v in floats.items()}}
