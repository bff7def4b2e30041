"""FFA-LoRA: the factors `A` stay at their random start, and only the factors `B` are trained and sent.

Sun, Li, Li, Ding: "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024, Section 4.

All clients have the same `A`, so the mean of the `B_k` gives the mean of the products: `mean(B_k) A = mean(B_k A)`.
"""

from __future__ import annotations

from torch import nn

from fl_lightning.algorithms.adapters.fedit import FedIT
from fl_lightning.algorithms.adapters.low_rank import belongs_to_a
from fl_lightning.core.message import Tensors


class FFALoRA(FedIT):
    """FedAvg of the factors `B`. The factors `A` keep their initial random values, and are not sent.

    The head, if the model trains one, is averaged as in FedAvg.

    Bytes a round, each participant: down `trained - A`, up `trained - A + 8`.

    Args:
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
    """

    def prepare_network(self, backbone: nn.Module) -> None:
        """Freeze the factors `A`.

        Raises:
            ConfigError: The network has no adapters, or others than LoRA's on linear layers and convolutions.
        """
        for name, parameter in backbone.named_parameters():
            if belongs_to_a(name):
                parameter.requires_grad_(False)
        super().prepare_network(backbone)

    def _shared(self, backbone: nn.Module) -> Tensors:
        """Return the state dict entries that clients and server exchange, without the factors `A`."""
        return {name: value for name, value in super()._shared(backbone).items() if not belongs_to_a(name)}
