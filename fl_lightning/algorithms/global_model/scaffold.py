"""SCAFFOLD: control variates correct the client drift of local steps.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML
2020, Algorithm 1 with option II.

The server's control variate `c` estimates the gradient over all clients' data, a client's `c_i` the gradient over its
own. Each local step adds `c - c_i` to the gradient. A client's next `c_i` is the mean of its gradients during the fit.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.algorithms.aggregators import Aggregator, ServerStep
from fl_lightning.algorithms.base import Aggregation, Algorithm, Batches
from fl_lightning.algorithms.robust.rule import RobustMean, find_rule
from fl_lightning.client.loss_term import LossTerm, Step
from fl_lightning.client.module import ClientModule
from fl_lightning.client.sgd import plain_sgd_rate
from fl_lightning.client.weights import to_cpu, trainable_parameters
from fl_lightning.core.message import Message, Tensors, Upload
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import RunningMean, State

CONTROL = "control"
"""The section of the state with the server's control variate `c`, and of an upload with the change `Δc`."""

# --- Algorithm 1 ----------------------------------------------------------------------------------------------------


def next_control(start: Tensor, end: Tensor, steps: int, lr: float, correction: Tensor) -> Tensor:
    """Return a client's next control variate, `c_i⁺ = c_i - c + (x - y) / (K η)` (Algorithm 1, line 12, option II).

    Args:
        start: `x`, a received parameter.
        end: `y`, the parameter after the fit.
        steps: K, the number of steps, at least 1.
        lr: η, the learning rate of each step, above 0.
        correction: `c - c_i`, which line 10 adds to the gradient.
    """
    return (start - end) / (steps * lr) - correction


def next_server_control(server: Tensor, mean_change: Tensor, participants: int, clients: int) -> Tensor:
    """Return the server's next control variate, `c + |S| / N · mean Δc` (Algorithm 1, line 17), in float64.

    Args:
        server: `c`.
        mean_change: The mean of the participants' `Δc`.
        participants: `|S|`, the number of uploads.
        clients: N, the number of all clients.
    """
    return (server.double() + participants / clients * mean_change.double()).to(mean_change.dtype)


# --- The client -----------------------------------------------------------------------------------------------------


class ControlVariates(LossTerm):
    """A loss term `<c - c_i, y - x>` whose gradient is SCAFFOLD's correction `c - c_i`.

    `y` are the trainable parameters and `x` their values before the fit. The term is part of `SCAFFOLD`, which sends
    `c`.

    Raises:
        ConfigError: A fit begins that is not plain SGD with one learning rate; see `plain_sgd_rate`.

    Attributes:
        method: Name of the method, for error messages.
    """

    name = "control"
    only_in = "SCAFFOLD"
    method = "SCAFFOLD"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.lr = 0.0
        self._server: Tensors = {}  # c
        self._own: Tensors = {}  # c_i
        self._starts: Tensors = {}  # x; empty before the first fit
        self._corrections: Tensors = {}  # c - c_i

    def load(self, server: Tensors) -> None:
        """Store the server's control variate `c` as received. Missing entries are zero."""
        self._server = server

    def recall(self, kept: Tensors) -> None:
        """Restore the client's control variate `c_i`, which is zero before its first fit."""
        self._own = kept

    def begin(self, module: ClientModule) -> None:
        """Keep the received weights `x`, and compute the correction `c - c_i`."""
        self.lr = plain_sgd_rate(module, self.method)
        parameters = trainable_parameters(module.backbone)
        server, self._own = (complete_control(control, parameters) for control in (self._server, self._own))
        self._starts = {name: p.detach().clone() for name, p in parameters.items()}
        self._corrections = {name: server[name] - self._own[name] for name in parameters}
        self._server = {}

    def forward(self, step: Step) -> Tensor:
        """Return the loss `<c - c_i, y - x>` of current weights `y` and received weights `x`, or zero outside a fit."""
        if not self._starts or step.backbone is None:
            return self.outside_fit(step.logits.new_zeros(()))
        now = dict(step.backbone.named_parameters())
        parts = [(slope * (now[name] - self._starts[name])).sum() for name, slope in self._corrections.items()]
        return sum(parts[1:], start=parts[0])

    def controls(self, module: ClientModule) -> tuple[Tensors, Tensors]:
        """Return the client's next control variate `c_i⁺` and its change `Δc`.

        After a fit without steps, `c_i⁺` is `c_i`, and `Δc` is zero.
        """
        if not module.steps * self.lr:
            return self._own, {name: torch.zeros_like(value) for name, value in self._own.items()}
        new = {
            name: next_control(self._starts[name], p.detach(), module.steps, self.lr, self._corrections[name])
            for name, p in trainable_parameters(module.backbone).items()
        }
        return new, {name: value - self._own[name] for name, value in new.items()}

    def remember(self, module: ClientModule) -> Tensors:
        """Return the client's next control variate, `c_i⁺`."""
        return self.controls(module)[0]


