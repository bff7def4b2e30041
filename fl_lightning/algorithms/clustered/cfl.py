"""CFL: start with one model for all clients, and split clusters whose updates point in different directions.

Sattler, Müller, Samek: "Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization Under Privacy
Constraints", IEEE TNNLS 2020, as implemented in the authors' code.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.algorithms.aggregators import Aggregator, Weighting
from fl_lightning.algorithms.base import Algorithm
from fl_lightning.algorithms.clustered.ifca import section
from fl_lightning.client.module import ClientModule
from fl_lightning.core.errors import check_number
from fl_lightning.core.message import Message, Tensors, Upload
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import State, VisibleState, flatten, weighted_mean

START = "start"
"""The section of a module's notes with the received weights."""

LAST = "last_update"
"""The section of the client state with the client's last update, which the server has received too."""


def update(start: Tensors, end: Tensors, buffers: Collection[str] = ()) -> Tensor:
    """Return a client's update `Δ_i`, the change of its parameters by training, as a float64 vector `(P,)`.

    Args:
        start: The received weights.
        end: The trained weights.
        buffers: Names of the network's buffers.
    """
    before, after = flatten([start, end], buffers)
    return after - before


def cosines(one: Tensor, other: Tensor) -> Tensor:
    """Return the cosine similarity of each update in `one` to each update in `other`.

    It is `S_ij = <Δ_i, Δ_j> / (||Δ_i|| ||Δ_j|| + 1e-12)`.

    Args:
        one: `(m, P)`.
        other: `(n, P)`.

    Returns:
        `(m, n)`.
    """
    return one @ other.T / (one.norm(dim=1)[:, None] * other.norm(dim=1) + 1e-12)


def bipartition(similarity: Tensor) -> Tensor:
    """Split clients into two groups by complete-linkage clustering of their updates' cosine similarities.

    Args:
        similarity: `S`, `(m, m)`, m at least 2.

    Returns:
        `(m,)` bool: whether each client is in the second group. The first client is in the first group.
    """
    from sklearn.cluster import AgglomerativeClustering  # takes half a second to import

    linkage = AgglomerativeClustering(n_clusters=2, metric="precomputed", linkage="complete")
    labels = torch.from_numpy(linkage.fit_predict((1 - similarity).numpy()))
    return labels != labels[0]


def is_nearer_to_second(one: Tensor, updates: Tensor, groups: Tensor) -> bool:
    """Return whether an update is more similar to the second of two groups than to the first.

    The similarity to a group is that to its least similar member. If both are equal, the result is False.

    Args:
        one: The update, `(P,)`.
        updates: The updates of the groups' members, `(m, P)`.
        groups: Whether each member is in the second group, `(m,)` bool.
    """
    similarity = cosines(one[None].double(), updates)[0]
    return bool(similarity[groups].min() > similarity[~groups].min())


class Splits(Aggregator):
    """Average uploads by cluster. Split a cluster if its mean update is small, but the update of one client is large.

    The section `assignment` of the state holds each client's `cluster` `(N,)`, whether the client has uploaded before
    (`heard`) and the `round`. The section `norms` holds, for each cluster before it was split, the norm of the `mean`
    update and the `max` of its members' norms, `(clusters,)`; NaN for a cluster without participants. The `model` is
    the mean of all uploads.

    Args:
        eps1: ε1, the upper bound on the norm of the mean update, 0 or more.
        eps2: ε2, the lower bound on the largest norm of an update, 0 or more.
        min_rounds: Number of rounds without splits, 0 or more.
        min_size: A cluster is split if more than this number of its clients take part, 1 or more.
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
    """

    only_in = "CFL"
    leaves = ("norms",)

    def __init__(self, eps1: float, eps2: float, min_rounds: int, min_size: int, weighting: Weighting) -> None:
        for name, value in {"eps1": eps1, "eps2": eps2}.items():
            check_number(f"algorithm.{name}", value, "[0, inf]")
        check_number("algorithm.min_rounds", min_rounds, "[0, inf)")
        check_number("algorithm.min_size", min_size, "[1, inf)", "one client cannot be split")
        self.eps1, self.eps2, self.min_rounds, self.min_size = eps1, eps2, min_rounds, min_size
        self.weighting = weighting

    def model_for(self, state: State, client: int) -> Tensors:
        """Return the model of the cluster that a client belongs to."""
        return state[section(int(state["assignment"]["cluster"][client]))]

    def finish(self, folded: list[Upload], round: Round, knowledge: State) -> State:
        """Split each cluster for which `should_split` is true, then average the uploads in each cluster."""
        assignment = round.before["assignment"]
        clusters, heard, number = assignment["cluster"].clone(), assignment["heard"].clone(), assignment["round"] + 1
        count = existing = int(clusters.max()) + 1
        norms = torch.full((2, existing), torch.nan, dtype=torch.float64)
        for cluster, members in group_by_cluster(folded, clusters):
            start = round.before[section(cluster)]
            updates = torch.stack([update(start, upload.message.section("model"), self.buffers) for upload in members])
            norms[:, cluster] = self.norms(updates, members)
            allowed = number > self.min_rounds and len(members) > self.min_size
            if allowed and self.should_split(*norms[:, cluster].tolist()):
                clusters[leaving_clients(round.before, cluster, members, updates)] = count
                count += 1
        heard[[upload.client for upload in folded]] = True
        means = {section(cluster): self.mean(members) for cluster, members in group_by_cluster(folded, clusters)}
        return means | {
            "model": self.mean(folded),
            "assignment": {"cluster": clusters, "heard": heard, "round": number},
            "norms": {"mean": norms[0], "max": norms[1]},
        }

    def weights(self, members: Sequence[Upload]) -> list[float]:
        """Return each upload's weight in the cluster's mean: its number of samples, or 1 if all weigh the same."""
        return [float(upload.n_samples) if self.weighting == "samples" else 1.0 for upload in members]

    def mean(self, members: Sequence[Upload]) -> Tensors:
        """Return the weighted mean of the models that the members of a cluster uploaded."""
        return weighted_mean((upload.message.section("model") for upload in members), self.weights(members))

    def norms(self, updates: Tensor, members: Sequence[Upload]) -> Tensor:
        """Return the norm of the weighted mean of a cluster's updates `(m, P)`, and the norm of the largest update."""
        weights = torch.tensor(self.weights(members), dtype=torch.float64)
        return torch.stack([(weights / weights.sum() @ updates).norm(), updates.norm(dim=1).max()])

    def should_split(self, mean: float, largest: float) -> bool:
        """Return whether to split a cluster, given the norms of its mean update and of its largest update.

        The first must be below ε1, and the second above ε2.
        """
        return mean < self.eps1 and largest > self.eps2


