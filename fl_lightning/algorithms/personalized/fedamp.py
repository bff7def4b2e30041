"""FedAMP and HeurFedAMP: each client's personalised model is pulled towards a mixture of similar models.

Huang, Chu, Zhou, Wang, Liu, Pei, Zhang: "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021,
Algorithm 1, with `A(x) = 1 - exp(-x/σ)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fl_lightning.algorithms.aggregators import Aggregator
from fl_lightning.algorithms.base import Algorithm, Buffers
from fl_lightning.algorithms.global_model.fedprox import Proximal
from fl_lightning.client.loss_term import LossTerm
from fl_lightning.client.module import ClientModule
from fl_lightning.client.weights import load_weights
from fl_lightning.core.arguments import number
from fl_lightning.core.message import Message, Tensors, Upload
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import State, VisibleState, flatten, weighted_mean

UPLOADED = "uploaded"
"""The section of the client state with the client's last upload, which the server has too."""


def message_weights(own: Tensor, others: Sequence[Tensor], alpha: float, sigma: float) -> Tensor:
    """Return FedAMP's weights `ξ_ij = α A'(||w_i - w_j||²)` of the other clients' models, `(m,)`, with sum at most 1.

    `A'(x) = exp(-x/σ)/σ`. A larger sum, which is possible for a large α, is scaled to 1. `ξ_ii` is 1 minus the sum.

    Args:
        own: `w_i`, `(P,)`.
        others: The m other `w_j`.
        alpha: α.
        sigma: σ.
    """
    squares = torch.stack([(own - other).square().sum() for other in others])
    weights = alpha / sigma * (-squares / sigma).exp()
    return weights / weights.sum().clamp(min=1)


def heuristic_weights(own: Tensor, others: Sequence[Tensor], self_weight: float, sigma: float) -> Tensor:
    """Return HeurFedAMP's weights `ξ_ij` of the other clients' models in a client's mixture, `(m,)`.

    They grow with the cosine similarity of the models:

    `ξ_ij = (1 - ξ_ii) exp(σ cos(w_i, w_j)) / Σ_h exp(σ cos(w_i, w_h))`, with h ≠ i.

    Args:
        own: `w_i`, `(P,)`.
        others: The m other `w_j`.
        self_weight: `ξ_ii`.
        sigma: σ.
    """
    cosines = torch.stack([torch.cosine_similarity(own, other, dim=0) for other in others])
    return (1 - self_weight) * (sigma * cosines).softmax(dim=0)


class LastUploads(Aggregator):
    """Record which clients have uploaded a model in this round, and which in any round.

    Servers use the record to mix the clients' last uploads, which are stored in the client states.

    In the section `heard`, `last` `(N,)` marks this round's participants and `ever` all participants so far. The
    state's `model` stays the initial one, which is every client's model before it trains.
    """

    only_in = "FedAMP"

    def fold(self, folded: list[int], upload: Upload) -> None:
        """Keep the id of a client that uploaded this round."""
        folded.append(upload.client)

    def finish(self, folded: list[int], round: Round, knowledge: State) -> State:
        """Return the server's record of clients that have uploaded, with this round's participants added."""
        last = torch.zeros_like(round.before["heard"]["ever"])
        last[folded] = True
        return {"heard": {"last": last, "ever": round.before["heard"]["ever"] | last}}


