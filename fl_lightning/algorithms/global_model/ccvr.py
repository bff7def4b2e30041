"""CCVR: the head of the trained model is calibrated on virtual features, drawn from all clients' class statistics.

Luo, Chen, Hu, Zhang, Liang, Feng: "No Fear of Heterogeneity: Classifier Calibration for Federated Learning with Non-IID
Data", NeurIPS 2021, Section 4.

The server merges the clients' mean and covariance of each class exactly, draws features from a Gaussian for each class,
and trains the head on them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.algorithms.base import Batches
from fl_lightning.algorithms.global_model.fedavg import FedAvg
from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import descend
from fl_lightning.core.arguments import number
from fl_lightning.core.message import Tensors
from fl_lightning.core.precision import at_least_float32
from fl_lightning.core.state_dicts import State
from fl_lightning.models.base import with_encoder


class ClassMoments(NamedTuple):
    """The number of samples of each class, and the mean and covariance of their features.

    Attributes:
        counts: Number of samples, `(C,)`.
        means: `(C, d)`, zero for a class without samples.
        covariances: Divided by the number of samples minus 1, `(C, d, d)`, and zero for fewer than two samples.
    """

    counts: Tensor
    means: Tensor
    covariances: Tensor


def class_moments(features: Tensor, targets: Tensor, num_classes: int) -> ClassMoments:
    """Return the number of a client's samples of each class, and the mean and covariance of their features.

    Args:
        features: `(n, d)`.
        targets: `(n,)`.
        num_classes: C.
    """
    size = features.shape[1]
    counts = torch.bincount(targets, minlength=num_classes).to(features.dtype)
    means, covariances = features.new_zeros(num_classes, size), features.new_zeros(num_classes, size, size)
    for label in targets.unique().tolist():
        own = features[targets == label]
        means[label] = own.mean(dim=0)
        apart = own - means[label]
        covariances[label] = apart.T @ apart / max(1, len(own) - 1)
    return ClassMoments(counts, means, covariances)


def merge_moments(clients: Iterable[ClassMoments]) -> ClassMoments:
    """Return the class counts, means and covariances of all clients' samples together, computed in float64."""
    counts = means = scatter = torch.zeros(0)
    for client in clients:
        n, mean, covariance = (value.double().cpu() for value in client)
        if not len(counts):
            counts, means, scatter = (torch.zeros_like(value) for value in (n, mean, covariance))
        total = counts + n
        gap, share = mean - means, n / total.clamp(min=1)
        scatter = scatter + (n - 1).clamp(min=0)[:, None, None] * covariance
        scatter = scatter + (counts * share)[:, None, None] * gap[:, :, None] * gap[:, None, :]
        counts, means = total, means + share[:, None] * gap
    return ClassMoments(counts, means, scatter / (counts - 1).clamp(min=1)[:, None, None])


def virtual_features(moments: ClassMoments, number: int) -> tuple[Tensor, Tensor]:
    """Return features drawn from the Gaussian of each class that has samples, and their classes.

    Args:
        moments: The merged moments.
        number: Number of features of each class.
    """
    held = moments.counts.nonzero()[:, 0]
    values, vectors = torch.linalg.eigh(moments.covariances[held])
    noise = torch.randn(len(held), number, values.shape[1], dtype=values.dtype)
    roots = vectors * values.clamp(min=0).sqrt()[:, None] @ vectors.mT
    return (moments.means[held][:, None] + noise @ roots).flatten(end_dim=1), held.repeat_interleave(number)


class CCVR(FedAvg):
    """FedAvg with a head that is calibrated, before evaluation, on features drawn from all clients' class statistics.

    With `epochs` 0 this is FedAvg, bit for bit. The calibrated model is evaluated, exported and written at the end of
    the run, and training continues without the calibration. `global/uncalibrated_acc` is the accuracy without it.

    Bytes a round, each participant: down `model`, up `model + 8`. Each calibration, each client: down `model`, up
    `4 * C * (d**2 + d + 1)`.

    Args:
        features: Number of virtual features of each class, 1 or more.
        epochs: Number of epochs that the head is trained on the virtual features, 0 or more. The optimizer and the
            batch size are those of the clients.
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
    """

    features: int = number(100, "[1, inf)")
    epochs: int = number(10, "[0, inf)", "0 does not calibrate")

    search_space: ClassVar = {  # our choice
        "features": {"values": [100, 500, 2000]},
        "epochs": {"values": [1, 5, 10, 20]},
    }
    needs_classes = True

    def initial_state(self, backbone: nn.Module, num_classes: int, clients: int, rng: np.random.Generator) -> State:
        """Return the initial weights, after a check that the model has an encoder and a head."""
        with_encoder(backbone)
        return super().initial_state(backbone, num_classes, clients, rng)

    def statistics(self, module: ClientModule, batches: Batches, num_classes: int) -> Tensors:
        """Return, for each class, the client's number of samples, and the mean and covariance of their features.

        The result is empty if the head is not calibrated (`epochs` 0).
        """
        if not self.epochs:
            return {}
        parts = [(at_least_float32(module.encoder(x)), y) for x, y in batches]
        features, targets = (torch.cat(part) for part in zip(*parts, strict=True))
        return class_moments(features, targets, num_classes)._asdict()

    def calibrate(self, module: ClientModule, statistics: Iterable[Tensors]) -> None:
        """Train the head on features drawn from one Gaussian per class, fitted to all clients' data.

        The head stays in eval mode.
        """
        if not self.epochs:
            return
        moments = merge_moments(ClassMoments(**one) for one in statistics)
        drawn, classes = virtual_features(moments, self.features)
        head = with_encoder(module.backbone).head
        like = next(head.parameters())
        drawn, classes = drawn.to(like), classes.to(like.device)
        optimizer = module.optimizer_for(p for p in head.parameters() if p.requires_grad)
        with torch.enable_grad():
            for _ in range(self.epochs):
                for chosen in torch.randperm(len(classes)).split(module.context.batch_size):
                    descend(optimizer, module.objective.loss(head(drawn[chosen]), classes[chosen]))
