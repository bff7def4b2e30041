"""SignGuard: leave out updates with unusual norms or signs, and clip the others.

Xu, Huang, Song, Lan: "Byzantine-robust Federated Learning through Collaborative Malicious Gradient Filtering", ICDCS
2022, Algorithm 2.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fl_lightning.algorithms.aggregators import Aggregator
from fl_lightning.algorithms.robust.clipping import clip_factors
from fl_lightning.algorithms.robust.median import median
from fl_lightning.algorithms.robust.rule import RobustRule
from fl_lightning.algorithms.robust.vectors import Vectors
from fl_lightning.core.arguments import number
from fl_lightning.core.flat_tensors import Tensors
from fl_lightning.core.round import Round


def largest_cluster(features: Tensor) -> Tensor:
    """Return the points in the largest cluster that mean shift finds, `(n,)` bool. Of equal clusters, the densest.

    Args:
        features: The points, `(n, d)`.
    """
    from sklearn.cluster import MeanShift, estimate_bandwidth  # takes half a second to import

    points = features.numpy()
    bandwidth = estimate_bandwidth(points, quantile=0.5)
    labels = MeanShift(bandwidth=max(bandwidth, 1e-6)).fit_predict(points)  # it is 0 if half of the points are equal
    return torch.from_numpy(labels == np.bincount(labels).argmax())


def sign_shares(vectors: Vectors, share: float, rng: np.random.Generator) -> Tensor:
    """Return the shares of positive, zero and negative elements among some elements of each update, `(n, 3)` float64.

    Args:
        vectors: The clients' vectors.
        share: Share of the elements to use, rounded, but at least one. They are the same for all clients.
        rng: Draws the elements.
    """
    size = sum(vectors.states[0][name].numel() for name in vectors.names)
    count = max(1, round(share * size))
    used = torch.zeros(size, dtype=torch.bool)
    used[torch.from_numpy(rng.choice(size, count, replace=False, shuffle=False))] = True
    totals, start = torch.zeros(vectors.count, 3, dtype=torch.float64), 0
    for name in vectors.names:
        for rows, origin, _ in vectors.chunks(name):
            updates = (rows - origin)[:, used[start : start + len(origin)]]
            totals += torch.stack([(updates > 0).sum(1), (updates == 0).sum(1), (updates < 0).sum(1)], dim=1)
            start += len(origin)
    return totals / count


class SignGuard(RobustRule, Aggregator):
    """Mean of the updates that two filters keep, each clipped to the median norm M of all updates.

    The first filter keeps updates with norms between `lower` M and `upper` M. The second one uses the shares of
    positive, zero and negative elements of each update, computed from random coordinates, and keeps the largest cluster
    that mean shift finds. It tolerates fewer attackers than half. All clients weigh the same.

    The paper leaves three things open. The bandwidth of mean shift is scikit-learn's estimate with the quantile 0.5, as
    in the authors' code; their code also divides each share by its largest value, which is not done here. The median of
    an even number of norms is the mean of the two in the middle. If the filters keep no update in common, the model
    does not change. The paper's variants SignGuard-Sim and SignGuard-Dist are not implemented.

    Args:
        lower: L, the smallest norm relative to the median norm, in [0, 1].
        upper: R, the largest norm relative to the median norm, 1 or more.
        share: Share of the coordinates whose signs are counted, in (0, 1].

    Raises:
        ConfigError: An option is out of range.
    """

    lower: float = number(0.1, "[0, 1]")
    upper: float = number(3.0, "[1, inf)")
    share: float = number(0.1, "(0, 1]")

    def combine(self, vectors: Vectors, round: Round) -> Tensors:
        """Return the origin plus the mean of the clipped updates that both filters keep."""
        at_origin = vectors.coefficients(torch.zeros(vectors.count, dtype=torch.float64), origin=1.0)
        norms = vectors.distances_to(at_origin)
        middle = float(median(norms[:, None]))
        kept = (norms >= self.lower * middle) & (norms <= self.upper * middle)
        kept &= largest_cluster(sign_shares(vectors, self.share, round.rng))
        if not kept.any():
            return vectors.combine(at_origin)
        factors = clip_factors(norms, middle).where(kept, 0.0)
        return vectors.combine(vectors.coefficients(factors, origin=kept.sum() - factors.sum()))
