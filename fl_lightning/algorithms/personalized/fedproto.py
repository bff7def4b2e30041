"""FedProto: clients share only class prototypes, and each keeps a personalised model.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI
2022. Equations below are the paper's.

A prototype is the mean feature of a class's samples. `PrototypeAlignment` pulls a client's features towards the
averaged prototypes of all clients. It also works in any other method's `loss_terms`.
"""

from __future__ import annotations

from dataclasses import field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.algorithms.aggregators import Aggregator
from fl_lightning.algorithms.base import Algorithm, Batches, Buffers
from fl_lightning.client.knowledge import ClassMeans, Seen
from fl_lightning.client.loss_term import LossTerm, Step
from fl_lightning.client.module import ClientModule
from fl_lightning.core.arguments import number
from fl_lightning.core.precision import at_least_float32
from fl_lightning.models.base import with_encoder, with_features


class Prototypes(ClassMeans):
    """The mean feature of each class, `(C, d)`, averaged over the clients with samples of it (Eq. 3, 6)."""

    name = "prototypes"

    def outputs(self, step: Step) -> Tensor:
        """Return the features of a batch. `Prototypes` averages them for each class."""
        assert step.features is not None
        return step.features


def prototype_distance(features: Tensor, targets: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    """Return the mean squared distance of features to the prototype of their class (Eq. 8).

    Samples of a class without a prototype have distance zero.

    Args:
        features: `(B, d)`.
        targets: `(B,)`.
        prototypes: `(C, d)`.
        known: `(C,)` bool.
    """
    aims = torch.where(known[targets][:, None], prototypes[targets], features.detach())
    return F.mse_loss(features, aims)


class PrototypeAlignment(LossTerm):
    """Pulls features towards the prototype of their class: `λ` times the mean squared distance.

    The term is off before there are prototypes.

    Args:
        lam: λ, 0 or more; 0 switches the term off.
        seen: The features that a client averages to prototypes, see `ClassMeans`.

    Raises:
        ConfigError: A fit begins with a model without an encoder.

    Example:
        >>> term = PrototypeAlignment(lam=1.0)
        >>> term.prototypes.load({"values": torch.ones(2, 3), "known": torch.tensor([True, False])})
        >>> term(Step(torch.zeros(2, 2), torch.tensor([0, 1]), features=torch.zeros(2, 3))).item()
        0.5
    """

    lam: float = number(1.0, "[0, inf)", "the paper uses 0.1 to 4")
    seen: Seen = "after"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.active = self.lam > 0
        self.prototypes = Prototypes(self.seen)

    def begin(self, module: ClientModule) -> None:
        """Check that the model is a `Backbone`, which returns features."""
        with_features(module.backbone)

    def forward(self, step: Step) -> Tensor:
        """Return `λ` times the distance of a batch's features to their class prototypes, or zero without prototypes."""
        values, known = self.prototypes.values, self.prototypes.known
        if values is None or known is None:
            return step.logits.new_zeros(())
        if step.features is None:
            return self.outside_fit(step.logits.new_zeros(()))
        return self.lam * prototype_distance(at_least_float32(step.features), step.targets, values, known)


class NearestPrototype(nn.Module):
    """A head that predicts the class of the nearest prototype. Its logits are negative mean squared distances.

    Args:
        prototypes: `(C, d)`.
        known: `(C,)` bool; other classes are never predicted.
    """

    def __init__(self, prototypes: Tensor, known: Tensor) -> None:
        super().__init__()
        self.prototypes: Tensor
        self.known: Tensor
        self.register_buffer("prototypes", prototypes)
        self.register_buffer("known", known)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits `(B, C)`, the negative mean squared distances of features `(B, d)` to the prototypes."""
        gaps = (at_least_float32(features)[:, None] - self.prototypes).square().mean(dim=2)
        return -gaps.masked_fill(~self.known, torch.inf)


class FedProto(Algorithm):
    """Clients keep personalised models, and pull their features towards class prototypes that they share.

    With `lam` 0 this is `Local`, bit for bit. There is no global model.

    Bytes a round, each participant: down `4 * C * d + C`, up `4 * C * d + C + 8`, and nothing down in round 1.

    Kept by a client: its model. Kept by the server: the prototypes.

    Args:
        lam: λ of Eq. 7, the weight of the distance to the prototypes. The distance is also averaged over features.
        seen: The features that a client averages to prototypes: from a pass `after` training, or collected during
            training in the `last_epoch` (as in the authors' code) or the whole `round`.
        predict: Prediction of a client's model when it is evaluated or returned: by its `logits`, or by the nearest of
            the received `prototypes`.
    """

    lam: float = 1.0
    seen: Seen = "after"
    predict: Literal["logits", "prototypes"] = "logits"
    aggregator: Aggregator = field(init=False)
    buffers: Buffers = field(default="average", init=False)

    search_space: ClassVar = {  # Tan et al. use 0.1 and 1, and vary it up to 4
        "lam": {"distribution": "log_uniform_values", "min": 0.1, "max": 4.0},
    }
    personal = ("",)
    one_model = False

    def own_terms(self) -> list[LossTerm]:
        """Return the distance to the class prototypes."""
        return [PrototypeAlignment(self.lam, self.seen)]

    def personalize(self, module: ClientModule, batches: Batches) -> None:
        """Replace the head by a nearest-prototype classifier, if `predict` is `prototypes` and prototypes are known."""
        (prototypes,) = (piece for piece in module.pieces() if isinstance(piece, Prototypes))
        if self.predict == "prototypes" and prototypes.values is not None and prototypes.known is not None:
            with_encoder(module.backbone).head = NearestPrototype(prototypes.values, prototypes.known)
