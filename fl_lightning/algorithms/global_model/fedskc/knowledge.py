"""FedSKC's structural knowledge: mean logits per class of each client, merged on the server (Eq. 1)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.client.knowledge import SharedKnowledge, class_sums, class_sums_over, class_values, with_previous
from fl_lightning.client.loss_term import Step
from fl_lightning.client.module import ClientModule
from fl_lightning.core.errors import check_number
from fl_lightning.core.message import Tensors, Upload
from fl_lightning.core.round import Round


def local_knowledge(sums: Tensor, counts: Tensor, silu: bool = True) -> Tensor:
    """Return a client's structural knowledge `c_k^j = m_j · sigmoid(m_j)`, with `m_j` the mean logits of class j.

    Args:
        sums: `(C, C)`; row j is the sum of the logits of the client's samples of class j.
        counts: Samples per class, `(C,)`.
        silu: Whether to multiply by the sigmoid. The authors' code does not.

    Returns:
        `(C, C)`; rows of classes without samples on the client are zero.
    """
    means = sums / counts.clamp(min=1)[:, None]
    return F.silu(means) if silu else means


def global_knowledge(local: Tensor, held: Tensor, similar_clients: int) -> tuple[Tensor, Tensor]:
    """Merge the clients' mean logits of each class into global mean logits (Eq. 1).

    For each class, a client's mean logits are first averaged with those of the most similar clients. The results are
    then averaged over the clients with samples of the class. For h such clients, `min(M, h - 1)` neighbours are used.

    Args:
        local: `(K, C, C)` knowledge of the participants.
        held: `(K, C)` bool, the classes that each client has samples of.
        similar_clients: M, the number of nearest clients that are averaged with each client.

    Returns:
        Global knowledge `(C, C)` and the `(C,)` mask of classes with samples on any client; other rows are zero.
    """
    merged = torch.zeros_like(local[0])
    for j in range(held.shape[1]):
        own = local[held[:, j], j].double()
        if len(own):
            distance = (own[:, None] - own[None, :]).norm(dim=2)  # 0 to itself
            group = distance.argsort(dim=1, stable=True)[:, : min(similar_clients, len(own) - 1) + 1]
            merged[j] = own[group].mean(dim=1).mean(dim=0).to(merged.dtype)
    return merged, held.any(dim=0)


class StructuralKnowledge(SharedKnowledge):
    """FedSKC's shared knowledge: mean logits per class, merged over clients (Eq. 1), and which classes have them.

    Args:
        similar_clients: M of Eq. 1, 0 or more.
    """

    needs_classes = True
    name = "structural"

    def __init__(self, similar_clients: int = 1) -> None:
        super().__init__()
        check_number("algorithm.similar_clients", similar_clients, "[0, inf)")
        self.similar_clients = similar_clients
        self.values: Tensor | None
        self.known: Tensor | None
        self.register_buffer("values", None, persistent=False)
        self.register_buffer("known", None, persistent=False)

    def initial(self, num_classes: int) -> Tensors:
        """Return the global knowledge before round 1: all zeros, with no class marked as known."""
        return {
            "values": torch.zeros(num_classes, num_classes),
            "known": torch.zeros(num_classes, dtype=torch.bool),
        }

    def summarize(self, module: ClientModule, batches: Iterable[tuple[Tensor, Tensor]], num_classes: int) -> Tensors:
        """Return the client's mean logits per class times their sigmoid, `c_k`, and the mask of the classes it has."""
        sums, counts = class_sums_over(batches, module, num_classes)
        return {"values": local_knowledge(sums, counts), "known": counts > 0}

    def merge(self, previous: Tensors, uploads: Sequence[Upload], round: Round) -> Tensors:
        """Return the merged mean logits per class (Eq. 1). Classes without samples in the round keep the old ones."""
        return with_previous(*global_knowledge(*class_values(uploads, self.name), self.similar_clients), previous)


class ReferenceKnowledge(StructuralKnowledge):
    """Class-wise mean logits as in the authors' code: from the last local epoch, not multiplied by their sigmoid.

    The logits are summed during training. A class without samples among the round's participants becomes unknown.

    Args:
        similar_clients: M of Eq. 1.
    """

    observes = True

    def __init__(self, similar_clients: int = 1) -> None:
        super().__init__(similar_clients)
        self._observed: tuple[int, Tensor, Tensor] | None = None

    def observe(self, step: Step, epoch: int) -> None:
        """Add the logits of a training batch to the epoch's sum for each class."""
        sums, counts = class_sums(step.logits.detach(), step.targets, step.logits.shape[1])
        if self._observed and self._observed[0] == epoch:
            sums, counts = sums + self._observed[1], counts + self._observed[2]
        self._observed = (epoch, sums, counts)

    def summarize(self, module: ClientModule, batches: Iterable[tuple[Tensor, Tensor]], num_classes: int) -> Tensors:
        """Return the mean training logits of each class, and the mask of the classes that the client has."""
        _, sums, counts = self._observed or (0, *class_sums_over(batches, module, num_classes))
        return {"values": local_knowledge(sums, counts, silu=False), "known": counts > 0}

    def merge(self, previous: Tensors, uploads: Sequence[Upload], round: Round) -> Tensors:
        """Return the merged mean logits per class (Eq. 1), and the mask of the classes with samples in this round."""
        values, known = global_knowledge(*class_values(uploads, self.name), self.similar_clients)
        return {"values": values, "known": known}


def knowledge_class(reference: bool) -> type[StructuralKnowledge]:
    """Return the Python class for structural knowledge, as in the authors' code (`reference`) or in the paper."""
    return ReferenceKnowledge if reference else StructuralKnowledge
