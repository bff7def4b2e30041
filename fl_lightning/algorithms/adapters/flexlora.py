"""FlexLoRA: clients have adapters of different ranks, and each receives the best ones of its rank from the server.

Bai, Chen, Qian, Yao, Li: "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client
Resources", NeurIPS 2024, Section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

import torch
from torch import Tensor

from fl_lightning.algorithms.adapters.fedit import FedIT
from fl_lightning.algorithms.adapters.ranks import receive_rank, upload_rank
from fl_lightning.algorithms.adapters.server import Factors, KeepsFactors
from fl_lightning.algorithms.aggregators import Aggregator
from fl_lightning.algorithms.base import Batches
from fl_lightning.client.module import ClientModule
from fl_lightning.core.message import Message
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import State


def svd_of_product(b: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the singular value decomposition `U diag(S) V` of a product `B A`, without computing the product.

    It is that of the small product of two triangular matrices, from the QR decompositions of `B` and `A^T`.

    Args:
        b: `(m, R)`.
        a: `(R, n)`.

    Returns:
        `U` `(m, q)`, `S` `(q,)` in descending order, and `V` `(q, n)`, with `q` at most `R`.
    """
    q_b, r_b = torch.linalg.qr(b)
    q_a, r_a = torch.linalg.qr(a.T)
    u, s, v = torch.linalg.svd(r_b @ r_a.T, full_matrices=False)
    return q_b @ u, s, v @ q_a.T


def truncate(stacked: tuple[Tensor, Tensor], b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors of the nearest product of rank `r` to a product: `U_r diag(S_r)` and `V_r`.

    Args:
        stacked: The factors of the product, `(m, R)` and `(R, n)`.
        b: The factor `B` before, `(m, r)`, or that of a convolution.
        a: The factor `A` before, `(r, n)`. If the product has fewer singular values than `r`, its last rows are kept
            as the rows that are to be trained next, together with zeros in `B`.

    Returns:
        The new `B` and `A` in float64, with the shapes of those before.
    """
    u, s, v = svd_of_product(*stacked)
    rank = min(len(a), len(s))
    new_b = torch.zeros_like(b, dtype=torch.float64)
    new_b[:, :rank] = (u * s)[:, :rank].reshape(len(b), rank, *b.shape[2:])
    return new_b, torch.cat([v[:rank].reshape(rank, *a.shape[1:]), a[rank:].double()])


class SVDServer(KeepsFactors, Aggregator):
    """Send each client the singular value decomposition of the mean of the products `B_k A_k`, cut at its rank.

    Args:
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
        ranks: Rank of each client's adapters by its id; the list repeats. By default that of the model.
    """

    only_in = "FlexLoRA"

    def finish(self, folded: Factors, round: Round, knowledge: State) -> State:
        """Return the model with adapters of the model's rank: those of smaller rank are their first rows."""
        model = round.before["model"] | folded.others.value()
        for layer in self.layers:
            factors = truncate(folded.stacked(layer), model[layer.b], model[layer.a])
            model[layer.b], model[layer.a] = (factor.to(folded.dtype) for factor in factors)
        return {"model": model}


class FlexLoRA(FedIT):
    """The mean of the clients' products `B_k A_k`, decomposed into adapters of each client's rank.

    The decomposition is exact if the rank is at least that of the mean product; otherwise it loses the smallest
    singular values.

    Bytes a round, each participant, at most: down `trained`, up `trained + 8`. With `ranks`, a client sends and
    receives only the adapters of its own rank.

    Args:
        ranks: Rank of each client's adapters by its id, at most that of the model. The list repeats: `[8, 4]` gives
            client 2 the rank 8. By default all have that of the model. The scaling is that of the model for all.
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).

    Raises:
        ConfigError: A rank is below 1, or above that of the model's adapters.
    """

    ranks: Sequence[int] = ()
    aggregator: Aggregator = field(init=False)

    whole = False
    only_steps_read_data = True
    uploads_vary = True

    def own_aggregator(self) -> Aggregator:
        """Return the server that decomposes the mean product."""
        return SVDServer(self.weighting, self.ranks)

    def receive(self, module: ClientModule, download: Message, memory: State) -> None:
        """Load the model. Adapters of a smaller rank than the model's are extended by zeros."""
        super().receive(module, receive_rank(module, download), memory)

    def upload(self, module: ClientModule, batches: Batches, n_samples: int, num_classes: int) -> Message:
        """Return the trained entries, with adapters of the client's rank."""
        return upload_rank(module, super().upload(module, batches, n_samples, num_classes))
