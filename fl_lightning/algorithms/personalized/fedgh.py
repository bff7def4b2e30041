"""FedGH: the server trains a head for all clients on the mean features of their classes.

Yi, Wang, Liu, Shi, Yu: "FedGH: Heterogeneous Federated Learning with Generalized Global Header", ACM Multimedia 2023,
Algorithm 1.

Clients upload the mean feature of each of their classes, never their weights. So their encoders may have different
architectures, as long as their features have the same size.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.algorithms.aggregators import Aggregator
from fl_lightning.algorithms.base import Algorithm, Batches, Buffers
from fl_lightning.client.knowledge import ClassMeans, Seen, SharedKnowledge, class_values
from fl_lightning.client.loss_term import Step
from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import descend
from fl_lightning.client.weights import beginnings, trainable_parameters
from fl_lightning.core.arguments import count, number
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Message, Tensors, Upload
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import State
from fl_lightning.models.base import with_encoder

HEAD = "head."
"""The prefix of the entries of the head."""


class Representations(ClassMeans):
    """The mean feature of each of a client's classes, `(C, d)`. Clients send it to the server, which sends none."""

    name = "representations"

    def outputs(self, step: Step) -> Tensor:
        """Return the features of a batch. `Representations` averages them for each class."""
        assert step.features is not None
        return step.features

    def merge(self, previous: Tensors, uploads: Sequence[Upload], round: Round) -> Tensors:
        """Return no tensors: the aggregator reads the uploaded features, and none are sent to clients."""
        return {}


def labelled_means(values: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Return the server's training data: the mean features of all clients' classes, and the classes.

    Args:
        values: The clients' mean feature of each class, `(K, C, d)`.
        known: Whether a client has samples of a class, `(K, C)` bool.

    Returns:
        The features `(n, d)` and classes `(n,)` of the n pairs of a client and one of its classes, client by client.
    """
    return values[known], known.nonzero()[:, 1]


def train_head(
    head: nn.Module, features: Tensor, classes: Tensor, epochs: int, lr: float, batch_size: int, draws: torch.Generator
) -> None:
    """Train a head in place with SGD on the cross-entropy of mean features, `φ ← φ - η ∇ℓ(H(φ; r), y)`.

    Args:
        head: The head, `H`.
        features: `r`, `(n, d)`.
        classes: `y`, `(n,)`.
        epochs: Number of passes over the features.
        lr: η.
        batch_size: Number of features in a step.
        draws: The random numbers of the order.
    """
    optimizer = torch.optim.SGD(trainable_parameters(head).values(), lr=lr)
    for _ in range(epochs):
        for chosen in torch.randperm(len(classes), generator=draws).split(batch_size):
            descend(optimizer, F.cross_entropy(head(features[chosen]), classes[chosen]))


class HeadTraining(Aggregator):
    """Train the shared head on the mean features of the round's participants. The head stays in eval mode.

    Args:
        seen: The features that a client averages, see `ClassMeans`.
        server_epochs: Number of passes over the uploaded mean features in each round, 0 or more.
        server_lr: Learning rate of the server's optimizer, SGD, above 0.
        server_batch_size: Number of mean features in a step, 1 or more.

    Attributes:
        head: A head with the architecture of the clients'. `FedGH.initial_state` sets it.
    """

    seen: Seen = "after"
    server_epochs: int = number(1, "[0, inf)")
    server_lr: float = number(0.01, "(0, inf)")
    server_batch_size: int = count(10)

    needs_classes = True
    only_in = "FedGH"
    head: nn.Module | None = field(default=None, init=False)

    @property
    def knowledge(self) -> tuple[SharedKnowledge, ...]:
        """The mean features that clients send to the server."""
        return (Representations(self.seen),)

    def finish(self, folded: list[Upload], round: Round, knowledge: State) -> State:
        """Return the head after its training.

        Raises:
            ConfigError: `head` is not set.
        """
        if self.head is None:
            raise ConfigError("algorithm.aggregator: HeadTraining has no head. Set it in initial_state, as FedGH does.")
        features, classes = labelled_means(*class_values(folded, Representations.name))
        before, head = round.before["model"], copy.deepcopy(self.head).to(features.dtype)
        head.load_state_dict({name.removeprefix(HEAD): value for name, value in before.items()}, strict=False)
        draws = torch.Generator().manual_seed(int(round.rng.integers(2**62)))
        train_head(head, features, classes, self.server_epochs, self.server_lr, self.server_batch_size, draws)
        after = head.state_dict()
        return {"model": {name: after[name.removeprefix(HEAD)] for name in before}}


class FedGH(Algorithm):
    """Clients send the mean features of their classes. The server trains a head on them, with which clients start.

    Each client keeps its own encoder, and trains it together with the received head. There is no global model.

    Bytes a round, each participant: down `head`, up `4 * C * d + C + 8`.

    Kept by a client: its model except the head. Kept by the server: the head, and the mean features of
    the round.

    Args:
        seen: The features that a client averages: from a pass `after` training, or collected during training in the
            `last_epoch` or the whole `round`.
        server_epochs: Number of the server's passes over the uploaded mean features in each round, 0 or more.
        server_lr: Learning rate of the server's optimizer, SGD, above 0.
        server_batch_size: Number of mean features in a step of the server, 1 or more. The paper's algorithm uses 1.

    Raises:
        ConfigError: The model has no separate encoder and head.
    """

    seen: Seen = "after"
    server_epochs: int = number(1, "[0, inf)")
    server_lr: float = number(0.01, "(0, inf)")
    server_batch_size: int = number(10, "[1, inf)")
    aggregator: Aggregator = field(init=False)
    buffers: Buffers = field(default="average", init=False)

    search_space: ClassVar = {  # our choice
        "server_epochs": {"values": [1, 10, 100]},
        "server_lr": {"distribution": "log_uniform_values", "min": 0.001, "max": 0.1},
    }
    one_model = False
    uploads_weights = False

    def own_aggregator(self) -> Aggregator:
        """Return the aggregator that trains the head."""
        return HeadTraining(self.seen, self.server_epochs, self.server_lr, self.server_batch_size)

    def prepare_network(self, backbone: nn.Module) -> None:
        """Make all parts of the network except the head personal."""
        parts = (name for name, _ in with_encoder(backbone).named_children())
        self.personal = beginnings(name for name in parts if name != "head")

    def initial_state(self, backbone: nn.Module, num_classes: int, clients: int, rng: np.random.Generator) -> State:
        """Return the initial head."""
        assert isinstance(self.aggregator, HeadTraining)
        self.aggregator.head = copy.deepcopy(with_encoder(backbone).head).eval()
        return super().initial_state(backbone, num_classes, clients, rng)

    def upload(self, module: ClientModule, batches: Batches, n_samples: int, num_classes: int) -> Message:
        """Return the client's mean features, without weights."""
        return super().upload(module, batches, n_samples, num_classes).without("model")
