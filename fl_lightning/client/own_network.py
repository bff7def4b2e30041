"""A client's module with two networks: the shared one, and one of the client's own, trained on the same batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.client.loss_term import Step
from fl_lightning.client.losses import total_loss
from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import descend
from fl_lightning.client.sgd import check_step_per_batch
from fl_lightning.core.fixed_tensors import copy_network, shared_tensors
from fl_lightning.core.inputs import Batch
from fl_lightning.core.seeding import RandomStates
from fl_lightning.models import Backbone


class OwnNetwork(ClientModule):
    """A client's module that trains a network of the client's own, `own`, beside the shared `backbone`.

    Both take a step on each batch. The optimizer, scheduler and gradient clipping of the own network are like those of
    the shared one, and it uses the same random numbers. Subclasses set `own`, and train it in `train_own`, or both
    networks in a `training_step` of their own.

    Attributes:
        method: The method's name, for error messages.
        own: The client's own network.
        own_optimizer: Its optimizer, which is built at the start of each fit.
    """

    method = ""
    own: nn.Module
    own_optimizer: torch.optim.Optimizer
    own_schedule: Any = None

    def check_fit(self) -> None:
        """Raise an error if gradients are accumulated, because the own network takes a step on each batch."""
        check_step_per_batch(self, self.method)

    def on_fit_start(self) -> None:
        """Begin the fit, and build the optimizer and the scheduler of the own network."""
        super().on_fit_start()
        self.own_optimizer = self.optimizer_for(self.own_parameters(), self.own)
        self.own_schedule = self.schedule_for(self.own_optimizer)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Train the own network for one step, then return the shared network's loss."""
        draws = RandomStates(self.device)
        self.train_own(*batch)
        self.step_schedule(self.own_schedule, "step")
        with draws.drawing():
            return super().training_step(batch, batch_idx)

    def train_own(self, x: Any, y: Tensor) -> None:
        """Train the own network on a batch for one step with `own_optimizer`. It does not affect the shared network."""
        raise NotImplementedError

    def own_parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters that `own_optimizer` trains."""
        return self.own.parameters()

    def on_train_epoch_end(self) -> None:
        """Step the learning-rate schedulers of both networks."""
        super().on_train_epoch_end()
        self.step_schedule(self.own_schedule, "epoch")


class TwoLearners(OwnNetwork):
    """A client's module in which the own and the shared network learn from each other's outputs on each batch.

    The losses of both are computed before either takes a step, and neither loss trains the other network. If the
    networks have the same architecture, they use the same random numbers, such as those of dropout. The own network is
    a copy of the shared one until `set_own` replaces it. Subclasses override `own_losses` and `shared_losses`. The own
    network's losses are recorded with the prefix `own_`.

    Attributes:
        fixed: Names of the own network's tensors that are equal on all clients, such as frozen parameters.
    """

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.set_own(copy_network(self.backbone))

    def set_own(self, network: nn.Module) -> None:
        """Use a network as the client's own."""
        self.own = network
        self.fixed = frozenset(shared_tensors(network))

    @property
    def networks(self) -> dict[str, nn.Module]:
        """The client's own network and the shared one, by their config keys."""
        return {"model": self.own, "algorithm.shared_model": self.backbone}

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Train the own network for one step, then return the shared network's loss."""
        draws = RandomStates(self.device)
        own = self.own_step(batch)
        with draws.drawing():
            shared = self.step(batch, batch_idx)
        of_own, of_shared = self.own_losses(own, shared), self.shared_losses(own, shared)
        descend(self.own_optimizer, total_loss(of_own), self.clip_gradients)
        self.step_schedule(self.own_schedule, "step")
        self.record_step(shared, of_shared | {f"own_{name}": value for name, value in of_own.items()})
        return total_loss(of_shared)

    def own_step(self, batch: Batch) -> Step:
        """Run the own network on a batch."""
        x, y = batch
        features, logits = self.own.features_and_logits(x) if isinstance(self.own, Backbone) else (None, self.own(x))
        return Step(logits, y, features, x, self.own)

    def own_losses(self, own: Step, shared: Step) -> dict[str, Tensor]:
        """Return the losses of the own network in a training step by name."""
        raise NotImplementedError

    def shared_losses(self, own: Step, shared: Step) -> dict[str, Tensor]:
        """Return the losses of the shared network in a training step by name."""
        raise NotImplementedError
