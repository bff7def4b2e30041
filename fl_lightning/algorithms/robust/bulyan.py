"""Bulyan: choose models by Krum, then take a mean of the values around the median.

El Mhamdi, Guerraoui, Rouault: "The Hidden Vulnerability of Distributed Learning in Byzantium", ICML 2018, Section 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fl_lightning.algorithms.aggregators import Aggregator
from fl_lightning.algorithms.robust.krum import krum_order
from fl_lightning.algorithms.robust.median import median
from fl_lightning.algorithms.robust.rule import RobustRule, Tolerated, tolerated
from fl_lightning.algorithms.robust.trimmed_mean import mean_of_lowest
from fl_lightning.algorithms.robust.vectors import Vectors
from fl_lightning.core.flat_tensors import Tensors
from fl_lightning.core.round import Round


def select_by_krum(squared_distances: Tensor, f: int) -> list[int]:
    """Return the indices of n - 2f vectors in ascending order: the best by Krum, then the best of the rest, and so on.

    Of the k vectors that are left, Krum uses the k - f - 2 nearest neighbours, but at least one.

    Args:
        squared_distances: `(n, n)`.
        f: Number of attackers to tolerate.
    """
    left = list(range(len(squared_distances)))
    chosen = []
    for _ in range(len(left) - 2 * f):
        best, *_ = krum_order(squared_distances[left][:, left], max(1, len(left) - f - 2))
        chosen.append(left.pop(best))
    return sorted(chosen)


class Bulyan(RobustRule, Aggregator):
    """Krum chooses θ = n - 2f models. Of each element, the mean of the θ - 2f values closest to their median is taken.

    It tolerates f attackers of n > 4f + 2 clients, also if they change few elements by much, which Krum may not notice.
    All clients weigh the same. With f 0 it is the unweighted mean, bit for bit.

    Args:
        f: Number of attackers to tolerate, 0 or more, or their share below 1 of a round's clients, rounded up. A round
            needs at least 4f + 3 models.

    Raises:
        ConfigError: `f` is below 0, or neither a number nor a share.
    """

    f: Tolerated = 1

    needs = (4, 3)

    def combine(self, vectors: Vectors, round: Round) -> Tensors:
        """Return the mean of the values around the median, among the vectors that Krum has chosen."""
        f = tolerated(self.f, vectors.clients)
        chosen = torch.tensor(select_by_krum(vectors.squared_distances(), f))
        keep = len(chosen) - 2 * f

        def central_mean(rows: Tensor) -> Tensor:
            return mean_of_lowest(rows, (rows - median(rows)).abs(), 0, keep)

        return vectors.map(lambda chunk: central_mean(chunk.rows[chosen]))
