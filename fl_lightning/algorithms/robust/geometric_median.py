"""The geometric median, by the smoothed Weiszfeld algorithm.

Pillutla, Kakade, Harchaoui: "Robust Aggregation for Federated Learning", IEEE TSP 2022, Algorithm 2 (RFA).
"""

from __future__ import annotations

import torch

from fl_lightning.algorithms.aggregators import Aggregator, Weighting
from fl_lightning.algorithms.robust.rule import RobustRule
from fl_lightning.algorithms.robust.vectors import Vectors
from fl_lightning.core.arguments import count, number
from fl_lightning.core.flat_tensors import Tensors
from fl_lightning.core.round import Round


class GeometricMedian(RobustRule, Aggregator):
    """The point with the smallest sum of distances to the clients' models. It tolerates fewer attackers than half.

    Weiszfeld's algorithm starts from the weights that the clients received. In each iteration, it moves to the mean of
    the models `x_k` with weights `α_k / max(ν, ||z - x_k||)`, where `z` is the current point.

    Args:
        iterations: Number of iterations, 1 or more. The paper finds 3 to be enough.
        smoothing: ν, above 0. The paper uses 1e-6.
        weighting: `uniform`: `α_k` is the same for all clients. `samples`: the number of samples, as in the paper.
            Attackers can then send any number.

    Raises:
        ConfigError: An option is out of range.
    """

    iterations: int = count(3)
    smoothing: float = number(1e-6, "(0, inf)", "the paper uses 1e-6")
    weighting: Weighting = "uniform"

    def combine(self, vectors: Vectors, round: Round) -> Tensors:
        """Return the geometric median after the given number of iterations."""
        point = vectors.coefficients(torch.zeros(vectors.count, dtype=torch.float64), origin=1.0)
        for _ in range(self.iterations):
            distances = vectors.distances_to(point)
            point = vectors.coefficients(vectors.weights / distances.clamp(min=self.smoothing))
        return vectors.combine(point)
