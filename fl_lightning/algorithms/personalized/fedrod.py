"""FedROD: a shared head trained for balanced classes, and a personal head that is added to it.

Chen, Chao: "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022, Section 4.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.algorithms.aggregators import Weighting
from fl_lightning.algorithms.base import Algorithm, Batches
from fl_lightning.client.logit_adjustment import LogitAdjustment
from fl_lightning.client.loss_term import LossTerm, Step
from fl_lightning.client.module import ClientModule
from fl_lightning.client.weights import load_weights, to_cpu
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Message
from fl_lightning.core.state_dicts import State
from fl_lightning.models import with_encoder

PERSONAL_HEAD = "personal_head"
"""The section of the client state with the personal head."""


class BalancedSoftmax(LogitAdjustment):
    """The balanced softmax loss `-log(n_y exp(l_y) / Σ_c n_c exp(l_c))` (Eq. 5), instead of the plain cross-entropy.

    `n_c` is the client's number of training samples of class `c`. Classes without samples are left out.

    Raises:
        ConfigError: A fit begins in a module without `class_counts`.

    Example:
        >>> term = BalancedSoftmax()
        >>> term.counts = torch.tensor([3.0, 1.0])
        >>> round(float(term(Step(torch.zeros(1, 2), torch.tensor([1])))), 4)  # log 4
        1.3863
    """

    def adjusted(self, logits: Tensor, counts: Tensor) -> Tensor:
        """Return the logits of a batch plus `log n_c`."""
        return logits + counts.to(logits).log()


class TwoHeads(ClientModule):
    """A client's module with a shared and a personal head on one encoder.

    The personal head learns from the sum of both heads' logits. Its loss does not train the encoder and the shared
    head. It starts as a copy of the initial shared head.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.own = copy.deepcopy(linear_head(self.backbone))

    def trainables(self) -> list[nn.Parameter]:
        """Return the parameters that are trained: those of the encoder, the shared head and the personal head."""
        return [*self.backbone.parameters(), *self.own.parameters()]

    def losses(self, step: Step) -> dict[str, Tensor]:
        """Return the losses of a training step, including the loss of the personal head, `personal`."""
        assert step.features is not None
        logits = step.logits.detach() + self.own(step.features.detach())
        return super().losses(step) | {"personal": self.objective.loss(logits, step.targets)}

    @property
    def loss_names(self) -> list[str]:
        """Names of the losses that `losses` returns."""
        return [*super().loss_names, "personal"]


def linear_head(backbone: nn.Module) -> nn.Linear:
    """Return the head of a network, which must be one linear layer.

    Raises:
        ConfigError: The network has no separate head, or the head has other layers.
    """
    head = with_encoder(backbone).head
    if not isinstance(head, nn.Linear):
        raise ConfigError("model.head: FedROD needs a head of one linear layer. Leave out hidden and mapping layers.")
    return head


def own_head(module: ClientModule) -> nn.Linear:
    """Return the personal head of a client's module."""
    assert isinstance(module, TwoHeads)
    return module.own


class FedROD(Algorithm):
    """FedAvg with a class-balanced loss, plus a personal head. Client models predict with the sum of both heads.

    The global model, with the shared head, is for all classes. A client's model is evaluated with both heads.

    Bytes a round, each participant: down `model`, up `model + 8`.

    Kept by a client: its personal head.

    Args:
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).

    Raises:
        ConfigError: The head of the model is not one linear layer.
    """

    weighting: Weighting = "samples"

    needs_classes = True
    module_class = TwoHeads
    trains_new_clients = True
    personal_section = PERSONAL_HEAD

    def own_terms(self) -> list[LossTerm]:
        """Return the class-balanced cross-entropy."""
        return [BalancedSoftmax()]

    def receive(self, module: ClientModule, download: Message, memory: State) -> None:
        """Load the shared model and the client's personal head."""
        super().receive(module, download, memory)
        if PERSONAL_HEAD in memory:
            load_weights(own_head(module), memory[PERSONAL_HEAD])

    def remember(self, module: ClientModule, upload: Message) -> State:
        """Return what the client keeps until its next round, including its personal head."""
        return super().remember(module, upload) | to_cpu({PERSONAL_HEAD: own_head(module).state_dict()})

    def personalize(self, module: ClientModule, batches: Batches) -> None:
        """Add the personal head to the shared head: the sum of two linear layers is a linear layer."""
        head = linear_head(module.backbone)
        with torch.no_grad():
            for shared, own in zip(head.parameters(), own_head(module).parameters(), strict=True):
                shared.add_(own)
