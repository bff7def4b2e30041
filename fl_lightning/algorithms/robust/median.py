"""The coordinate-wise median.

Yin, Chen, Ramchandran, Bartlett: "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018,
Definition 1.
"""

from __future__ import annotations

from torch import Tensor

from fl_lightning.algorithms.aggregators import Aggregator
from fl_lightning.algorithms.robust.rule import RobustRule
from fl_lightning.algorithms.robust.vectors import Vectors
from fl_lightning.core.flat_tensors import Tensors
from fl_lightning.core.round import Round


def median(rows: Tensor) -> Tensor:
    """Return the median of each column; of an even number of rows, the mean of the two middle values.

    Args:
        rows: `(n, c)`.
    """
    values, n = rows.sort(dim=0).values, len(rows)
    low, high = values[(n - 1) // 2], values[n // 2]
    return low if n % 2 else (low + high) / 2


class Median(RobustRule, Aggregator):
    """Coordinate-wise median of the clients' models. It tolerates fewer attackers than half of the clients.

    All clients weigh the same.
    """

    def combine(self, vectors: Vectors, round: Round) -> Tensors:
        """Return the median of each element."""
        return vectors.map(lambda chunk: median(chunk.rows))
