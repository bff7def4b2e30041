"""FedAvg: local SGD, then the mean of the clients' weights.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017, Algorithm 1.
"""

from __future__ import annotations

from fl_lightning.algorithms.aggregators import Aggregator, WeightedMean, Weighting
from fl_lightning.algorithms.base import Algorithm, Buffers
from fl_lightning.client.module import LossTerm


class FedAvg(Algorithm):
    """Clients train with local SGD, and the server averages their weights.

    Bytes a round, each participant: down `model`, up `model + 8`.

    Args:
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
    """

    def __init__(
        self,
        weighting: Weighting = "samples",
        loss_terms: list[LossTerm] | None = None,
        aggregator: Aggregator | None = None,
        buffers: Buffers = "average",
    ) -> None:
        super().__init__(loss_terms, aggregator or WeightedMean(weighting), buffers)
