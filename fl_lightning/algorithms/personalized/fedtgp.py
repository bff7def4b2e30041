"""FedTGP: FedProto with class prototypes that the server trains, so that they stay apart from each other.

Zhang, Liu, Hua, Cao: "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for Data
and Model Heterogeneity in Federated Learning", AAAI 2024, Algorithm 1.

The mean over clients' prototypes shrinks the margins between classes. FedTGP's server trains a small network that
outputs one prototype per class, with a contrastive loss on the prototypes that clients upload.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.algorithms.personalized.fedproto import FedProto, PrototypeAlignment, Prototypes
from fl_lightning.client.knowledge import Seen, class_values, mean_over_holders
from fl_lightning.client.loss_term import LossTerm
from fl_lightning.client.optimizers import descend
from fl_lightning.core.arguments import number
from fl_lightning.core.message import Tensors, Upload
from fl_lightning.core.round import Round

Margin = Literal["max", "nearest"]

NETWORK = "network."
"""Prefix of the entries of the server's prototype network in the shared knowledge."""


def distances(one: Tensor, other: Tensor) -> Tensor:
    """Return the Euclidean distances `φ` between the rows of two matrices, `(n, m)`. At zero, the gradient is zero.

    Args:
        one: `(n, d)`.
        other: `(m, d)`.
    """
    return torch.cdist(one, other, compute_mode="donot_use_mm_for_euclid_dist")


def adaptive_margin(centers: Tensor, threshold: float, kind: Margin = "max") -> float:
    """Return the margin `δ = min(max_{c ≠ c'} φ(Q_c, Q_c'), τ)` of the paper, zero for fewer than two classes.

    Args:
        centers: `Q`, the clients' mean prototype of each class that they uploaded, `(n, d)`.
        threshold: τ.
        kind: `max` is the equation. `nearest` is the authors' code: the largest distance of a class to the nearest one.
    """
    if len(centers) < 2:
        return 0.0
    apart = distances(centers, centers)
    nearest = apart.masked_fill(torch.eye(len(centers), dtype=torch.bool), torch.inf).amin(dim=1)
    return min(float((apart if kind == "max" else nearest).max()), threshold)


def contrastive_loss(uploaded: Tensor, classes: Tensor, prototypes: Tensor, margin: float) -> Tensor:
    """Return the batch mean of the margin-enhanced contrastive loss of uploaded prototypes (ACL).

    It is `-log(exp(-(φ_c + δ)) / (exp(-(φ_c + δ)) + Σ_{c' ≠ c} exp(-φ_c')))`, with the distance `φ_c'` of an uploaded
    prototype of class c to the global prototype of class c'.

    Args:
        uploaded: The clients' prototypes, `(B, d)`.
        classes: Their classes, `(B,)`.
        prototypes: The global prototypes, `(C, d)`.
        margin: δ.
    """
    own = F.one_hot(classes, len(prototypes)).to(uploaded.dtype)
    return F.cross_entropy(-(distances(uploaded, prototypes) + margin * own), classes)


class PrototypeNetwork(nn.Module):
    """Trainable vectors, one per class, and two linear layers with ReLU in between, which make prototypes of them.

    Args:
        num_classes: C.
        feature_dim: Size `d` of a prototype, of a vector and of the hidden layer.
    """

    def __init__(self, num_classes: int, feature_dim: int) -> None:
        super().__init__()
        self.vectors = nn.Embedding(num_classes, feature_dim)
        self.layers = nn.Sequential(nn.Linear(feature_dim, feature_dim), nn.ReLU(), nn.Linear(feature_dim, feature_dim))

    def forward(self) -> Tensor:
        """Return the prototypes of all classes, `(C, d)`."""
        prototypes: Tensor = self.layers(self.vectors.weight)
        return prototypes


