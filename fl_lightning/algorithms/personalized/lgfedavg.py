"""LG-FedAvg: each client keeps its own representation, and all clients share the head.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency: "Think Locally, Act Globally: Federated Learning with
Local and Global Representations", 2020, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from fl_lightning.algorithms.personalized.fedper import FedPer


class LGFedAvg(FedPer):
    """FedAvg of the head alone. Each client keeps its own encoder.

    FedPer is the opposite: it shares the encoder, and each client keeps its own head.

    With no personal part this is FedAvg, bit for bit.

    Bytes a round, each participant: down `model - encoder`, up `model - encoder + 8`.

    Kept by a client: its personal layers.

    Args:
        personal: Parts of the model that stay on their client, or patterns of its entries. The rest, by default the
            head, is shared.
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
    """

    personal: Sequence[str] = ("encoder",)
