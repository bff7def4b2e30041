"""FedPer without a server: peers average feature extractors, and each keeps its own head.

Arivazhagan, Aggarwal, Singh, Choudhary: "Federated Learning with Personalization Layers", 2019, between peers as in the
tables of Zhu, Fan, Xie: "UA-PDFL: A Personalized Approach for Decentralized Federated Learning", 2024.
"""

from __future__ import annotations

from collections.abc import Sequence

from fl_lightning.algorithms.aggregators import Weighting
from fl_lightning.algorithms.base import Buffers
from fl_lightning.algorithms.decentralized.peers import PeerAlgorithm
from fl_lightning.algorithms.decentralized.topology import Graph
from fl_lightning.client.module import LossTerm
from fl_lightning.client.weights import beginnings


class PeerFedPer(PeerAlgorithm):
    """FedPer between peers: gossip averaging of all layers except the head, which never leaves its client.

    With `personal` empty this is `PeerAlgorithm`, bit for bit.

    Bytes a round, each participant: down `(n_com or N - 1) * (model - head + 8)`, up `0`.

    Args:
        personal: Parts of the model that stay on their client, such as `head` or `encoder.2`.

    Raises:
        ConfigError: The model does not have a personal part.
    """

    def __init__(
        self,
        personal: Sequence[str] = ("head",),
        n_com: int | None = None,
        graph: Graph | None = None,
        weighting: Weighting = "samples",
        loss_terms: list[LossTerm] | None = None,
        buffers: Buffers = "average",
    ) -> None:
        super().__init__(n_com, graph, loss_terms, buffers, weighting)
        self.personal = beginnings(personal)
        self.one_model = not self.personal
