"""FedBABU: train the body under a frozen initial head, and fine-tune the whole model on each client at the end.

Oh, Kim, Yun: "FedBABU: Towards Enhanced Representation for Federated Image Classification", ICLR 2022, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from torch import nn

from fl_lightning.algorithms.aggregators import Weighting
from fl_lightning.algorithms.base import Algorithm, Batches
from fl_lightning.client.fine_tuning import fine_tune
from fl_lightning.client.module import ClientModule
from fl_lightning.client.weights import beginnings, belongs_to, require_parts
from fl_lightning.core.arguments import number
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Tensors

Tuned = Literal["full", "body", "head"]


class FedBABU(Algorithm):
    """FedAvg of the body with a frozen initial head. Clients fine-tune the model before it is evaluated.

    With nothing frozen and `tune_epochs: 0` this is FedAvg of the same weighting, bit for bit.

    Bytes a round, each participant: down `model - head`, up `model - head + 8`.

    Args:
        frozen: Parts of the model, or patterns of its entries such as `*.bias`, that keep their initial weights and are
            not sent.
        tune: The part that a client fine-tunes on its data before its model is evaluated or returned: the `full` model,
            its `body` (everything that is not frozen) or its `head` (the frozen parts).
        tune_epochs: Number of epochs of fine-tuning, 0 or more.
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).

    Raises:
        ConfigError: `tune` is `head` but nothing is frozen.
    """

    frozen: Sequence[str] = ("head",)
    tune: Tuned = "full"
    tune_epochs: int = number(5, "[0, inf)", "use 0 to measure without fine-tuning")
    weighting: Weighting = "uniform"

    search_space: ClassVar = {"tune_epochs": {"values": [1, 5, 10, 20]}}  # among the numbers of Oh et al.

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if self.tune == "head" and not self.frozen:
            raise ConfigError("algorithm.tune: 'head' needs a frozen part. Use 'full', or set algorithm.frozen.")
        self.frozen = beginnings(self.frozen)

    def prepare_network(self, backbone: nn.Module) -> None:
        """Freeze the parts listed in `frozen`, such as the head.

        Raises:
            ConfigError: The backbone does not have a frozen part.
        """
        require_parts("frozen", self.frozen, backbone)
        for name, parameter in backbone.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and not belongs_to(name, self.frozen))

    def personalize(self, module: ClientModule, batches: Batches) -> None:
        """Fine-tune the client's model on its training data before evaluation."""
        for name, parameter in module.backbone.named_parameters():
            if belongs_to(name, self.frozen) and name not in self.fixed:
                parameter.requires_grad_(True)
        if self.tune_epochs:
            fine_tune(module, batches, self.tune_epochs, self._is_tuned)

    def _is_tuned(self, name: str) -> bool:
        return self.tune == "full" or belongs_to(name, self.frozen) == (self.tune == "head")

    def _shared(self, backbone: nn.Module) -> Tensors:
        """Return the state dict entries that clients and server exchange. Frozen parameters are not exchanged.

        Buffers of frozen parts, such as BatchNorm's running statistics, are exchanged.
        """
        frozen = {name for name, _ in backbone.named_parameters() if belongs_to(name, self.frozen)}
        return {name: value for name, value in super()._shared(backbone).items() if name not in frozen}
