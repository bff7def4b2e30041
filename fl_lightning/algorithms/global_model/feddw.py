"""FedDW: the classification layer is regularised towards the average soft labels of all clients.

"FedDW: Distilling Weights through Consistency Optimization in Heterogeneous Federated Learning", 2024. Sections and
equations below are the paper's.

Each client uploads the mean softmax output of its classes (the soft-label matrix, SL). The server averages them, and
clients pull the class-relation matrix of their classification layer, `ω ωᵀ`, towards the result. The term,
`DistillingWeights`, also works in any other method's `loss_terms`, together with its shared knowledge.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.algorithms.base import Algorithm
from fl_lightning.client.knowledge import SharedKnowledge, class_sums_over
from fl_lightning.client.loss_term import LossTerm, Step
from fl_lightning.client.module import ClientModule
from fl_lightning.core.arguments import number
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Tensors, Upload
from fl_lightning.core.precision import at_least_float32, without_autocast
from fl_lightning.core.round import Round
from fl_lightning.models import classification_layer

# --- Section III: the two matrices --------------------------------------------------------------------------------


def class_relations(weight: Tensor) -> Tensor:
    """Return the class relation (CR) matrix `ω ωᵀ` (Eq. 3), `(C, C)`, of a classification layer's weights `(C, d)`."""
    return weight @ weight.T


def soft_label_matrix(sums: Tensor, counts: Tensor) -> Tensor:
    """Return the soft label (SL) matrix (Eq. 4): row i is the mean softmax output over the samples of class i.

    Args:
        sums: `(C, C)`; row i is the sum of the softmax outputs of class i.
        counts: Samples per class, `(C,)`.

    Returns:
        `(C, C)`; rows of classes without samples on the client are zero.
    """
    return sums / counts.clamp(min=1)[:, None]


def merge_soft_labels(local: Tensor, counts: Tensor, previous: Tensor) -> Tensor:
    """Return the mean of the clients' soft-label matrices. Each row is weighted by the clients' samples of its class.

    It is `Ω[i, :] = Σ_n |D_i^n| / |D_i| · Ω^n[i, :]` (Eq. 7), with `|D_i^n|` samples of class i on client n.

    Args:
        local: `(K, C, C)` SL matrices.
        counts: Samples per client and class, `(K, C)`.
        previous: `(C, C)`; a class without samples keeps its row.
    """
    total = counts.sum(dim=0).double()
    shares = counts.double() / total.clamp(min=1)
    merged = torch.einsum("kc,kcj->cj", shares, local.double()).to(previous.dtype)
    return torch.where((total > 0)[:, None], merged, previous)


class SoftLabels(SharedKnowledge):
    """The soft label (SL) matrix: the mean softmax outputs of each class, averaged over clients by Eq. 7.

    It is uploaded with the client's class counts and broadcast with their sums: `C + C²` numbers per client in each
    direction, the paper's `2 (C + C²)` (Section V-D). Round 1 broadcasts the identity. A class without samples keeps
    its row.

    Args:
        reference: As in the authors' code, average over all rounds so far. A class without samples has the row of the
            identity, and `Ω` is the mean of the old `Ω` and that average.
    """

    needs_classes = True
    name = "soft_labels"

    def __init__(self, reference: bool = False) -> None:
        super().__init__()
        self.reference = reference
        self.values: Tensor | None
        self.register_buffer("values", None, persistent=False)

    def initial(self, num_classes: int) -> Tensors:
        """Return the soft-label matrix before round 1, the identity, with class counts of zero."""
        return {"values": torch.eye(num_classes), "counts": torch.zeros(num_classes)}

    def summarize(self, module: ClientModule, batches: Iterable[tuple[Tensor, Tensor]], num_classes: int) -> Tensors:
        """Return the client's soft-label matrix (Eq. 4) and its number of samples of each class."""
        sums, counts = class_sums_over(batches, lambda x: at_least_float32(module(x)).softmax(dim=1), num_classes)
        return {"values": soft_label_matrix(sums, counts), "counts": counts}

    def merge(self, previous: Tensors, uploads: Sequence[Upload], round: Round) -> Tensors:
        """Return the mean of the clients' soft-label matrices, weighted by their class counts (Eq. 7)."""
        sections = [upload.message.section(self.name) for upload in uploads]
        local, counts = (torch.stack([section[name] for section in sections]) for name in ("values", "counts"))
        if self.reference:
            return self._merge_all_rounds(previous, local, counts)
        return {"values": merge_soft_labels(local, counts, previous["values"]), "counts": counts.sum(dim=0)}

    def _merge_all_rounds(self, previous: Tensors, local: Tensor, counts: Tensor) -> Tensors:
        """Return the next matrix as in the authors' code: the mean of the last one and the average over all rounds."""
        identity = torch.eye(len(previous["values"]))
        earlier, seen = previous.get("mean", identity), previous["counts"]
        mean = merge_soft_labels(torch.cat([earlier[None], local]), torch.cat([seen[None], counts]), identity)
        return {"values": (previous["values"] + mean) / 2, "mean": mean, "counts": seen + counts.sum(dim=0)}


