"""FedPer: a shared base, and personal layers that stay on their client.

Arivazhagan, Aggarwal, Singh, Choudhary: "Federated Learning with Personalization Layers", 2019, Algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Sequence

from fl_lightning.algorithms.aggregators import Weighting
from fl_lightning.algorithms.base import Algorithm
from fl_lightning.client.weights import beginnings


class FedPer(Algorithm):
    """FedAvg of the shared layers. Personal layers, such as the head, stay on their client.

    With no personal part this is FedAvg, bit for bit.

    Bytes a round, each participant: down `model - head`, up `model - head + 8`.

    Kept by a client: its personal layers.

    Args:
        personal: Parts of the model that stay on their client, such as `head` or `encoder.2`, or patterns of its
            entries, such as `*.lora_B.*`.
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
    """

    personal: Sequence[str] = ("head",)
    weighting: Weighting = "samples"

    def __post_init__(self) -> None:
        """Keep the personal part on the client. Without one, there is a model for all clients."""
        super().__post_init__()
        self.personal = beginnings(self.personal)
        self.one_model = not self.personal
