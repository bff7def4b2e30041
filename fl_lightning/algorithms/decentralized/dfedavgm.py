"""DFedAvgM: local SGD with momentum, then each client averages its model with those of its neighbours in a graph.

Sun, Li, Wang: "Decentralized Federated Averaging", IEEE TPAMI 2023, Algorithm 1; the mixing matrix by Xiao, Boyd, Kim:
"Distributed Average Consensus with Least-Mean-Square Deviation", JPDC 2007 (Metropolis weights).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.algorithms.aggregators import Aggregator, Weighting
from fl_lightning.algorithms.decentralized.peers import PeerAlgorithm
from fl_lightning.core.message import Message, Tensors, Upload, peer_section, unbundle
from fl_lightning.core.state_dicts import State, weighted_mean


def metropolis_weights(links: Tensor) -> Tensor:
    """Return the Metropolis weights of a graph, by which each client averages its model with its neighbours' models.

    The weight of two linked clients is `1/(1 + max(d_i, d_j))`, with their numbers of neighbours `d`. Rows sum to 1. In
    an undirected graph, so do columns, and mixing preserves the mean.

    Args:
        links: Row i marks the neighbours of client i, `(N, N)` bool, False on the diagonal.

    Returns:
        `(N, N)`, float64.
    """
    degrees = links.sum(dim=1).double()
    weights = links / (1 + torch.maximum(degrees[:, None], degrees))
    return weights + torch.diag(1 - weights.sum(dim=1))


class DFedAvgM(PeerAlgorithm):
    """Local SGD with momentum. Then each client averages its model with those of its neighbours in a graph.

    The momentum is that of the clients' optimizer (`optimizer: SGD` with `momentum`) and starts from zero in every
    round. In the paper a client mixes at the end of its round; here it mixes at the start of its next round, which is
    equivalent: peers collect the trained models `z`. In a complete graph the mean of all models is that of FedAvg with
    `weighting: uniform`. Without links, clients train alone. The number of samples of a client does not matter.

    Bytes a round, each participant: down `(n_com or N - 1) * (model + 16)`, up `0`.

    Kept by a client: its model.

    Args:
        n_com: Number of neighbours that a client collects from, drawn in each round, all with weight `1/(n_com + 1)`.
            Such a matrix does not preserve the mean. By default all neighbours, with Metropolis weights.
        graph: The neighbours of each client. It should be undirected; complete by default.
    """

    aggregator: Aggregator = field(init=False)
    weighting: Weighting = field(default="uniform", init=False)

    def initial_state(self, backbone: nn.Module, num_classes: int, clients: int, rng: np.random.Generator) -> State:
        """Return the initial weights, the graph of peers and its mixing matrix."""
        state = super().initial_state(backbone, num_classes, clients, rng)
        return state | {"mixing": {"matrix": metropolis_weights(state["links"]["matrix"])}}

    def add_client(self, state: State, memory: State) -> State:
        """Return the shared state with one more client, and with mixing weights computed again for the larger graph."""
        state = super().add_client(state, memory)
        return state | {"mixing": {"matrix": metropolis_weights(state["links"]["matrix"])}}

    def download(self, state: State, client: int, rng: np.random.Generator) -> Message:
        """Return the models that a client collects from its peers, each with its mixing weight."""
        collected = super().download(state, client, rng)
        peers = [upload.client for upload in unbundle(collected)]
        row = state["mixing"]["matrix"][client]
        weights = {j: float(row[j]) if self.n_com is None else 1 / (len(peers) + 1) for j in peers}
        return collected.plus(**{f"{peer_section(j)}/weight": w for j, w in weights.items()})

    def mix(self, own: Message, received: Sequence[Upload]) -> Tensors:
        """Return the weighted mean `x_i = Σ_j w_ij z_j` of the client's and its peers' models.

        `w_ii` is 1 minus the weights of the peers.
        """
        weights = [upload.message.numbers["weight"] for upload in received]
        models = [own.section("model"), *(upload.message.section("model") for upload in received)]
        return weighted_mean(models, [1 - sum(weights), *weights])
