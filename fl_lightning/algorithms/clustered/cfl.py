"""CFL: one model at first, then one for each group of clients whose updates point in the same direction.

Sattler, Müller, Samek: "Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization Under Privacy
Constraints", IEEE TNNLS 2020, as the authors' code has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.algorithms.aggregators import Aggregator, Weighting
from fl_lightning.algorithms.base import Algorithm, Buffers
from fl_lightning.algorithms.clustered.ifca import section
from fl_lightning.client.module import ClientModule, LossTerm
from fl_lightning.core.errors import check_number
from fl_lightning.core.message import Message, Tensors, Upload
from fl_lightning.core.state import State, flatten, weighted_mean

START = "start"
"""The section of a module's notes that holds the weights it was sent."""

LAST = "last_update"
"""The section of a client's memory that holds its last update, which the server has seen too."""


def update(start: Tensors, end: Tensors) -> Tensor:
    """Return `Δ_i`, the change of the parameters by training, `(P,)`, float64."""
    before, after = flatten([start, end])
    return after - before


def cosines(one: Tensor, other: Tensor) -> Tensor:
    """Return `S_ij = <Δ_i, Δ_j> / (||Δ_i|| ||Δ_j|| + 1e-12)`, `(m, n)`, of updates `(m, P)` and `(n, P)`."""
    return one @ other.T / (one.norm(dim=1)[:, None] * other.norm(dim=1) + 1e-12)


def bipartition(similarity: Tensor) -> Tensor:
    """Split clients into two groups by complete linkage, `(m,)` bool. The first client's group is False.

    Args:
        similarity: `S`, `(m, m)`, m at least 2.
    """
    from sklearn.cluster import AgglomerativeClustering  # takes half a second to import

    linkage = AgglomerativeClustering(n_clusters=2, metric="precomputed", linkage="complete")
    labels = torch.from_numpy(linkage.fit_predict((1 - similarity).numpy()))
    return labels != labels[0]


def is_nearer_to_second(one: Tensor, updates: Tensor, groups: Tensor) -> bool:
    """Return which of two groups an update `(P,)` is nearer to, by its least similar member. A tie is False.

    Args:
        one: The update.
        updates: Those of the groups' members, `(m, P)`.
        groups: Which of the two each is in, `(m,)` bool.
    """
    similarity = cosines(one[None].double(), updates)[0]
    return bool(similarity[groups].min() > similarity[~groups].min())


class Splits(Aggregator):
    """Average each cluster, and split a cluster whose mean update is small while its largest update is not.

    The state's `assignment` holds each client's `cluster` `(N,)`, whether it was ever `heard` and the `round`;
    `norms` the norm of each cluster's `mean` update and the `max` of its members', `(clusters,)`, before it was split
    (NaN where nobody took part). The `model` is the mean of all uploads.

    Args:
        eps1: ε1, which the norm of the mean update must be below; `.inf` for any.
        eps2: ε2, which the largest update's norm must be above; `.inf` for none.
        min_rounds: Rounds without splits.
        min_size: A cluster is split if more than so many of it take part.
        weighting: Weigh clients by their number of `samples`, or all the same (`uniform`).

    Raises:
        ConfigError: `eps1`, `eps2` or `min_rounds` is below 0, or `min_size` below 1.
    """

    leaves = ("norms",)

    def __init__(self, eps1: float, eps2: float, min_rounds: int, min_size: int, weighting: Weighting) -> None:
        for name, value in {"eps1": eps1, "eps2": eps2}.items():
            check_number(f"algorithm.{name}", value, "[0, inf]")
        check_number("algorithm.min_rounds", min_rounds, "[0, inf)")
        check_number("algorithm.min_size", min_size, "[1, inf)", "one client cannot be split")
        self.eps1, self.eps2, self.min_rounds, self.min_size = eps1, eps2, min_rounds, min_size
        self.weighting = weighting

    def model_for(self, state: State, client: int) -> Tensors:
        """Return the model of the client's cluster."""
        return state[section(int(state["assignment"]["cluster"][client]))]

    def fold(self, uploads: Iterable[Upload]) -> list[Upload]:
        """Keep every upload: who is averaged with whom is decided when all are there."""
        return list(uploads)

    def finish(self, folded: list[Upload], before: State, knowledge: State) -> State:
        """Split the clusters that meet the conditions, then average the uploads in each cluster."""
        assignment = before["assignment"]
        clusters, heard, round = assignment["cluster"].clone(), assignment["heard"].clone(), assignment["round"] + 1
        count = existing = int(clusters.max()) + 1
        norms = torch.full((2, existing), torch.nan, dtype=torch.float64)
        for cluster, members in group_by_cluster(folded, clusters):
            start = before[section(cluster)]
            updates = torch.stack([update(start, upload.message.section("model")) for upload in members])
            norms[:, cluster] = self.norms(updates, members)
            if (
                round > self.min_rounds
                and len(members) > self.min_size
                and self.should_split(*norms[:, cluster].tolist())
            ):
                clusters[leaving_clients(before, cluster, members, updates)] = count
                count += 1
        heard[[upload.client for upload in folded]] = True
        means = {section(cluster): self.mean(members) for cluster, members in group_by_cluster(folded, clusters)}
        return means | {
            "model": self.mean(folded),
            "assignment": {"cluster": clusters, "heard": heard, "round": round},
            "norms": {"mean": norms[0], "max": norms[1]},
        }

    def weights(self, members: Sequence[Upload]) -> list[float]:
        """Return the weight of each member."""
        return [float(upload.n_samples) if self.weighting == "samples" else 1.0 for upload in members]

    def mean(self, members: Sequence[Upload]) -> Tensors:
        """Return the mean of the members' weights, which is their common start plus their mean update."""
        return weighted_mean((upload.message.section("model") for upload in members), self.weights(members))

    def norms(self, updates: Tensor, members: Sequence[Upload]) -> Tensor:
        """Return the norm of the mean of updates `(m, P)`, and the largest of their norms."""
        weights = torch.tensor(self.weights(members), dtype=torch.float64)
        return torch.stack([(weights / weights.sum() @ updates).norm(), updates.norm(dim=1).max()])

    def should_split(self, mean: float, largest: float) -> bool:
        """Return whether a cluster, but not its members, is at a stationary point: `mean < ε1` and `largest > ε2`."""
        return mean < self.eps1 and largest > self.eps2


