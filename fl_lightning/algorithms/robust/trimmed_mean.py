"""The coordinate-wise trimmed mean.

Yin, Chen, Ramchandran, Bartlett: "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018,
Definition 2.
"""

from __future__ import annotations

from torch import Tensor

from fl_lightning.algorithms.aggregators import Aggregator
from fl_lightning.algorithms.robust.rule import RobustRule, Tolerated, tolerated
from fl_lightning.algorithms.robust.vectors import Vectors
from fl_lightning.core.flat_tensors import Tensors
from fl_lightning.core.round import Round


def mean_of_lowest(rows: Tensor, keys: Tensor, skip: int, keep: int) -> Tensor:
    """Return for each column the mean of the elements whose keys are the next `keep` after the `skip` lowest.

    The sum is in the order of the rows, so that without trimming it is that of a mean, bit for bit. Of equal keys, that
    of the first row counts as the lowest.

    Args:
        rows: `(n, c)`.
        keys: `(n, c)`.
        skip: Number of elements to leave out at the low end.
        keep: Number of elements to average, 1 or more.
    """
    ranks = keys.argsort(dim=0, stable=True).argsort(dim=0)
    kept = (ranks >= skip) & (ranks < skip + keep)
    first, *others = rows.where(kept, 0.0)
    total = first.clone()
    for row in others:
        total += row
    return total / keep


class TrimmedMean(RobustRule, Aggregator):
    """Coordinate-wise mean without the f largest and the f smallest values. It tolerates f attackers, below half.

    All clients weigh the same. With f 0 it is the unweighted mean, bit for bit.

    Args:
        f: Number of attackers to tolerate, 0 or more, or their share below 1 of a round's clients, rounded up. A round
            needs at least 2f + 1 models.

    Raises:
        ConfigError: `f` is below 0, or neither a number nor a share.
    """

    f: Tolerated = 1

    needs = (2, 1)

    def combine(self, vectors: Vectors, round: Round) -> Tensors:
        """Return the trimmed mean of each element."""
        f = tolerated(self.f, vectors.clients)
        return vectors.map(lambda chunk: mean_of_lowest(chunk.rows, chunk.rows, f, vectors.count - 2 * f))
