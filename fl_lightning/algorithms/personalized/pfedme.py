"""pFedMe: each client trains a personalised model near its local model. The server averages the local models.

T. Dinh, Tran, Nguyen: "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fl_lightning.algorithms.aggregators import Aggregator, ServerStep, Weighting
from fl_lightning.algorithms.base import Algorithm, Batches
from fl_lightning.algorithms.global_model.fedprox import proximal_distance
from fl_lightning.client.losses import total_loss
from fl_lightning.client.module import ClientModule
from fl_lightning.client.weights import kept_model, load_weights, trainable_parameters
from fl_lightning.core.arguments import number
from fl_lightning.core.fixed_tensors import copy_network
from fl_lightning.core.message import Message
from fl_lightning.core.state_dicts import State

PERSONAL_MODEL = "personal_model"
"""The section of the client state with the personalised model `θ`."""


class MoreauEnvelope(ClientModule):
    """A client's module with a local model `w` (the backbone) and a personalised model `θ` near it.

    On each batch, `θ` takes steps on `f(θ) + λ/2 ||θ - w||²`. Then `w` takes a step of the fit's optimizer on
    `λ/2 ||w - θ||²`. Loss terms, recorded losses and BatchNorm's statistics are those of `θ`.

    Args:
        parts: The arguments of `ClientModule`.
        lam: λ.
        inner_steps: K, the number of steps of `θ` per batch.
        personal_lr: Learning rate of these steps.
    """

    def __init__(self, *parts: Any, lam: float, inner_steps: int, personal_lr: float) -> None:
        super().__init__(*parts)
        self.lam, self.inner_steps, self.personal_lr = lam, inner_steps, personal_lr
        self.own = copy_network(self.backbone)

    def on_fit_start(self) -> None:
        """Set the personalised model to the received weights."""
        self.own.load_state_dict(self.backbone.state_dict())
        super().on_fit_start()

    @contextmanager
    def personalised(self) -> Iterator[None]:
        """Context manager: use the personalised model as the module's backbone."""
        local, self.backbone = self.backbone, self.own
        try:
            yield
        finally:
            self.backbone = local

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Train the personalised model `θ`, and return the loss of the local model `w`: `λ/2 ||w - θ||²`."""
        own, local = (list(trainable_parameters(model).values()) for model in (self.own, self.backbone))
        for inner in range(self.inner_steps):
            with self.personalised():
                step = self.step(batch, batch_idx)
                losses = self.losses(step)
            if not inner:
                self.record_step(step, losses)
            gradients = torch.autograd.grad(total_loss(losses), own, allow_unused=True)
            with torch.no_grad():
                for theta, w, g in zip(own, local, gradients, strict=True):
                    theta.sub_(self.personal_lr * (self.lam * (theta - w) + (0 if g is None else g)))
            torch.clear_autocast_cache()  # it may contain weights from before the step
        return self.lam / 2 * proximal_distance(local, [theta.detach() for theta in own])


def own_model(module: ClientModule) -> nn.Module:
    """Return the personalised model `θ` of a client's module."""
    assert isinstance(module, MoreauEnvelope)
    return module.own


class PFedMe(Algorithm):
    """pFedMe: clients train a personalised model, and pull a local model towards it. The local models are averaged.

    The optimizer trains the local model: `w - η λ (w - θ)`. BatchNorm's statistics are those of the personalised
    models.

    Bytes a round, each participant: down `model`, up `model + 8`.

    Kept by a client: its personalised model.

    Args:
        lam: λ, the weight of the distance between both models, above 0.
        inner_steps: K, the number of steps of the personalised model per batch, 1 or more.
        personal_lr: Learning rate of these steps, above 0.
        beta: β, the length of the server's step towards the clients' mean. With 1, the next model is this mean.
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
    """

    lam: float = number(15.0, "(0, inf)", "the paper uses 15 to 30")
    inner_steps: int = number(5, "[1, inf)", "the paper uses 5")
    personal_lr: float = number(0.01, "(0, inf)", "the paper uses 0.01 to 0.1")
    beta: float = number(1.0, "(0, inf)", "1 goes all the way to the mean")
    weighting: Weighting = "uniform"

    search_space: ClassVar = {  # T. Dinh et al., Section 5
        "lam": {"distribution": "log_uniform_values", "min": 5.0, "max": 30.0},
        "personal_lr": {"distribution": "log_uniform_values", "min": 0.005, "max": 0.1},
        "beta": {"values": [1.0, 2.0]},
    }
    trains_new_clients = True
    releases_only_model = True  # the upload is the local model
    aggregator_options = ("beta", "weighting")

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        self.module_class = partial(
            MoreauEnvelope, lam=self.lam, inner_steps=self.inner_steps, personal_lr=self.personal_lr
        )

    def own_aggregator(self) -> Aggregator:
        """Return the server step towards the mean."""
        return ServerStep(self.beta, self.weighting)

    def receive(self, module: ClientModule, download: Message, memory: State) -> None:
        """Load the server's model, and the client's personalised model from its last round.

        Before its first round, the personalised model is the received one, from which it would be trained.
        """
        super().receive(module, download, memory)
        load_weights(own_model(module), memory.get(PERSONAL_MODEL) or module.backbone.state_dict())

    def upload(self, module: ClientModule, batches: Batches, n_samples: int, num_classes: int) -> Message:
        """Return the local model, with the BatchNorm statistics of the personalised model."""
        statistics = dict(own_model(module).named_buffers())
        load_weights(module.backbone, {n: v for n, v in statistics.items() if n in module.backbone.state_dict()})
        return super().upload(module, batches, n_samples, num_classes)

    def remember(self, module: ClientModule, upload: Message) -> State:
        """Return what the client keeps until its next round, including its personalised model.

        Raises:
            NonFiniteError: The personalised model contains NaN or Inf.
        """
        fix = "Lower algorithm.personal_lr or algorithm.lam."
        kept = kept_model(own_model(module), self.fixed, "personalised model", fix)
        return super().remember(module, upload) | {PERSONAL_MODEL: kept}

    def personalize(self, module: ClientModule, batches: Batches) -> None:
        """Load the client's personalised model in place of the local model, for evaluation."""
        load_weights(module.backbone, own_model(module).state_dict())
