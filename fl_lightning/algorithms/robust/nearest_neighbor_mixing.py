"""Nearest-neighbour mixing: replace each model by the mean of its nearest neighbours before a robust rule.

Allouah, Farhadkhani, Guerraoui, Gupta, Pinot, Stephan: "Fixing by Mixing: A Recipe for Optimal Byzantine ML under
Heterogeneity", AISTATS 2023, Algorithm 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.algorithms.aggregators import Aggregator
from fl_lightning.algorithms.robust.median import Median
from fl_lightning.algorithms.robust.rule import PreAggregator, Tolerated, tolerated
from fl_lightning.algorithms.robust.vectors import Vectors
from fl_lightning.core.flat_tensors import Tensors
from fl_lightning.core.round import Round


def nearest(squared_distances: Tensor, count: int) -> Tensor:
    """Return the nearest vectors of each vector, itself included, `(n, n)`, 1 or 0. Of equal distances, the first.

    Args:
        squared_distances: `(n, n)`.
        count: Number of vectors.
    """
    order = squared_distances.clone().fill_diagonal_(-1.0).argsort(dim=1, stable=True)
    return torch.zeros_like(squared_distances).scatter_(1, order[:, :count], 1.0)


class NearestNeighborMixing(PreAggregator, Aggregator):
    """Replace each model by the mean of its n - f nearest models, itself included, then apply a robust rule.

    All clients weigh the same.

    Args:
        inner: The robust rule; `Median` by default. Set its own f, too.
        f: Number of attackers to tolerate, 0 or more, or their share below 1 of a round's clients, rounded up. A round
            needs at least 2f + 1 models.

    Raises:
        ConfigError: `f` is below 0, or neither a number nor a share, or `inner` is no robust rule, or weights clients.
    """

    f: Tolerated = 1

    needs = (2, 1)
    default_rule = Median

    def shortage(self, count: int, clients: int | None = None) -> str | None:
        """Return why a number of models is too small for this or the inner rule, or None."""
        return super().shortage(count, clients) or self.rule.shortage(count, clients)

    def combine(self, vectors: Vectors, round: Round) -> Tensors:
        """Return the inner rule's mean of the neighbourhoods' means."""
        members = nearest(vectors.squared_distances(), vectors.count - tolerated(self.f, vectors.clients))
        return self.rule.combine(vectors.averaged(members), round)
