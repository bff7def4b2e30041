"""FedIT: FedAvg of LoRA adapters.

Zhang, Vahidian, Kuo, Li, Zhang, Yu, Wang, Chen: "Towards Building the Federated GPT: Federated Instruction Tuning",
ICASSP 2024, Algorithm 1.

The mean of the factors, `mean(B_k) mean(A_k)`, is not the mean of the products `B_k A_k`. The other methods of this
family differ in what they do about it.
"""

from __future__ import annotations

import numpy as np
from torch import nn

from fl_lightning.algorithms.adapters.low_rank import adapter_layers
from fl_lightning.algorithms.adapters.server import KeepsFactors
from fl_lightning.algorithms.aggregators import Weighting
from fl_lightning.algorithms.base import Algorithm
from fl_lightning.core.state_dicts import State


class FedIT(Algorithm):
    """FedAvg of a model's LoRA adapters and of all else that it trains, such as the head.

    This is FedAvg, bit for bit. The only difference is that it refuses a model without adapters.

    Bytes a round, each participant: down `trained`, up `trained + 8`.

    Args:
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
    """

    weighting: Weighting = "samples"

    def prepare_network(self, backbone: nn.Module) -> None:
        """Check that the network has LoRA adapters.

        Raises:
            ConfigError: The network has no adapters, or others than LoRA's on linear layers and convolutions.
        """
        adapter_layers(backbone)

    def initial_state(self, backbone: nn.Module, num_classes: int, clients: int, rng: np.random.Generator) -> State:
        """Return the initial model. An aggregator that computes with the factors first finds their layers.

        Raises:
            ConfigError: A rank of the aggregator is below 1, or above that of the model's adapters.
        """
        if isinstance(self.aggregator, KeepsFactors):
            self.aggregator.find_layers(backbone)
        return super().initial_state(backbone, num_classes, clients, rng)