class FedAMP(Algorithm):
    """Each personalised model is kept near a mixture of all models, in which similar models weigh more.

    Each client continues from its own model and adds `λ/(2α) ||w - u_i||²` to its loss. Its personalized cloud model
    `u_i` is a mixture of its own last upload and those of the last round's participants. Round 1 has no cloud model.
    With `lam` 0 clients train independently. BatchNorm's statistics never leave the client.

    Bytes a round, each participant: down `4 * P`, up `4 * P + 8`.

    Kept by a client: its model. Kept by the server: the last model of each client.

    Args:
        alpha: α, the step size of the message passing, above 0.
        sigma: σ, the scale of squared distances at which models attend to each other, above 0. Choose it near
            `||w_i - w_j||²`.
        lam: λ, the weight of the proximal term, 0 or more.
    """

    alpha: float = number(1.0, "(0, inf)")
    sigma: float = number(1.0, "(0, inf)")
    lam: float = number(1.0, "[0, inf)", "0 switches the term off")
    aggregator: Aggregator = field(init=False)
    buffers: Buffers = field(default="local", init=False)

    search_space: ClassVar = {  # our choice: the papers' values span five decades
        "alpha": {"distribution": "log_uniform_values", "min": 0.1, "max": 100.0},
        "sigma": {"distribution": "log_uniform_values", "min": 0.1, "max": 100.0},
    }
    one_model = False
    public = UPLOADED
    personal_section = UPLOADED

    def own_terms(self) -> list[LossTerm]:
        """Return the proximal term around the cloud model."""
        return [Proximal(self.lam / self.alpha)]

    def own_aggregator(self) -> Aggregator:
        """Return the store of the clients' last models."""
        return LastUploads()

    def weights(self, own: Tensor, others: Sequence[Tensor]) -> Tensor:
        """Return the weights `ξ_ij` of the other clients' models in client i's mixture.

        The weight of client i's own model is 1 minus their sum.
        """
        return message_weights(own, others, self.alpha, self.sigma)

    def initial_state(self, backbone: nn.Module, num_classes: int, clients: int, rng: np.random.Generator) -> State:
        """Return the initial weights, and an empty record of the clients that have uploaded."""
        none = torch.zeros(clients, dtype=torch.bool)
        return super().initial_state(backbone, num_classes, clients, rng) | {"heard": {"last": none, "ever": none}}

    def add_client(self, state: State, memory: State) -> State:
        """Return the state with one more client, which has not uploaded a model."""
        return state | {"heard": {name: pad(value, (0, 1)) for name, value in state["heard"].items()}}

    def download(self, state: State, client: int, rng: np.random.Generator) -> Message:
        """Return the message to a client: its cloud model (mixture) `u_i`, or no model before the first uploads."""
        sections = {piece.name: state[piece.name] for piece in self.knowledge}
        if state["heard"]["last"].any():
            sections["cloud"] = self.cloud_model(state, client)
        return Message.pack(sections)

    def cloud_model(self, state: State, client: int) -> Tensors:
        """Return a client's cloud model, the mixture `u_i = Σ_j ξ_ij w_j` of its own and other clients' models.

        If the client has not trained, its own model `w_i` is the initial model.
        """
        assert isinstance(state, VisibleState)
        own = state.peer(client) if state["heard"]["ever"][client] else state["model"]
        peers = [j for j in state["heard"]["last"].nonzero()[:, 0].tolist() if j != client]
        if not peers:
            return own
        others = [state.peer(j) for j in peers]
        one, *rest = flatten([own, *others], self.aggregator.buffers)
        weights = self.weights(one, rest)
        return weighted_mean([own, *others], [max(0.0, 1 - weights.sum().item()), *weights.tolist()])

    def receive(self, module: ClientModule, download: Message, memory: State) -> None:
        """Load the client's own last model, and set the received cloud model as the proximal term's centre."""
        super().receive(module, download, memory)
        load_weights(module.backbone, memory.get(UPLOADED, {}))
        cloud = download.section("cloud")
        for term in module.terms():
            if isinstance(term, Proximal):
                term.anchor, term.active = cloud, term.active and bool(cloud)

    def remember(self, module: ClientModule, upload: Message) -> State:
        """Return the client state with the trained model added to it. The client also uploads this model."""
        return super().remember(module, upload) | {UPLOADED: upload.section("model")}


class HeurFedAMP(FedAMP):
    """FedAMP with weights from the models' cosine similarity. A client's own model has a constant weight.

    Bytes a round, each participant: down `4 * P`, up `4 * P + 8`.

    Kept by a client: its model. Kept by the server: the last model of each client.

    Args:
        self_weight: `ξ_ii`, the share of a client's own model in its cloud model, in [0, 1]. By default it equals the
            mean share of the others.
        sigma: σ, the sharpness of the attention to similar models, 0 or more; 0 weights all models equally.
        lam: λ, the weight of the proximal term `λ/2 ||w - u_i||²`.
    """

    self_weight: float | None = number(None, "[0, 1]", "it is a share of the mixture")
    sigma: float = number(10.0, "[0, inf)")
    alpha: float = field(default=1.0, init=False)

    search_space: ClassVar = {  # our choice
        "sigma": {"distribution": "log_uniform_values", "min": 1.0, "max": 100.0},
        "lam": {"distribution": "log_uniform_values", "min": 0.1, "max": 10.0},
    }

    def weights(self, own: Tensor, others: Sequence[Tensor]) -> Tensor:
        """Return the weights `ξ_ij` of the other clients' models in client i's mixture, from cosine similarities."""
        share = 1 / (len(others) + 1) if self.self_weight is None else self.self_weight
        return heuristic_weights(own, others, share, self.sigma)