# --- The regulariser ----------------------------------------------------------------------------------------------


def consistency_loss(soft_labels: Tensor, weight: Tensor) -> Tensor:
    """Return the mean squared error between soft labels and `softmax(ω ωᵀ)`, for classification-layer weights `ω`.

    This is FedDW's regulariser, `1/C² · ||Ω - softmax(ω ωᵀ)||_F²` (Eq. 11), with softmax by rows.

    Args:
        soft_labels: `Ω`, `(C, C)`; rows sum to 1.
        weight: `ω`, `(C, d)`.
    """
    return F.mse_loss(class_relations(weight).softmax(dim=1), soft_labels)


def linearized_consistency_loss(soft_labels: Tensor, weight: Tensor, anchor: Tensor) -> Tensor:
    """Return a convex surrogate of FedDW's regulariser, linearised around the weights `anchor` (Eq. 26-30).

    It is `||Ω - A0ᵀA - AᵀA0 + A0ᵀA0||_F²`, convex in `A = ωᵀ`. At `A = A0` it equals `||Ω - AᵀA||_F²`, the
    term without its softmax.

    Args:
        soft_labels: `Ω`, `(C, C)`.
        weight: `ω = Aᵀ`, `(C, d)`.
        anchor: `A0ᵀ`, `(C, d)`, the point of linearisation. It has no gradient.
    """
    cross = anchor @ weight.T
    return (soft_labels - cross - cross.T + class_relations(anchor)).square().sum()


