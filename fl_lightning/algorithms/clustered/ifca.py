"""IFCA: one model for each cluster. Each client trains the model with the lowest loss on its data.

Ghosh, Chung, Yin, Ramchandran: "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020, Algorithm 1,
model averaging.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.algorithms.aggregators import Aggregator, Weighting
from fl_lightning.algorithms.base import Algorithm, Batches
from fl_lightning.client.module import ClientModule
from fl_lightning.client.received_loss import mean_loss
from fl_lightning.client.weights import load_weights, reinitialised
from fl_lightning.core.arguments import number
from fl_lightning.core.errors import ConfigError, check_number
from fl_lightning.core.message import Message, Tensors, Upload
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import RunningMean, State

CHOICE = "choice"
"""The section of a module's notes with the chosen cluster."""


def best_cluster(losses: Tensor) -> int:
    """Return the index of the cluster with the smallest loss, from losses `(k,)`. NaN counts as the largest loss."""
    return int(losses.nan_to_num(nan=torch.inf).argmin())


def section(cluster: int) -> str:
    """Return the key of a cluster's model in the server's state and in downloads."""
    return f"cluster_{cluster}"


class ClusterFold(NamedTuple):
    """Running means of a round's uploads: over all participants and over those of each cluster.

    Attributes:
        overall: The mean of all uploads.
        members: The mean of each cluster that was chosen.
        choices: Each participant and the cluster that it chose.
    """

    overall: RunningMean
    members: dict[int, RunningMean]
    choices: list[tuple[int, int]]


class ClusterMeans(Aggregator):
    """Average, for each cluster, the uploads of the clients that chose it. Clusters without clients do not change.

    The state's `model` is the mean of all uploads. The section `choices` holds the cluster of each participant.

    Args:
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
        shared_layers: Prefixes of the state dict's entries that are averaged over all clients. The sections of the
            clusters do not contain them.
    """

    weighting: Weighting = "samples"
    shared_layers: Sequence[str] = ()

    only_in = "IFCA"

    def without_shared_layers(self, model: Tensors) -> Tensors:
        """Return the tensors of a model, except those of the layers that all clusters share."""
        return {name: value for name, value in model.items() if not name.startswith(tuple(self.shared_layers))}

    def begin(self, round: Round) -> ClusterFold:
        """Return empty means."""
        return ClusterFold(RunningMean(), {}, [])

    def fold(self, folded: ClusterFold, upload: Upload) -> None:
        """Add a client's weights to the mean over all clients and to the mean of the cluster that it chose."""
        weight = upload.n_samples if self.weighting == "samples" else 1
        model, cluster = upload.message.section("model"), int(upload.message.numbers["cluster"])
        folded.overall.add(model, weight)
        folded.members.setdefault(cluster, RunningMean()).add(self.without_shared_layers(model), weight)
        folded.choices.append((upload.client, cluster))

    def finish(self, folded: ClusterFold, round: Round, knowledge: State) -> State:
        """Return each chosen cluster's mean model, the mean of all uploaded models, and each participant's cluster."""
        clients, clusters = torch.tensor(folded.choices).T
        means = {section(cluster): mean.value() for cluster, mean in folded.members.items()}
        return {"model": folded.overall.value(), "choices": {"client": clients, "cluster": clusters}} | means


class IFCA(Algorithm):
    """Clustered training with k models. Each client trains the model that has the lowest loss on its data.

    A client chooses its cluster again in each round, on its training data, in eval mode. With `clusters` 1 this is
    FedAvg, bit for bit. With more there is no global model to evaluate; evaluate the models that clients receive
    (`evaluation.client_model: received`).

    Bytes a round, each participant: down `clusters * model`, up `model + 16`.

    Kept by the server: a model for each cluster, and the last choices.

    Args:
        clusters: k, the number of models. The first starts from the usual initial weights, the others from other
            random weights.
        shared_layers: Prefixes of the names of layers that all clusters share, such as `["encoder."]`. They are
            averaged over all participants and sent once.
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
        loss_terms: Loss terms for training. They do not affect the choice of the cluster.
    """

    clusters: int = number(2, "[1, inf)", "the paper uses 2 to 4")
    shared_layers: Sequence[str] = ()
    weighting: Weighting = "samples"
    aggregator: ClusterMeans = field(init=False)

    search_space: ClassVar = {"clusters": {"values": [2, 3, 4]}}  # Ghosh et al. use 2 to 4
    trains_new_clients = False

    def __post_init__(self) -> None:
        """With one cluster, there is a model for all clients."""
        super().__post_init__()
        self.one_model = self.clusters == 1

    def own_aggregator(self) -> ClusterMeans:
        """Return the aggregator that averages the models of each cluster."""
        return ClusterMeans(self.weighting, self.shared_layers)

    def initial_state(self, backbone: nn.Module, num_classes: int, clients: int, rng: np.random.Generator) -> State:
        """Return the initial server state. Each cluster's model has different random initial weights.

        Raises:
            ConfigError: No entry begins with the name of a shared layer, or there are more clusters than clients.
        """
        check_number("algorithm.clusters", self.clusters, f"[1, {clients}]", "use at most scenario.clients")
        state = super().initial_state(backbone, num_classes, clients, rng)
        for name in self.aggregator.shared_layers:
            if not any(entry.startswith(name) for entry in state["model"]):
                raise ConfigError(
                    f"algorithm.shared_layers: no entry's name begins with {name!r}, as {min(state['model'])!r} does"
                )
        starts = [state["model"], *(reinitialised(backbone, rng) for _ in range(1, self.clusters))]
        own = self.aggregator.without_shared_layers(state["model"])
        return state | {section(j): {name: model[name].clone() for name in own} for j, model in enumerate(starts)}

    def download(self, state: State, client: int, rng: np.random.Generator) -> Message:
        """Return the message to a client: the models of all clusters, with the `shared_layers` only once."""
        own = self.aggregator.without_shared_layers(state["model"])
        sections = {"model": {name: value for name, value in state["model"].items() if name not in own}}
        sections |= {section(j): state[section(j)] for j in range(self.clusters)}
        return Message.pack(sections | {piece.name: state[piece.name] for piece in self.knowledge})

    def receive(self, module: ClientModule, download: Message, memory: State) -> None:
        """Keep the received models of all clusters for `prepare`, and load the first into the backbone."""
        super().receive(module, download, memory)
        module.notes = {section(j): download.section(section(j)) for j in range(self.clusters)}
        load_cluster(module, 0)

    def prepare(self, module: ClientModule, batches: Batches, validation: Batches) -> None:
        """Choose the cluster whose model has the lowest loss on the client's training data, and load its model."""
        losses = []
        for cluster in range(self.clusters):
            load_cluster(module, cluster)
            losses.append(mean_loss(module, batches))
        chosen = best_cluster(torch.stack(losses))
        load_cluster(module, chosen)
        module.notes = {CHOICE: {"cluster": torch.tensor(chosen)}}

    def upload(self, module: ClientModule, batches: Batches, n_samples: int, num_classes: int) -> Message:
        """Return the trained weights and the index of the cluster that the client chose."""
        message = super().upload(module, batches, n_samples, num_classes)
        return message.plus(cluster=int(module.notes[CHOICE]["cluster"]))


def load_cluster(module: ClientModule, cluster: int) -> None:
    """Load the received model of a cluster into a client's backbone."""
    load_weights(module.backbone, module.notes[section(cluster)])
