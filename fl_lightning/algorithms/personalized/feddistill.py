"""FedDistill: clients share the mean logits of each class, and learn from them by distillation.

Jeong, Oh, Kim, Park, Bennis, Kim: "Communication-Efficient On-Device Machine Learning: Federated Distillation and
Augmentation under Non-IID Private Data", 2018, and Seo, Park, Oh, Bennis, Kim: "Federated Knowledge Distillation",
2020, have the idea. FedDistill+, where models are averaged too, and the form of the loss are those of the code of Zhu,
Hong, Zhou: "Data-Free Knowledge Distillation for Heterogeneous Federated Learning" (FedGen), ICML 2021.

The term is `LogitDistillation`, for any other method's `loss_terms`; it brings its shared knowledge with it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fl_lightning.algorithms.aggregators import Aggregator
from fl_lightning.algorithms.base import Algorithm, Buffers
from fl_lightning.client.knowledge import ClassMeans, SharedKnowledge
from fl_lightning.client.module import ClientModule, LossTerm, Step
from fl_lightning.core.errors import check_number
from fl_lightning.core.message import Tensors
from fl_lightning.core.state import at_least_float32


def tracked_means(sums: Tensor, counts: Tensor) -> Tensor:
    """Return FedGen's means: counts start from 1, so that a class never seen has a row of zeros.

    Args:
        sums: `(C, C)` sums of logits by class.
        counts: `(C,)` samples a class.
    """
    return sums / (counts + 1)[:, None]


class MeanLogits(ClassMeans):
    """The mean training logits of each class, `(C, C)`; row c is for class c.

    Args:
        cumulative: As FedGen's code: over all of a client's rounds, counted from 1, and rows of zeros count.
    """

    name = "mean_logits"

    def __init__(self, cumulative: bool = False) -> None:
        super().__init__(seen="round")
        self.cumulative = cumulative

    def outputs(self, step: Step) -> Tensor:
        """Return the logits."""
        return step.logits

    def summarize(self, module: ClientModule, batches: Iterable[tuple[Tensor, Tensor]], num_classes: int) -> Tensors:
        """Return the client's means, and the mask of the classes that they are of."""
        if not self.cumulative or self.tracked is None:
            return super().summarize(module, batches, num_classes)
        sums, counts = self.tracked
        return {"values": tracked_means(sums, counts), "known": torch.ones_like(counts, dtype=torch.bool)}


def distillation_loss(logits: Tensor, targets: Tensor, teacher: Tensor, known: Tensor) -> Tensor:
    """Return the batch mean of `KL(softmax(G[y]) || softmax(o))`; samples of an unknown class add nothing.

    Args:
        logits: `o`, `(B, C)`.
        targets: `y`, `(B,)`.
        teacher: `G`, `(C, C)` mean logits.
        known: `(C,)` bool.
    """
    aims = teacher.log_softmax(dim=1)[targets]
    gaps = (aims.exp() * (aims - logits.log_softmax(dim=1))).sum(dim=1)  # F.kl_div cannot be stacked by vmap
    return torch.where(known[targets], gaps, 0.0).mean()


class LogitDistillation(LossTerm):
    """`γ KL(softmax(G[y]) || softmax(o))` pulls a client's outputs towards the mean logits of their class, `G`.

    Off while nothing is known, as in round 1; computed in float32 under mixed precision.

    Args:
        gamma: γ, 0 or more; 0 switches the term off.
        cumulative: See `MeanLogits`.

    Raises:
        ConfigError: `gamma` is below 0.

    Example:
        >>> term = LogitDistillation(gamma=1.0)
        >>> term.logits.load({"values": torch.zeros(2, 2), "known": torch.tensor([True, False])})
        >>> term(Step(torch.zeros(2, 2), torch.tensor([0, 1]))).item()
        0.0
    """

    def __init__(self, gamma: float = 1.0, cumulative: bool = False) -> None:
        super().__init__()
        check_number("algorithm.gamma", gamma, "[0, inf)", "FedGen's code uses 1")
        self.gamma, self.active = gamma, gamma > 0
        self.logits = MeanLogits(cumulative)

    @property
    def knowledge(self) -> tuple[SharedKnowledge, ...]:
        """Return the mean logits."""
        return (self.logits,)

    def remember(self, module: ClientModule) -> Tensors:
        """Return the sums so far, if `cumulative`."""
        if not self.logits.cumulative or self.logits.tracked is None:
            return {}
        return dict(zip(("sums", "counts"), self.logits.tracked, strict=True))

    def recall(self, kept: Tensors) -> None:
        """Load the sums so far."""
        self.logits.tracked = (kept["sums"], kept["counts"]) if kept else None

    def forward(self, step: Step) -> Tensor:
        """Return the term on a batch; zero while nothing is known."""
        values, known = self.logits.values, self.logits.known
        if values is None or known is None:
            return step.logits.new_zeros(())
        return self.gamma * distillation_loss(at_least_float32(step.logits), step.targets, values, known)


class FedDistill(Algorithm):
    """Clients keep personalised models and distil from all clients' mean logits of each class.

    With `gamma` 0 this is `Local`, bit for bit. Models stay where they are, so there is none to measure globally.

    Bytes a round, each participant: down `4 * C**2 + C`, up `4 * C**2 + C + 8`, and nothing down in round 1.

    Args:
        gamma: γ, the weight of the distillation.
        cumulative: As FedGen's code: a client's means are over all its rounds, with counts from 1, and a class that it
            does not hold counts as a row of zeros.
        loss_terms: Loss terms of other papers, added to this one.

    Raises:
        ConfigError: `gamma` is below 0.
    """

    personal = ("",)
    one_model = False

    def __init__(self, gamma: float = 1.0, cumulative: bool = False, loss_terms: list[LossTerm] | None = None) -> None:
        super().__init__([LogitDistillation(gamma, cumulative), *(loss_terms or [])])


class FedDistillPlus(Algorithm):
    """FedDistill+: FedAvg whose clients distil from all clients' mean logits of each class.

    With `gamma` 0 this is FedAvg, bit for bit.

    Bytes a round, each participant: down `model + 4 * C**2 + C`, up `model + 4 * C**2 + C + 8`, and only the model down
    in round 1.

    Args:
        gamma: γ, the weight of the distillation.
        cumulative: As FedGen's code, see `FedDistill`.
        loss_terms: Loss terms of other papers, added to this one.
        aggregator: Any paper's aggregator in place of the weighted mean.
        buffers: BatchNorm's running statistics: `average`, `local` or `drop`.

    Raises:
        ConfigError: `gamma` is below 0.
    """

    def __init__(
        self,
        gamma: float = 1.0,
        cumulative: bool = False,
        loss_terms: list[LossTerm] | None = None,
        aggregator: Aggregator | None = None,
        buffers: Buffers = "average",
    ) -> None:
        super().__init__([LogitDistillation(gamma, cumulative), *(loss_terms or [])], aggregator, buffers)