class DistillingWeights(LossTerm):
    """FedDW's loss term: keep class similarities in the classification layer near the clients' average soft labels.

    The similarities are `ω ωᵀ`, with the layer's weights `ω`. The term is `μ` times the regulariser of Eq. 11. Only `ω`
    gets a gradient.

    Args:
        mu: μ of Eq. 12, 0 or more; 0 switches the term off. The paper's best is 0.1 on CIFAR-10 and 10 on CIFAR-100,
            with Adam. With SGD, 0.1 has little effect; 10 to 100 works.
        linearize_every: Use the convex surrogate of Eq. 26-30. `A0` is updated after this number of steps.
        reference: As in the authors' code, divide μ by 10 in every ninth round, from round 9 on. See also `SoftLabels`.
        allow_bias: Accept a classification layer with a bias, which the method ignores.

    Raises:
        ConfigError: A fit begins with a classification layer that has a bias, and `allow_bias` is false.

    Example:
        >>> term = DistillingWeights(mu=0.1)
        >>> term.load(torch.eye(3))
        >>> net = nn.Linear(4, 3, bias=False)
        >>> term(Step(torch.zeros(1, 3), torch.tensor([0]), backbone=net)).item() > 0
        True
    """

    mu: float = number(0.1, "[0, inf)", "the paper uses 0.01 to 100")
    linearize_every: int | None = number(None, "[1, inf)")
    reference: bool = False
    allow_bias: bool = False

    name = "dw"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.active = self.mu > 0
        self.soft_labels = SoftLabels(self.reference)
        self.round_mu = self.mu  # `begin` divides it in late rounds
        self._anchor: Tensor | None = None
        self._steps_of_fit = 0

    def load(self, values: Tensor) -> None:
        """Store the received soft-label matrix, `(C, C)`."""
        self.soft_labels.load({"values": values})

    def begin(self, module: ClientModule) -> None:
        """Check that the classification layer has no bias, set this round's weight μ, and reset the step count."""
        if classification_layer(module.backbone).bias is not None and not self.allow_bias:
            raise ConfigError(
                "model.head.classifier: DistillingWeights needs a classification layer without bias; set bias_free, "
                "or allow_bias true for the term"
            )
        self.round_mu = self.mu * 0.1 ** (module.context.round // 9) if self.reference else self.mu
        self._steps_of_fit = 0

    def forward(self, step: Step) -> Tensor:
        """Return the loss that keeps class similarities near the soft labels, times its weight μ.

        With `linearize_every` it is the convex surrogate. It is zero if no soft labels are known.
        """
        soft_labels = self.soft_labels.values
        if soft_labels is None:
            return step.logits.new_zeros(())
        if step.backbone is None:
            return self.outside_fit(step.logits.new_zeros(()))
        weight = classification_layer(step.backbone).weight
        with without_autocast(weight.device):
            weight = at_least_float32(weight)
            if self.linearize_every is None:
                return self.round_mu * consistency_loss(soft_labels, weight)
            return self.round_mu * linearized_consistency_loss(soft_labels, weight, self._current_anchor(weight))

    def _current_anchor(self, weight: Tensor) -> Tensor:
        if self._anchor is None or self._steps_of_fit % (self.linearize_every or 1) == 0:
            self._anchor = weight.detach().clone()
        self._steps_of_fit += 1
        return self._anchor


# --- The method ---------------------------------------------------------------------------------------------------


class FedDW(Algorithm):
    """FedAvg with a classification layer that is regularised towards all clients' average soft labels.

    With `mu` 0 this is FedAvg with a bias-free classification layer, bit for bit.

    Bytes a round, each participant: down `model + 4 * (C + C**2)`, up `model + 4 * (C + C**2) + 8`.

    Kept by the server: the soft labels.

    Args:
        mu: μ of Eq. 12, the weight of the regulariser. The default is the paper's, for Adam. With SGD try 10 to 100.
        linearize_every: Use the convex surrogate, linearised again after this number of steps.
        drop_bias: Remove the bias of the model's classification layer. Otherwise a bias is refused.
        preset: `paper`, or `reference` for the authors' published code, which keeps the bias.

    Raises:
        ConfigError: The classification layer has a bias, and `drop_bias` is false.
    """

    mu: float = 0.1
    linearize_every: int | None = None
    drop_bias: bool = True
    preset: Literal["paper", "reference"] = "paper"

    search_space: ClassVar = {  # Section V: 0.01, 0.1, 1, 10, 100
        "mu": {"distribution": "log_uniform_values", "min": 0.01, "max": 100.0},
    }

    @property
    def keeps_bias(self) -> bool:
        """Whether the classification layer keeps its bias, as in the authors' code."""
        return self.preset == "reference"

    def own_terms(self) -> list[LossTerm]:
        """Return the regulariser of the classification layer."""
        reference = self.preset == "reference"
        return [DistillingWeights(self.mu, self.linearize_every, reference=reference, allow_bias=self.keeps_bias)]

    def prepare_network(self, backbone: nn.Module) -> None:
        """Remove the bias of the classification layer.

        The preset `reference` keeps the bias.

        Raises:
            ConfigError: The layer has a bias, and `drop_bias` does not allow its removal.
        """
        layer = classification_layer(backbone)
        if layer.bias is not None and not self.keeps_bias:
            if not self.drop_bias:
                raise ConfigError(
                    "model.head.classifier: FedDW needs a classification layer without bias; set bias_free, or "
                    "algorithm.drop_bias true"
                )
            layer.register_parameter("bias", None)
