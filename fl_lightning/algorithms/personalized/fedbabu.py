"""FedBABU: train the body under a fixed head, and fine-tune the whole model on each client at the end.

Oh, Kim, Yun: "FedBABU: Towards Enhanced Representation for Federated Image Classification", ICLR 2022, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import nn

from fl_lightning.algorithms.aggregators import Aggregator, WeightedMean, Weighting
from fl_lightning.algorithms.base import Algorithm, Batches, Buffers
from fl_lightning.client.fine_tuning import fine_tune
from fl_lightning.client.module import ClientModule, LossTerm
from fl_lightning.client.optimizers import OptimizerFactory, SchedulerFactory
from fl_lightning.client.weights import beginnings, require_parts
from fl_lightning.core.errors import ConfigError, check_number
from fl_lightning.core.message import Tensors

Tuned = Literal["full", "body", "head"]


class FedBABU(Algorithm):
    """FedAvg of the body with a fixed initial head. Clients fine-tune the model before it is evaluated.

    With nothing frozen and `tune_epochs: 0` this is FedAvg of the same weighting, bit for bit.

    Bytes a round, each participant: down `model - head`, up `model - head + 8`.

    Args:
        frozen: Parts of the model whose weights stay as initialised; all know them from the start.
        tune: What a client fine-tunes, on its own data, before its model is measured or handed out: the `full` model,
            its `body` (all that is not frozen) or its `head` (what is).
        tune_epochs: For how many epochs; 0 leaves the model as it is.
        weighting: Weigh clients by their number of `samples`, or all the same (`uniform`).
        loss_terms: Loss terms of any paper, added to the cross-entropy.
        aggregator: Any paper's aggregator in place of the mean.
        buffers: BatchNorm's running statistics: `average`, `local` or `drop`.

    Raises:
        ConfigError: `tune_epochs` is below 0, or a head is to be tuned and nothing is frozen.
    """

    def __init__(
        self,
        frozen: Sequence[str] = ("head",),
        tune: Tuned = "full",
        tune_epochs: int = 5,
        weighting: Weighting = "uniform",
        loss_terms: list[LossTerm] | None = None,
        aggregator: Aggregator | None = None,
        buffers: Buffers = "average",
    ) -> None:
        super().__init__(loss_terms, aggregator or WeightedMean(weighting), buffers)
        check_number("algorithm.tune_epochs", tune_epochs, "[0, inf)", "use 0 to measure without fine-tuning")
        if tune == "head" and not frozen:
            raise ConfigError("algorithm.tune: head, and nothing is frozen that could be it; use full")
        self.frozen, self.tune, self.tune_epochs = beginnings(frozen), tune, tune_epochs

    def client_module(
        self,
        backbone: nn.Module,
        optimizer: OptimizerFactory | None = None,
        lr_scheduler: SchedulerFactory | None = None,
    ) -> ClientModule:
        """Build a client's LightningModule, with the frozen parts of the backbone without gradient.

        Raises:
            ConfigError: The backbone has no such part.
        """
        require_parts("frozen", self.frozen, backbone)
        for name, parameter in backbone.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and not name.startswith(self.frozen))
        return super().client_module(backbone, optimizer, lr_scheduler)

    def personalize(self, module: ClientModule, batches: Batches) -> None:
        """Fine-tune the model."""
        for name, parameter in module.backbone.named_parameters():
            if name.startswith(self.frozen):
                parameter.requires_grad_(True)
        if self.tune_epochs:
            fine_tune(module, batches, self.tune_epochs, self._tuned)

    def _tuned(self, name: str) -> bool:
        return self.tune == "full" or name.startswith(self.frozen) == (self.tune == "head")

    def _shared(self, backbone: nn.Module) -> Tensors:
        """Return all entries but the frozen weights, which every client has. Buffers among them are shared."""
        frozen = {name for name, _ in backbone.named_parameters() if name.startswith(self.frozen)}
        return {name: value for name, value in super()._shared(backbone).items() if name not in frozen}
