"""A client's module with two networks: the shared one, and one of the client's own, trained on the same batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fl_lightning.client.module import ClientModule
from fl_lightning.client.sgd import check_step_per_batch


class OwnNetwork(ClientModule):
    """A client's module that trains a network of the client's own, `own`, beside the shared `backbone`.

    Both take a step on each batch. The optimizer, scheduler and gradient clipping of the own network are like those of
    the shared one. Subclasses set `own`, and train it with `own_optimizer` in their `training_step`.

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
        self.own_optimizer = self.optimizer_for(self.own_parameters())
        self.own_schedule = self.scheduler_factory(self.own_optimizer) if self.scheduler_factory else None

    def own_parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters that `own_optimizer` trains."""
        return self.own.parameters()

    def on_train_epoch_end(self) -> None:
        """Step the learning-rate schedulers of both networks."""
        super().on_train_epoch_end()
        if self.own_schedule:
            self.own_schedule.step()