def group_by_cluster(uploads: Iterable[Upload], clusters: Tensor) -> list[tuple[int, list[Upload]]]:
    """Group uploads by their client's cluster, and return `(cluster, uploads)` pairs in ascending order of clusters."""
    groups: dict[int, list[Upload]] = {}
    for upload in uploads:
        groups.setdefault(int(clusters[upload.client]), []).append(upload)
    return sorted(groups.items())


def leaving_clients(state: State, cluster: int, members: Sequence[Upload], updates: Tensor) -> list[int]:
    """Return the clients that move to a new cluster when their cluster is split.

    Absent clients follow the group that their last update is nearer to. Clients that have never taken part stay.

    Args:
        state: The state before the split.
        cluster: The cluster.
        members: The uploads of the cluster's participants.
        updates: Their updates, `(m, P)`.
    """
    assert isinstance(state, VisibleState)
    groups, present = bipartition(cosines(updates, updates)), [upload.client for upload in members]
    known = (state["assignment"]["cluster"] == cluster) & state["assignment"]["heard"]
    absent = sorted(set(known.nonzero()[:, 0].tolist()) - set(present))
    leaving = [client for client, leaves in zip(present, groups.tolist(), strict=True) if leaves]
    return leaving + [k for k in absent if is_nearer_to_second(state.peer(k)["update"], updates, groups)]


class CFL(Algorithm):
    """Clustered training that splits a cluster if its clients' updates point in different directions.

    All clients start in one cluster. If the norm of a cluster's mean update is below `eps1` and a member's norm is
    above `eps2`, complete linkage splits the cluster in two. Each part continues from the mean of its own members.
    Until the first split this is FedAvg with `weighting: uniform`, bit for bit. With `eps1` 0 there is no split. The
    callback `ClusterNorms` logs both norms, which helps to choose `eps1` and `eps2`.

    Bytes a round, each participant: down `model`, up `model + 8`.

    Kept by a client: its last update. Kept by the server: the clusters, and a model for each.

    Args:
        eps1: ε1: a split needs a mean update with a smaller norm; `.inf` accepts any.
        eps2: ε2: a split needs an update with a larger norm; `.inf` accepts none.
        min_rounds: Number of rounds without splits.
        min_size: A cluster is split if more than this number of its clients take part in the round.
        weighting: Weight clients equally (`uniform`, the authors' code) or by their number of `samples`.
    """

    eps1: float = 0.4
    eps2: float = 1.6
    min_rounds: int = 20
    min_size: int = 2
    weighting: Weighting = "uniform"
    aggregator: Aggregator = field(init=False)

    search_space: ClassVar = {  # around the values of Sattler et al.
        "eps1": {"distribution": "log_uniform_values", "min": 0.1, "max": 1.0},
        "eps2": {"distribution": "log_uniform_values", "min": 0.5, "max": 5.0},
        "min_rounds": {"values": [5, 10, 20]},
    }
    one_model = False
    public = LAST

    def own_aggregator(self) -> Aggregator:
        """Return the aggregator that averages within clusters and splits them."""
        return Splits(self.eps1, self.eps2, self.min_rounds, self.min_size, self.weighting)

    def initial_state(self, backbone: nn.Module, num_classes: int, clients: int, rng: np.random.Generator) -> State:
        """Return the initial server state, in which all clients are in one cluster."""
        state = super().initial_state(backbone, num_classes, clients, rng)
        assignment = {
            "cluster": torch.zeros(clients, dtype=torch.int64),
            "heard": torch.zeros(clients, dtype=torch.bool),
            "round": torch.tensor(0),
        }
        return state | {section(0): state["model"], "assignment": assignment}

    def add_client(self, state: State, memory: State) -> State:
        """Return the state with a new client in its own cluster. Its model is the mean of the last round's uploads."""
        cluster = state["assignment"]["cluster"]
        own = cluster.max()[None] + 1
        return state | {
            section(int(own)): state["model"],
            "assignment": state["assignment"] | {"cluster": torch.cat([cluster, own])},
        }

    def receive(self, module: ClientModule, download: Message, memory: State) -> None:
        """Load the cluster's model, and keep its weights to compute the client's update after training."""
        super().receive(module, download, memory)
        module.notes = {START: download.section("model")}

    def remember(self, module: ClientModule, upload: Message) -> State:
        """Return the client state with the client's latest update.

        The server needs this update if it splits the cluster in a round without this client.
        """
        latest = update(module.notes[START], upload.section("model"), self.aggregator.buffers).float()
        return super().remember(module, upload) | {LAST: {"update": latest}}
