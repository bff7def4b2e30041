"""FedPer without a server: peers average feature extractors, and each keeps its own head.

Arivazhagan, Aggarwal, Singh, Choudhary: "Federated Learning with Personalization Layers", 2019, between peers as in the
tables of Zhu, Fan, Xie: "UA-PDFL: A Personalized Approach for Decentralized Federated Learning", 2024.
"""

from __future__ import annotations

from collections.abc import Sequence

from fl_lightning.algorithms.decentralized.peers import PeerAlgorithm
from fl_lightning.client.weights import beginnings


class PeerFedPer(PeerAlgorithm):
    """FedPer between peers: gossip averaging of all layers except the head, which never leaves its client.

    With `personal` empty this is `PeerAlgorithm`, bit for bit.

    Bytes a round, each participant: down `(n_com or N - 1) * (model - head + 8)`, up `0`.

    Kept by a client: its model.

    Args:
        personal: Parts of the model that stay on their client, such as `head` or `encoder.2`, or patterns of its
            entries, such as `*.lora_B.*`.

    Raises:
        ConfigError: The model does not have a personal part.
    """

    personal: Sequence[str] = ("head",)

    def __post_init__(self) -> None:
        """Keep the personal part on the client. Without one, there is a model for all clients."""
        super().__post_init__()
        self.personal = beginnings(self.personal)
        self.one_model = not self.personal