def group_by_cluster(uploads: Iterable[Upload], clusters: Tensor) -> list[tuple[int, list[Upload]]]:
    """Group uploads by the clients' clusters `(N,)`."""
    groups: dict[int, list[Upload]] = {}
    for upload in uploads:
        groups.setdefault(int(clusters[upload.client]), []).append(upload)
    return sorted(groups.items())


def leaving_clients(state: State, cluster: int, members: Sequence[Upload], updates: Tensor) -> list[int]:
    """Return the clients that leave a cluster when it is split.

    Those who did not take part this round go by their last update; who never did, stays.

    Args:
        state: Before the split.
        cluster: The cluster.
        members: Its participants' uploads.
        updates: Their updates, `(m, P)`.
    """
    groups, present = bipartition(cosines(updates, updates)), [upload.client for upload in members]
    known = (state["assignment"]["cluster"] == cluster) & state["assignment"]["heard"]
    absent = sorted(set(known.nonzero()[:, 0].tolist()) - set(present))
    leaving = [client for client, leaves in zip(present, groups.tolist(), strict=True) if leaves]
    return leaving + [k for k in absent if is_nearer_to_second(state[f"peer_{k}"]["update"], updates, groups)]


class CFL(Algorithm):
    """Clustered training that splits a cluster if the updates of its clients point in different directions.

    All clients begin in one cluster. Where the norm of a cluster's mean update is below `eps1` while a member's is
    above `eps2`, complete linkage cuts it in two; both parts go on from the mean of their own members. Until the first
    split this is FedAvg with `weighting: uniform`, bit for bit; with `eps1` 0 it is for ever. The callback
    `ClusterNorms` logs both norms: set `eps1` and `eps2` by them.

    Bytes a round, each participant: down `model`, up `model + 8`.

    Args:
        eps1: ε1, which the norm of the mean update must be below for a split; `.inf` for any.
        eps2: ε2, which the largest update's norm must be above; `.inf` for none.
        min_rounds: Rounds without splits.
        min_size: A cluster is split if more than so many of it take part in the round.
        weighting: Weigh clients all the same (`uniform`, the authors' code) or by their number of `samples`.
        loss_terms: Loss terms of any paper, added to the cross-entropy.
        buffers: BatchNorm's running statistics: `average` them in each cluster, `local` or `drop`.

    Raises:
        ConfigError: `eps1`, `eps2` or `min_rounds` is below 0, or `min_size` below 1.
    """

    one_model = False
    public = LAST

    def __init__(
        self,
        eps1: float = 0.4,
        eps2: float = 1.6,
        min_rounds: int = 20,
        min_size: int = 2,
        weighting: Weighting = "uniform",
        loss_terms: list[LossTerm] | None = None,
        buffers: Buffers = "average",
    ) -> None:
        super().__init__(loss_terms, Splits(eps1, eps2, min_rounds, min_size, weighting), buffers)

    def initial_state(self, backbone: nn.Module, num_classes: int, clients: int, rng: np.random.Generator) -> State:
        """Return the initial state, with one cluster of all clients."""
        state = super().initial_state(backbone, num_classes, clients, rng)
        assignment = {
            "cluster": torch.zeros(clients, dtype=torch.int64),
            "heard": torch.zeros(clients, dtype=torch.bool),
            "round": torch.tensor(0),
        }
        return state | {section(0): state["model"], "assignment": assignment}

    def receive(self, module: ClientModule, download: Message, memory: State) -> None:
        """Keep the weights before training, from which the update is computed."""
        super().receive(module, download, memory)
        module.notes = {START: download.section("model")}

    def remember(self, module: ClientModule, upload: Message) -> State:
        """Return the client state with the last update, needed when its cluster is split in a round without it."""
        latest = update(module.notes[START], upload.section("model")).float()
        return super().remember(module, upload) | {LAST: {"update": latest}}
