"""FedSKC's local contrastive learning (LCL): a loss between logits and global mean logits per class (Eq. 2, 3)."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.algorithms.global_model.fedskc.knowledge import StructuralKnowledge, knowledge_class
from fl_lightning.client.loss_term import LossTerm, Step
from fl_lightning.client.module import ClientModule
from fl_lightning.core.errors import check_number
from fl_lightning.core.precision import at_least_float32, without_autocast

Spread = Literal["batch", "none"]


def similarity(logits: Tensor, knowledge: Tensor, spread: Spread = "batch") -> Tensor:
    """Return scaled cosines of each sample's logits with the mean logits of each class (Eq. 2), `(B, J)`.

    It is `cos(l_i, c̃^j) / U_j`, for logits `l_i` and mean logits `c̃^j`. `U_j` is the mean distance of the batch's
    logits to `c̃^j`, at least 1e-6 and without gradient. In the paper it is the mean over the client's whole data.

    Args:
        logits: `(B, C)`.
        knowledge: `(J, C)`, one row per class.
        spread: `none` omits `U_j`, as in the authors' code.

    Returns:
        `(B, J)`.
    """
    if spread == "none":
        return cosine(logits, knowledge)
    distances = torch.linalg.vector_norm(logits.detach()[:, None] - knowledge, dim=2)
    return cosine(logits, knowledge) / distances.mean(dim=0).clamp(min=1e-6)


def cosine(logits: Tensor, knowledge: Tensor) -> Tensor:
    """Return the cosines of samples' logits with the mean logits of classes, `(B, J)`; zero where a norm is zero."""
    return unit_rows(logits) @ unit_rows(knowledge).T


def unit_rows(vectors: Tensor) -> Tensor:
    """Return vectors `(n, C)` divided by their norms, as `F.normalize`, but faster for small tensors."""
    return vectors / torch.linalg.vector_norm(vectors, dim=1, keepdim=True).clamp_min(1e-12)


def local_contrastive_loss(
    logits: Tensor, targets: Tensor, knowledge: Tensor, known: Tensor | None, tau: float, spread: Spread = "batch"
) -> Tensor:
    """Return the contrastive loss (Eq. 3). It is a cross-entropy with the logits `similarity / τ`.

    Classes without knowledge are omitted from the sum, and their samples add nothing.

    Args:
        logits: `(B, C)`.
        targets: `(B,)`.
        knowledge: `(C, C)` global knowledge.
        known: `(C,)` bool, or None if every class is known.
        tau: Temperature, above 0.
        spread: The divisor of the cosines, see `similarity`.
    """
    scores = similarity(logits, knowledge, spread) / tau
    if known is None:
        return F.cross_entropy(scores, targets)
    scores = scores.masked_fill(~known, -torch.inf)
    loss = F.cross_entropy(scores, targets.masked_fill(~known[targets], -100), reduction="sum")
    return loss / len(targets)


def reference_contrastive_loss(logits: Tensor, targets: Tensor, knowledge: Tensor, known: Tensor, tau: float) -> Tensor:
    """Return the authors' version of the contrastive loss: its denominator counts the sample's own class twice.

    The similarities are not divided by `U_j`. For a sample of an unknown class, the positive is its own detached
    logits.
    """
    scores = cosine(logits, knowledge) / tau
    own = F.cosine_similarity(logits, logits.detach(), dim=1) / tau
    positive = torch.where(known[targets], scores.gather(1, targets[:, None])[:, 0], own)
    negatives = scores.masked_fill(~known, -torch.inf)
    return (torch.logsumexp(torch.cat([positive[:, None], negatives], dim=1), dim=1) - positive).mean()


class PaperContrast(NamedTuple):
    """The local contrastive loss of the paper, at full weight in every round.

    Attributes:
        spread: The divisor of the cosines, see `similarity`.
    """

    spread: Spread

    def scale(self, round: int) -> float:
        """Return the weight of the contrastive loss in a round: always 1."""
        return 1.0

    def loss(self, logits: Tensor, targets: Tensor, knowledge: Tensor, known: Tensor | None, tau: float) -> Tensor:
        """Return the paper's contrastive loss (Eq. 3); for the arguments see `local_contrastive_loss`."""
        return local_contrastive_loss(logits, targets, knowledge, known, tau, self.spread)


class ReferenceContrast(NamedTuple):
    """The local contrastive loss of the authors' code. Its weight rises to 1 over the first 100 rounds."""

    def scale(self, round: int) -> float:
        """Return the weight of the contrastive loss in a round, which rises to 1 over 100 rounds."""
        return min(round / 100, 1.0)

    def loss(self, logits: Tensor, targets: Tensor, knowledge: Tensor, known: Tensor | None, tau: float) -> Tensor:
        """Return the authors' contrastive loss; for the arguments see `reference_contrastive_loss`."""
        if known is None:
            known = torch.ones(len(knowledge), dtype=torch.bool, device=logits.device)
        return reference_contrastive_loss(logits, targets, knowledge, known, tau)


class LocalContrastive(LossTerm):
    """LCL: pulls a sample's logits towards the global mean logits of its class, away from those of other classes.

    It is computed in float32 under mixed precision. It is off before there is knowledge, as in round 1.

    Args:
        tau: Temperature `τ` of Eq. 3, above 0.
        similar_clients: M of Eq. 1; the server uses it to merge the knowledge.
        spread: `batch` divides the similarities by `U_j` (Eq. 2), `none` does not, as in the authors' code.
        reference: As in the authors' code, scale by `min(round / 100, 1)`. There is no `U_j`; `spread` is ignored.
        knowledge: Use this instance instead of a new one from `similar_clients` and `reference`.

    Example:
        >>> term = LocalContrastive(tau=0.08)
        >>> term.load(values=torch.eye(3), known=torch.tensor([True, True, True]))
        >>> round(float(term(Step(logits=2 * torch.eye(3), targets=torch.arange(3)))), 4)
        0.0021
    """

    name = "lcl"

    def __init__(
        self,
        tau: float = 0.08,
        similar_clients: int = 1,
        spread: Spread = "batch",
        reference: bool = False,
        knowledge: StructuralKnowledge | None = None,
    ) -> None:
        super().__init__()
        check_number("algorithm.tau", tau, "(0, inf)", "the paper uses 0.08")
        self.tau = tau
        self.contrast: PaperContrast | ReferenceContrast = ReferenceContrast() if reference else PaperContrast(spread)
        self.structural = knowledge or knowledge_class(reference)(similar_clients)
        self.scale = 1.0
        self.all_known = False

    def load(self, values: Tensor, known: Tensor) -> None:
        """Store the received global mean logits per class, `(C, C)`, and the mask of classes that have them, `(C,)`."""
        self.structural.load({"values": values, "known": known})
        self.all_known = bool(known.all())

    def begin(self, module: ClientModule) -> None:
        """Set the weight of the loss term for this fit. Switch it off if no class has global mean logits yet."""
        known = self.structural.known
        self.active = known is not None and bool(known.any())
        self.all_known = known is not None and bool(known.all())
        self.scale = self.contrast.scale(module.context.round)

    def forward(self, step: Step) -> Tensor:
        """Return the contrastive loss (Eq. 3) on a batch, or zero if no global mean logits were received."""
        values, known = self.structural.values, self.structural.known
        if values is None or known is None:
            return step.logits.new_zeros(())
        with without_autocast(step.logits.device):
            logits, values = at_least_float32(step.logits), at_least_float32(values)
            mask = None if self.all_known else known
            loss = self.contrast.loss(logits, step.targets, values, mask, self.tau)
            return loss if self.scale == 1 else self.scale * loss
