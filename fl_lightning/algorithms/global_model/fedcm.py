"""FedCM: every local step mixes the batch's gradient with the server's last descent direction.

Xu, Wang, Wang, Yao: "FedCM: Federated Learning with Client-level Momentum", 2021, Algorithm 2.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fl_lightning.algorithms.aggregators import Aggregator, ServerStep
from fl_lightning.algorithms.base import Algorithm, Batches
from fl_lightning.client.loss_term import LossTerm, Step
from fl_lightning.client.module import ClientModule
from fl_lightning.client.sgd import plain_sgd_rate
from fl_lightning.core.arguments import number
from fl_lightning.core.message import Message, Tensors, Upload
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import RunningMean, State, parameter_names

DIRECTION = "direction"
"""The section of the state with the descent direction `Δ`."""


class ClientMomentum(LossTerm):
    """Loss term that turns each step's gradient `g` into `α g + (1 - α) Δ`, a mix with the server's last direction `Δ`.

    It is `(1 - α) <Δ, w>` for weights `w`, together with a factor `α` on the objective's loss. The factor does not
    scale other loss terms and weight decay. The term is part of `FedCM`, which sends `Δ`.

    Args:
        alpha: α, in (0, 1]; 1 switches the term off.

    Raises:
        ConfigError: α is out of range, or a fit begins that is not plain SGD with one learning rate.

    Attributes:
        method: Name of the method, for error messages.
    """

    alpha: float = number(0.1, "(0, 1]", "the paper uses 0.1")

    only_in = "FedCM"
    method = "FedCM"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.active = self.alpha < 1
        self.objective_weight = self.alpha
        self.lr = 0.0
        self._direction: Tensors | None = None

    def load(self, direction: Tensors) -> None:
        """Store the received descent direction `Δ`."""
        self._direction = direction

    def begin(self, module: ClientModule) -> None:
        """Keep the fit's learning rate, and move the server's descent direction `Δ` to the device of the parameters."""
        self.lr = plain_sgd_rate(module, self.method)
        parameters = dict(module.backbone.named_parameters())
        received = (self._direction or {}).items()
        self._direction = {name: value.to(parameters[name]) for name, value in received if name in parameters}

    def forward(self, step: Step) -> Tensor:
        """Return the loss `(1 - α) <Δ, w>` at the current weights `w`, or zero if no direction `Δ` was received."""
        if self._direction is None or step.backbone is None:
            return self.outside_fit(step.logits.new_zeros(()))
        if not self._direction:
            return step.logits.new_zeros(())
        now = dict(step.backbone.named_parameters())
        parts = [(value * now[name]).sum() for name, value in self._direction.items()]
        return (1 - self.alpha) * sum(parts[1:], start=parts[0])


@dataclass
class PathMeans:
    """Two means of a round's uploaded models: unweighted, and weighted by `1 / (steps * learning rate)`.

    `K` is a client's number of steps, and `η` is its learning rate.

    Attributes:
        models: The unweighted mean.
        by_path: The mean with weights `1 / (K η)`.
        inverses: The sum of `1 / (K η)` over the participants.
    """

    models: RunningMean
    by_path: RunningMean
    inverses: float = 0.0


class DirectionServer(ServerStep):
    """Take a server step along the clients' mean change, and compute the descent direction `Δ` for the next round.

    `Δ` is the mean of `(x - y_k) / (K_k η)` over the participants. For client `k`, which took `K_k` steps from `x` to
    `y_k`, this is the mean direction of its steps.

    Args:
        server_lr: Server learning rate η_g, above 0. With 1, a step ends at the clients' mean.
    """

    only_in = "FedCM"
    only_averages = False

    def __init__(self, server_lr: float = 1.0) -> None:
        super().__init__(server_lr, "uniform")

    def initial(self, model: Tensors, num_classes: int) -> State:
        """Return the initial descent direction `Δ`, all zeros."""
        return {DIRECTION: {name: torch.zeros_like(model[name]) for name in parameter_names(model, self.buffers)}}

    def begin(self, round: Round) -> PathMeans:
        """Return two empty means: an unweighted one, and one weighted by `1 / (steps * learning rate)`."""
        return PathMeans(RunningMean(), RunningMean())

    def fold(self, folded: PathMeans, upload: Upload) -> None:
        """Add an uploaded model to both means. A client without steps has weight 0 in the second one."""
        model, length = upload.message.section("model"), upload.message.numbers["length"]
        inverse = 1 / length if length else 0.0
        folded.models.add(model, 1)
        folded.by_path.add(model, inverse)
        folded.inverses += inverse

    def finish(self, folded: PathMeans, round: Round, knowledge: State) -> State:
        """Return the model after the server's step, and the next descent direction."""
        old, mean, inverse = round.before["model"], folded.by_path.value(), folded.inverses / folded.models.count
        direction = {
            name: (inverse * (old[name].double() - mean[name].double())).to(value.dtype)
            for name, value in round.before[DIRECTION].items()
        }
        return super().finish(folded.models, round, knowledge) | {DIRECTION: direction}


class FedCM(Algorithm):
    """FedAvg whose clients step along a mix of their gradient and the server's last descent direction.

    With `alpha` 1 this is FedAvg with `weighting: uniform`, except rounding. It needs plain SGD.

    Bytes a round, each participant: down `model + 4 * P`, up `model + 16`.

    Kept by the server: the last descent direction.

    Args:
        alpha: α, the share of the client's own gradient, in (0, 1].
        server_lr: Server learning rate η_g, above 0. With 1, a step ends at the clients' mean.
    """

    only_steps_read_data = True

    alpha: float = 0.1
    server_lr: float = 1.0
    aggregator: Aggregator = field(init=False)

    search_space: ClassVar = {"alpha": {"values": [0.03, 0.05, 0.1, 0.3, 0.5]}}  # around the paper's 0.1

    def own_terms(self) -> list[LossTerm]:
        """Return the loss term that mixes the server's direction into each step."""
        term = ClientMomentum(self.alpha)
        term.method = type(self).__name__
        return [term]

    def own_aggregator(self) -> Aggregator:
        """Return the server step that also computes the direction."""
        return DirectionServer(self.server_lr)

    def download(self, state: State, client: int, rng: np.random.Generator) -> Message:
        """Return the message to a client: the weights and the descent direction `Δ`."""
        return super().download(state, client, rng).plus({DIRECTION: state[DIRECTION]})

    def receive(self, module: ClientModule, download: Message, memory: State) -> None:
        """Load the weights and the descent direction `Δ`."""
        super().receive(module, download, memory)
        momentum_term(module).load(download.section(DIRECTION))

    def upload(self, module: ClientModule, batches: Batches, n_samples: int, num_classes: int) -> Message:
        """Return the trained weights and `K η`, the number of steps times the learning rate."""
        message = super().upload(module, batches, n_samples, num_classes)
        return message.plus(length=module.steps * momentum_term(module).lr)


def momentum_term(module: ClientModule) -> ClientMomentum:
    """Return a client's `ClientMomentum`, the loss term that holds the server's descent direction `Δ`."""
    return next(term for term in module.terms() if isinstance(term, ClientMomentum))
