"""FedDistill: clients share the mean logits of each class, and learn from them by distillation.

Jeong, Oh, Kim, Park, Bennis, Kim: "Communication-Efficient On-Device Machine Learning: Federated Distillation and
Augmentation under Non-IID Private Data", 2018, and Seo, Park, Oh, Bennis, Kim: "Federated Knowledge Distillation",
2020, introduce the idea. FedDistill+, which also averages models, and the form of the loss follow the code of Zhu,
Hong, Zhou: "Data-Free Knowledge Distillation for Heterogeneous Federated Learning" (FedGen), ICML 2021.

The term, `LogitDistillation`, also works in any other method's `loss_terms`, together with its shared knowledge.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from typing import ClassVar

import torch
from torch import Tensor

from fl_lightning.algorithms.aggregators import Aggregator
from fl_lightning.algorithms.base import Algorithm, Buffers
from fl_lightning.client.knowledge import ClassMeans
from fl_lightning.client.loss_term import LossTerm, Step
from fl_lightning.client.module import ClientModule
from fl_lightning.core.arguments import number
from fl_lightning.core.message import Tensors
from fl_lightning.core.precision import at_least_float32


def tracked_means(sums: Tensor, counts: Tensor) -> Tensor:
    """Return the mean logits of each class, with 1 added to each sample count as in the code of FedGen's authors.

    A class without samples has a row of zeros.

    Args:
        sums: Sums of logits per class, `(C, C)`.
        counts: Samples per class, `(C,)`.
    """
    return sums / (counts + 1)[:, None]


class MeanLogits(ClassMeans):
    """The clients' mean training logits of each class, `(C, C)`; row c is for class c.

    Args:
        cumulative: As in FedGen's code, average over all of a client's rounds, with counts from 1 and rows of zeros for
            classes without samples.
    """

    name = "mean_logits"

    def __init__(self, cumulative: bool = False) -> None:
        super().__init__(seen="round")
        self.cumulative = cumulative

    def outputs(self, step: Step) -> Tensor:
        """Return the logits of a batch. `MeanLogits` averages them for each class."""
        return step.logits

    def summarize(self, module: ClientModule, batches: Iterable[tuple[Tensor, Tensor]], num_classes: int) -> Tensors:
        """Return the client's mean logits of each class, and the mask of the classes that have a mean."""
        if not self.cumulative or self.tracked is None:
            return super().summarize(module, batches, num_classes)
        sums, counts = self.tracked
        return {"values": tracked_means(sums, counts), "known": torch.ones_like(counts, dtype=torch.bool)}


def distillation_loss(logits: Tensor, targets: Tensor, teacher: Tensor, known: Tensor) -> Tensor:
    """Return the batch mean of `KL(softmax(G[y]) || softmax(o))`: logits `o`, and teacher's logits `G[y]` for class y.

    Samples of a class without mean logits add zero.

    Args:
        logits: `o`, `(B, C)`.
        targets: `y`, `(B,)`.
        teacher: `G`, `(C, C)` mean logits.
        known: `(C,)` bool.
    """
    aims = teacher.log_softmax(dim=1)[targets]
    divergences = (aims.exp() * (aims - logits.log_softmax(dim=1))).sum(dim=1)  # F.kl_div does not work under vmap
    return torch.where(known[targets], divergences, 0.0).mean()


class LogitDistillation(LossTerm):
    """Pulls logits `o` towards `G[y]`, all clients' mean logits of class y: `γ KL(softmax(G[y]) || softmax(o))`.

    The term is off before there are mean logits, as in round 1. It is computed in float32 under mixed precision.

    Args:
        gamma: γ, 0 or more; 0 switches the term off.
        cumulative: See `MeanLogits`.

    Example:
        >>> term = LogitDistillation(gamma=1.0)
        >>> term.logits.load({"values": torch.zeros(2, 2), "known": torch.tensor([True, False])})
        >>> term(Step(torch.zeros(2, 2), torch.tensor([0, 1]))).item()
        0.0
    """

    gamma: float = number(1.0, "[0, inf)", "FedGen's code uses 1")
    cumulative: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.active = self.gamma > 0
        self.logits = MeanLogits(self.cumulative)

    def remember(self, module: ClientModule) -> Tensors:
        """Return the client's logit sums and sample counts per class over all its rounds, or `{}` if not cumulative."""
        if not self.logits.cumulative or self.logits.tracked is None:
            return {}
        return dict(zip(("sums", "counts"), self.logits.tracked, strict=True))

    def recall(self, kept: Tensors) -> None:
        """Restore the client's sums of logits per class from its earlier rounds."""
        self.logits.tracked = (kept["sums"], kept["counts"]) if kept else None

    def forward(self, step: Step) -> Tensor:
        """Return the distillation loss on a batch, or zero before mean logits are known."""
        values, known = self.logits.values, self.logits.known
        if values is None or known is None:
            return step.logits.new_zeros(())
        return self.gamma * distillation_loss(at_least_float32(step.logits), step.targets, values, known)


class FedDistill(Algorithm):
    """Clients keep personalised models and distil from all clients' mean logits of each class.

    With `gamma` 0 this is `Local`, bit for bit. There is no global model.

    Bytes a round, each participant: down `4 * C**2 + C`, up `4 * C**2 + C + 8`, and nothing down in round 1.

    Kept by a client: its model. Kept by the server: the mean logits of each class.

    Args:
        gamma: γ, the weight of the distillation.
        cumulative: As in FedGen's code, average a client's logits over all its rounds, with counts from 1 and rows of
            zeros for classes without samples.
    """

    gamma: float = 1.0
    cumulative: bool = False
    aggregator: Aggregator = field(init=False)
    buffers: Buffers = field(default="average", init=False)

    search_space: ClassVar = {  # our choice, around FedGen's 1
        "gamma": {"distribution": "log_uniform_values", "min": 0.1, "max": 10.0},
    }
    personal = ("",)
    one_model = False

    def own_terms(self) -> list[LossTerm]:
        """Return the distillation from the mean logits."""
        return [LogitDistillation(self.gamma, self.cumulative)]


class FedDistillPlus(Algorithm):
    """FedDistill+: FedAvg whose clients distil from all clients' mean logits of each class.

    With `gamma` 0 this is FedAvg, bit for bit.

    Bytes a round, each participant: down `model + 4 * C**2 + C`, up `model + 4 * C**2 + C + 8`, and only the model down
    in round 1.

    Kept by the server: the mean logits of each class.

    Args:
        gamma: γ, the weight of the distillation.
        cumulative: As in FedGen's code, see `FedDistill`.
    """

    gamma: float = 1.0
    cumulative: bool = False

    search_space: ClassVar = FedDistill.search_space

    def own_terms(self) -> list[LossTerm]:
        """Return the distillation from the mean logits."""
        return [LogitDistillation(self.gamma, self.cumulative)]
