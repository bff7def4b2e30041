"""Krum and Multi-Krum: choose the models that are closest to their neighbours.

Blanchard, El Mhamdi, Guerraoui, Stainer: "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent",
NeurIPS 2017, Section 4 (Krum) and Section 6 (Multi-Krum).
"""

from __future__ import annotations

from dataclasses import field

import torch
from torch import Tensor

from fl_lightning.algorithms.aggregators import Aggregator
from fl_lightning.algorithms.robust.rule import RobustRule, Tolerated, tolerated
from fl_lightning.algorithms.robust.vectors import Vectors
from fl_lightning.core.arguments import number
from fl_lightning.core.flat_tensors import Tensors
from fl_lightning.core.round import Round


def krum_order(squared_distances: Tensor, neighbours: int) -> list[int]:
    """Return the indices of n vectors by their Krum scores, the lowest first.

    The score of a vector is the sum of its squared distances to its nearest neighbours. Of equal scores, the smaller
    sum of all squared distances is first: two vectors that are each other's only neighbour have equal scores.

    Args:
        squared_distances: `(n, n)`.
        neighbours: Number of neighbours, without the vector itself; `n - f - 2` in the paper.
    """
    others = squared_distances.clone().fill_diagonal_(torch.inf)
    scores = others.sort(dim=1).values[:, :neighbours].sum(dim=1).tolist()
    totals = squared_distances.sum(dim=1).tolist()
    return sorted(range(len(scores)), key=lambda i: (scores[i], totals[i]))


class MultiKrum(RobustRule, Aggregator):
    """Mean of the m models with the lowest Krum scores. It tolerates f attackers of n > 2f + 2 clients.

    The score of a model is the sum of its squared distances to its n - f - 2 nearest neighbours. All clients weigh the
    same. With f 0 and the default m it is the unweighted mean, bit for bit.

    Args:
        f: Number of attackers to tolerate, 0 or more, or their share below 1 of a round's clients, rounded up. A round
            needs at least 2f + 3 models.
        m: Number of models to average; by default n - f. The paper's guarantee is for at most n - f - 2.

    Raises:
        ConfigError: `f` is below 0, or neither a number nor a share, or `m` below 1.
    """

    f: Tolerated = 1
    m: int | None = number(None, "[1, inf)")

    needs = (2, 3)

    def shortage(self, count: int, clients: int | None = None) -> str | None:
        """Return why a number of models is too small, or None."""
        if self.m is not None and self.m > count:
            return f"{type(self).__name__} with m {self.m} needs at least {self.m} models a round, not {count}"
        return super().shortage(count, clients)

    def combine(self, vectors: Vectors, round: Round) -> Tensors:
        """Return the mean of the vectors with the lowest scores."""
        n, f = vectors.count, tolerated(self.f, vectors.clients)
        order = krum_order(vectors.squared_distances(), n - f - 2)
        chosen = torch.zeros(n, dtype=torch.float64)
        chosen[order[: n - f if self.m is None else self.m]] = 1.0
        return vectors.combine(vectors.coefficients(chosen))


class Krum(MultiKrum):
    """The model with the lowest Krum score: that of one client. It tolerates f attackers of n > 2f + 2 clients.

    The score of a model is the sum of its squared distances to its n - f - 2 nearest neighbours.

    Args:
        f: Number of attackers to tolerate, 0 or more, or their share below 1 of a round's clients, rounded up. A round
            needs at least 2f + 3 models.

    Raises:
        ConfigError: `f` is below 0, or neither a number nor a share.
    """

    m: int | None = field(default=1, init=False)
