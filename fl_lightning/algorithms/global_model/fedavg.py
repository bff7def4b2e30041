"""FedAvg: local SGD, then the mean of the clients' weights.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017, Algorithm 1.
"""

from __future__ import annotations

from fl_lightning.algorithms.aggregators import Weighting
from fl_lightning.algorithms.base import Algorithm


class FedAvg(Algorithm):
    """Clients train with local SGD, and the server averages their weights.

    Bytes a round, each participant: down `model`, up `model + 8`.

    Args:
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
    """

    weighting: Weighting = "samples"
