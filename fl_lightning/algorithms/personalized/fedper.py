"""FedPer: a shared base, and personal layers that stay on their client.

Arivazhagan, Aggarwal, Singh, Choudhary: "Federated Learning with Personalization Layers", 2019, Algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Sequence

from fl_lightning.algorithms.aggregators import Aggregator, WeightedMean, Weighting
from fl_lightning.algorithms.base import Algorithm, Buffers
from fl_lightning.client.module import LossTerm
from fl_lightning.client.weights import beginnings


class FedPer(Algorithm):
    """FedAvg of the shared layers. Personal layers, such as the head, stay on their client.

    With no personal part this is FedAvg, bit for bit.

    Bytes a round, each participant: down `model - head`, up `model - head + 8`.

    Args:
        personal: Parts of the model that stay on their client, such as `head` or `encoder.3`.
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
    """

    def __init__(
        self,
        personal: Sequence[str] = ("head",),
        weighting: Weighting = "samples",
        loss_terms: list[LossTerm] | None = None,
        aggregator: Aggregator | None = None,
        buffers: Buffers = "average",
    ) -> None:
        super().__init__(loss_terms, aggregator or WeightedMean(weighting), buffers)
        self.personal = beginnings(personal)
        self.one_model = not self.personal