class TrainedPrototypes(Prototypes):
    """Class prototypes, `(C, d)`, from a network that the server trains on the clients' prototypes.

    A class that no client has uploaded yet is not `known`, so clients do not use its prototype.

    Args:
        seen: The features that a client averages to prototypes, see `ClassMeans`.
        server_epochs: Number of passes over the uploaded prototypes in each round.
        server_lr: Learning rate of the server's optimizer, SGD.
        server_batch_size: Number of uploaded prototypes in a step.
        tau: τ, the largest margin.
        margin: See `adaptive_margin`.
    """

    name = "trained_prototypes"

    def __init__(
        self,
        seen: Seen = "after",
        server_epochs: int = 100,
        server_lr: float = 0.01,
        server_batch_size: int = 10,
        tau: float = 100.0,
        margin: Margin = "max",
    ) -> None:
        super().__init__(seen)
        self.server_epochs, self.server_lr, self.server_batch_size = server_epochs, server_lr, server_batch_size
        self.tau, self.margin = tau, margin

    def sent(self, kept: Tensors) -> Tensors:
        """Return the prototypes and the mask of known classes. The weights of the network stay on the server."""
        return {name: value for name, value in kept.items() if not name.startswith(NETWORK)}

    def merge(self, previous: Tensors, uploads: Sequence[Upload], round: Round) -> Tensors:
        """Train the network on the uploaded prototypes, and return its prototypes and its weights."""
        local, held = class_values(uploads, self.name)
        means, known = mean_over_holders(local, held)
        network = prototype_network(previous, means, round.rng)
        draws = torch.Generator().manual_seed(int(round.rng.integers(2**62)))
        margin = adaptive_margin(means[known], self.tau, self.margin)
        uploaded, classes = local[held], held.nonzero()[:, 1]
        optimizer = torch.optim.SGD(network.parameters(), lr=self.server_lr)
        for _ in range(self.server_epochs):
            for chosen in torch.randperm(len(classes), generator=draws).split(self.server_batch_size):
                descend(optimizer, contrastive_loss(uploaded[chosen], classes[chosen], network(), margin))
        kept = {f"{NETWORK}{name}": value.detach() for name, value in network.state_dict().items()}
        known = known | previous["known"] if previous else known
        return {"values": network().detach(), "known": known} | kept


def prototype_network(previous: Tensors, like: Tensor, rng: np.random.Generator) -> PrototypeNetwork:
    """Return the server's prototype network as it was after the previous round; in the first round, a random one.

    Args:
        previous: The shared knowledge after the previous round; empty before the first.
        like: A tensor with the shape `(C, d)` and the dtype of the prototypes.
        rng: The random numbers of the initial weights.
    """
    with torch.random.fork_rng(devices=[]):
        if not previous:
            torch.default_generator.manual_seed(int(rng.integers(2**62)))
        network = PrototypeNetwork(*like.shape).to(like.dtype)
    if previous:
        kept = {name.removeprefix(NETWORK): v for name, v in previous.items() if name.startswith(NETWORK)}
        network.load_state_dict(kept)
    return network


class TrainedPrototypeAlignment(PrototypeAlignment):
    """Pulls features towards the trained prototype of their class: `λ` times the mean squared distance.

    The term is off before there are prototypes.

    Args:
        lam: λ, 0 or more; 0 switches the term off.
        seen: The features that a client averages to prototypes, see `ClassMeans`.
        server_epochs: See `TrainedPrototypes`.
        server_lr: See `TrainedPrototypes`.
        server_batch_size: See `TrainedPrototypes`.
        tau: See `TrainedPrototypes`.
        margin: See `TrainedPrototypes`.

    Raises:
        ConfigError: An option is out of its range, or a fit begins with a model without an encoder.
    """

    server_epochs: int = number(100, "[0, inf)", "the paper uses 100")
    server_lr: float = number(0.01, "(0, inf)", "the paper uses 0.01")
    server_batch_size: int = number(10, "[1, inf)", "the paper uses 10")
    tau: float = number(100.0, "[0, inf)", "the paper uses 100, and 0 is without a margin")
    margin: Margin = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        server = (self.server_epochs, self.server_lr, self.server_batch_size, self.tau, self.margin)
        self.prototypes = TrainedPrototypes(self.seen, *server)


class FedTGP(FedProto):
    """FedProto with class prototypes that the server trains by a contrastive loss with a margin.

    With `lam` 0 this is `Local`, bit for bit. There is no global model. With `server_epochs` 0, the prototypes stay
    random.

    Bytes a round, each participant: down `4 * C * d + C`, up `4 * C * d + C + 8`, and nothing down in round 1.

    Kept by a client: its model. Kept by the server: the network of the prototypes.

    Args:
        lam: λ, the weight of the distance to the trained prototypes. The distance is also averaged over features.
        server_epochs: Number of the server's passes over the uploaded prototypes in each round, 0 or more.
        server_lr: Learning rate of the server's optimizer, SGD, above 0.
        server_batch_size: Number of uploaded prototypes in a step of the server, 1 or more.
        tau: τ, the largest margin, 0 or more. The margin grows with the distances between classes.
        margin: The margin is the largest distance between two classes (`max`, as in the paper), or the largest distance
            between a class and the class `nearest` to it (as in the authors' code).
    """

    server_epochs: int = 100
    server_lr: float = 0.01
    server_batch_size: int = 10
    tau: float = 100.0
    margin: Margin = "max"

    search_space: ClassVar = {  # Zhang et al.: 100 epochs, τ 100; our choice around them
        "lam": {"distribution": "log_uniform_values", "min": 0.1, "max": 10.0},
        "server_epochs": {"values": [10, 100, 1000]},
        "tau": {"values": [1.0, 10.0, 100.0]},
    }

    def own_terms(self) -> list[LossTerm]:
        """Return the distance to the trained class prototypes."""
        server = (self.server_epochs, self.server_lr, self.server_batch_size, self.tau, self.margin)
        return [TrainedPrototypeAlignment(self.lam, self.seen, *server)]
