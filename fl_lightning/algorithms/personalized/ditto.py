"""Ditto: each client trains a personalised model near the global one, in addition to FedAvg.

Li, Hu, Beirami, Smith: "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, Algorithm 1.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from fl_lightning.algorithms.aggregators import Weighting
from fl_lightning.algorithms.base import Algorithm, Batches
from fl_lightning.algorithms.global_model.fedprox import proximal_distance
from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import descend
from fl_lightning.client.own_network import OwnNetwork
from fl_lightning.client.weights import kept_model, load_weights, unfixed_parameters
from fl_lightning.core.arguments import number
from fl_lightning.core.fixed_tensors import copy_network
from fl_lightning.core.message import Message
from fl_lightning.core.state_dicts import State

PERSONAL_MODEL = "personal_model"
"""The section of the client state with the personalised model `v`."""


class TwoModels(OwnNetwork):
    """A client's module that trains two models on the same batches: the shared and a personalised one.

    The personalised model `v` minimises `f(v) + λ/2 ||v - w^t||²`, where `w^t` are the received weights. Its optimizer,
    scheduler and gradient clipping are like those of the shared model. It uses the same random numbers and does not
    affect the shared model.

    Args:
        parts: The arguments of `ClientModule`.
        lam: λ.
    """

    method = "Ditto"

    def __init__(self, *parts: Any, lam: float) -> None:
        super().__init__(*parts)
        self.lam, self.own = lam, copy_network(self.backbone)

    def on_fit_start(self) -> None:
        """Begin the fit, and keep the received weights."""
        super().on_fit_start()
        self.received = [p.detach().clone() for p in unfixed_parameters(self.backbone).values()]

    def train_own(self, x: Tensor, y: Tensor) -> None:
        """Train the personalised model for one step."""
        descend(self.own_optimizer, self.own_loss(x, y), self.clip_gradients)

    def own_loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the personalised model's loss `f(v) + λ/2 ||v - w^t||²` on a batch."""
        loss = self.objective.loss(self.own(x), y)
        if not self.lam:
            return loss
        own = list(unfixed_parameters(self.own).values())
        return loss + self.lam / 2 * proximal_distance(own, self.received)


def own_model(module: ClientModule) -> nn.Module:
    """Return the personalised model `v` of a client's module."""
    assert isinstance(module, TwoModels)
    return module.own


class Ditto(Algorithm):
    """FedAvg, plus a personalised model for each client, which stays near the global model.

    The personalised models are evaluated. They start from the initial weights, as in the authors' code. For every
    `lam`, the shared model is that of FedAvg with the same weighting, bit for bit. With `lam: 0` the personalised
    models are those of `Local`.

    Bytes a round, each participant: down `model`, up `model + 8`.

    Kept by a client: its personalised model.

    Args:
        lam: λ, the weight of the distance between the personalised and the received model, 0 or more.
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
    """

    lam: float = number(1.0, "[0, inf)", "the paper tries 0.05 to 2")
    weighting: Weighting = "samples"

    search_space: ClassVar = {  # Li et al.: 0.1, 1, 2
        "lam": {"distribution": "log_uniform_values", "min": 0.1, "max": 2.0},
    }
    trains_new_clients = True
    personal_section = PERSONAL_MODEL

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        self.module_class = partial(TwoModels, lam=self.lam)

    def receive(self, module: ClientModule, download: Message, memory: State) -> None:
        """Load the shared model and the client's personalised model, which starts as the initial model."""
        super().receive(module, download, memory)
        if PERSONAL_MODEL in memory:
            load_weights(own_model(module), memory[PERSONAL_MODEL])

    def remember(self, module: ClientModule, upload: Message) -> State:
        """Return the client state, including the personalised model.

        Raises:
            NonFiniteError: The personalised model contains NaN or Inf.
        """
        fix = "Lower the learning rate or algorithm.lam."
        kept = kept_model(own_model(module), self.fixed, "personalised model", fix)
        return super().remember(module, upload) | {PERSONAL_MODEL: kept}

    def personalize(self, module: ClientModule, batches: Batches) -> None:
        """Load the client's personalised model in place of the shared model, for evaluation."""
        module.backbone.load_state_dict(own_model(module).state_dict())
