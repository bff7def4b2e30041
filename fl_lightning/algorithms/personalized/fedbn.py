"""FedBN: BatchNorm layers stay on their client, everything else is averaged.

Li, Jiang, Zhang, Kamp, Dou: "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021,
Algorithm 1.
"""

from __future__ import annotations

from dataclasses import field

from torch import nn

from fl_lightning.algorithms.aggregators import Weighting
from fl_lightning.algorithms.base import Algorithm, Buffers
from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import OptimizerFactory, SchedulerFactory
from fl_lightning.client.weights import beginnings
from fl_lightning.core.errors import ConfigError
from fl_lightning.models.layers import BATCH_NORMS


class FedBN(Algorithm):
    """FedAvg of all layers except BatchNorm layers, which stay on their client with their running statistics.

    `buffers: local` of other methods keeps only the statistics on the client.

    Bytes a round, each participant: down `model - norm`, up `model - norm + 8`.

    Args:
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).

    Raises:
        ConfigError: The model has no BatchNorm layer.
    """

    weighting: Weighting = "samples"
    buffers: Buffers = field(default="average", init=False)

    one_model = False

    def client_module(
        self,
        backbone: nn.Module,
        optimizer: OptimizerFactory | None = None,
        lr_scheduler: SchedulerFactory | None = None,
    ) -> ClientModule:
        """Return a client's LightningModule around a backbone. The BatchNorm layers of the backbone are personal."""
        self.personal = beginnings(name for name, layer in backbone.named_modules() if isinstance(layer, BATCH_NORMS))
        if not self.personal:
            raise ConfigError(
                f"model: FedBN keeps BatchNorm layers on their client, and {type(backbone).__name__} has none. "
                "Use a model with BatchNorm, such as ResNet18"
            )
        return super().client_module(backbone, optimizer, lr_scheduler)