def complete_control(control: Tensors, parameters: dict[str, nn.Parameter]) -> Tensors:
    """Return a control variate completed with zeros for missing parameters, on the parameters' device.

    Its dtype is at least float32.
    """

    def value(name: str, p: Tensor) -> Tensor:
        dtype = torch.promote_types(p.dtype, torch.float32)
        return control[name].to(p.device, dtype) if name in control else torch.zeros_like(p, dtype=dtype)

    return {name: value(name, p.detach()) for name, p in parameters.items()}


# --- The method -----------------------------------------------------------------------------------------------------


class SCAFFOLD(Algorithm):
    """FedAvg that corrects each local step by the server's control variate minus the client's.

    In round 1, and with one local step of all clients in every round, this is FedAvg with `weighting: uniform`. It
    needs plain SGD. BatchNorm's statistics have no control variate.

    Bytes a round, each participant: down `model + 4 * P`, up `model + 4 * P + 8`.

    Kept by a client: its control variate. Kept by the server: the control variate.

    Args:
        server_lr: Server learning rate η_g, above 0. With 1, a step ends at the clients' mean.
    """

    only_steps_read_data = True

    server_lr: float = 1.0

    search_space: ClassVar = {  # around the 1 of Karimireddy et al.
        "server_lr": {"distribution": "log_uniform_values", "min": 0.3, "max": 3.0},
    }
    aggregator_options = ("server_lr",)

    def own_terms(self) -> list[LossTerm]:
        """Return the loss term that corrects each local step."""
        term = ControlVariates()
        term.method = type(self).__name__
        return [term]

    def own_aggregator(self) -> Aggregator:
        """Return the server step towards the unweighted mean."""
        return ServerStep(self.server_lr, "uniform")

    def initial_state(self, backbone: nn.Module, num_classes: int, clients: int, rng: np.random.Generator) -> State:
        """Return the initial weights, and the server's control variate `c`, all zeros."""
        zeros = {name: torch.zeros_like(p.detach()) for name, p in trainable_parameters(backbone).items()}
        return super().initial_state(backbone, num_classes, clients, rng) | {CONTROL: zeros}

    def download(self, state: State, client: int, rng: np.random.Generator) -> Message:
        """Return the message to a client: the weights and the server's control variate `c`."""
        return super().download(state, client, rng).plus({CONTROL: state[CONTROL]})

    def receive(self, module: ClientModule, download: Message, memory: State) -> None:
        """Load the weights and the server's control variate `c`."""
        super().receive(module, download, memory)
        control_term(module).load(download.section(CONTROL))

    def upload(self, module: ClientModule, batches: Batches, n_samples: int, num_classes: int) -> Message:
        """Return the trained weights and the change `Δc` of the client's control variate."""
        _, change = control_term(module).controls(module)
        return super().upload(module, batches, n_samples, num_classes).plus(to_cpu({CONTROL: change}))

    def aggregation(self, round: Round) -> Aggregation:
        """Return the aggregation of a round, which also computes the server's next control variate."""
        return ControlAggregation(self, round)


class ControlAggregation(Aggregation):
    """The mean of a round's models, and the server's next control variate `c` from the mean of the uploaded `Δc`.

    If the models are averaged by a robust rule, so are the `Δc`, independently of the models.
    """

    def __init__(self, algorithm: SCAFFOLD, round: Round) -> None:
        super().__init__(algorithm, round)
        rule = find_rule(algorithm.aggregator)
        self.changes = RobustMean(rule, round, {}, {}) if rule else RunningMean()

    def add(self, upload: Upload) -> None:
        """Add an upload's weights and its `Δc` to their means."""
        self.changes.add(upload.message.section(CONTROL), 1)
        super().add(upload._replace(message=upload.message.without(CONTROL)))

    def finish(self) -> State:
        """Return the next weights, and the server's next control variate `c`."""
        clients, mean = len(self.algorithm.samples), self.changes.value()
        control = {
            name: next_server_control(value, mean[name], self.changes.count, clients)
            for name, value in self.round.before[CONTROL].items()
        }
        return super().finish() | {CONTROL: control}


def control_term(module: ClientModule) -> ControlVariates:
    """Return the `ControlVariates` loss term of a client's module."""
    return next(term for term in module.terms() if isinstance(term, ControlVariates))
