"""IFCA: several models. Each client trains the one with the lowest loss on its data.

Ghosh, Chung, Yin, Ramchandran: "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020, Algorithm 1,
model averaging.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.algorithms.aggregators import Aggregator, Weighting
from fl_lightning.algorithms.base import Algorithm, Batches, Buffers
from fl_lightning.client.module import ClientModule, LossTerm
from fl_lightning.client.weights import load_weights, reinitialised
from fl_lightning.core.errors import ConfigError, check_number
from fl_lightning.core.message import Message, Tensors, Upload
from fl_lightning.core.state import RunningMean, State

CHOICE = "choice"
"""The section of a module's notes that tells which cluster it has chosen."""


def mean_loss(module: ClientModule, batches: Batches) -> Tensor:
    """Return `F_i(θ)`, the mean loss over all of a client's samples, in the module's present mode; a scalar."""
    sums = [(module.objective.loss(module(x).float(), y, "sum"), len(y)) for x, y in batches]
    losses, counts = zip(*sums, strict=True)
    return torch.stack(losses).double().sum() / sum(counts)


def best_cluster(losses: Tensor) -> int:
    """Return line 9's `ĵ = argmin_j F_i(θ_j)` of losses `(k,)`. A NaN is never chosen."""
    return int(losses.nan_to_num(nan=torch.inf).argmin())


def section(cluster: int) -> str:
    """Return the name of the section that holds a cluster's model."""
    return f"cluster_{cluster}"


class ClusterFold(NamedTuple):
    """The running means of a round's uploads.

    Attributes:
        everybody: The mean of all.
        members: The mean of each cluster that somebody chose.
        choices: Each participant and the cluster it chose.
    """

    everybody: RunningMean
    members: dict[int, RunningMean]
    choices: list[tuple[int, int]]


class ClusterMeans(Aggregator):
    """Average, for each cluster, the uploads of the clients that chose it. A cluster without any keeps its model.

    The state's `model` is the mean of all uploads, and `choices` tells which cluster each participant chose.

    Args:
        weighting: Weigh clients by their number of `samples`, or all the same (`uniform`).
        shared_layers: Entries of the state dict of which all clusters have the mean of everybody, by the beginnings of
            their names; a cluster's section does not have them.
    """

    def __init__(self, weighting: Weighting = "samples", shared_layers: Sequence[str] = ()) -> None:
        self.weighting, self.shared_layers = weighting, tuple(shared_layers)

    def own(self, model: Tensors) -> Tensors:
        """Return the entries of a model that are not shared by all clusters."""
        return {name: value for name, value in model.items() if not name.startswith(self.shared_layers)}

    def fold(self, uploads: Iterable[Upload]) -> ClusterFold:
        """Add each client's weights to everybody's mean and to its cluster's."""
        folded = ClusterFold(RunningMean(), {}, [])
        for upload in uploads:
            weight = upload.n_samples if self.weighting == "samples" else 1
            model, cluster = upload.message.section("model"), int(upload.message.numbers["cluster"])
            folded.everybody.add(model, weight)
            folded.members.setdefault(cluster, RunningMean()).add(self.own(model), weight)
            folded.choices.append((upload.client, cluster))
        return folded

    def finish(self, folded: ClusterFold, before: State, knowledge: State) -> State:
        """Return the mean of each cluster and of all clients."""
        clients, clusters = torch.tensor(folded.choices).T
        means = {section(cluster): mean.value() for cluster, mean in folded.members.items()}
        return {"model": folded.everybody.value(), "choices": {"client": clients, "cluster": clusters}} | means


class IFCA(Algorithm):
    """Clustered training: each client trains that one of k models which has the lowest loss on its data.

    Which cluster a client is in is decided anew each round, on its training data, in eval mode; nobody remembers it.
    With `clusters` 1 this is FedAvg, bit for bit. With more there is no one model to measure: read the clients'
    accuracies, of the models they receive (`evaluation.client_model: received`).

    Bytes a round, each participant: down `clusters * model`, up `model + 16`.

    Args:
        clusters: k, how many models there are. The first starts as every other method's does, the others from random
            weights of their own.
        shared_layers: Layers that all clusters share, averaged over all participants (and sent once): the beginnings
            of their names in the state dict, `["encoder."]` say.
        weighting: Weigh clients by their number of `samples`, or all the same (`uniform`).
        loss_terms: Loss terms of any paper, added to the cross-entropy; they have no say in the choice.
        buffers: BatchNorm's running statistics: `average` them in each cluster, `local` or `drop`.

    Raises:
        ConfigError: `clusters` is below 1.
    """

    def __init__(
        self,
        clusters: int = 2,
        shared_layers: Sequence[str] = (),
        weighting: Weighting = "samples",
        loss_terms: list[LossTerm] | None = None,
        buffers: Buffers = "average",
    ) -> None:
        check_number("algorithm.clusters", clusters, "[1, inf)", "the paper uses 2 to 4")
        self.clusters, self.one_model = clusters, clusters == 1
        self.means = ClusterMeans(weighting, shared_layers)
        super().__init__(loss_terms, self.means, buffers)

    def initial_state(self, backbone: nn.Module, num_classes: int, clients: int, rng: np.random.Generator) -> State:
        """Return the initial state, with a model for each cluster. The first is the initial model.

        Raises:
            ConfigError: The name of a shared layer is no entry's beginning, or there are more clusters than clients.
        """
        check_number("algorithm.clusters", self.clusters, f"[1, {clients}]", "no more than scenario.clients")
        state = super().initial_state(backbone, num_classes, clients, rng)
        for name in self.means.shared_layers:
            if not any(entry.startswith(name) for entry in state["model"]):
                raise ConfigError(
                    f"algorithm.shared_layers: no entry's name begins with {name!r}, as {min(state['model'])!r} does"
                )
        starts = [state["model"], *(reinitialised(backbone, rng) for _ in range(1, self.clusters))]
        own = self.means.own(state["model"])
        return state | {section(j): {name: model[name].clone() for name in own} for j, model in enumerate(starts)}

    def download(self, state: State, client: int, rng: np.random.Generator) -> Message:
        """Return the models of all clusters. Shared layers are sent once."""
        own = self.means.own(state["model"])
        sections = {"model": {name: value for name, value in state["model"].items() if name not in own}}
        sections |= {section(j): state[section(j)] for j in range(self.clusters)}
        return Message.pack(sections | {piece.name: state[piece.name] for piece in self.knowledge})

    def receive(self, module: ClientModule, download: Message, memory: State) -> None:
        """Store all models in the module's notes, and load the first."""
        super().receive(module, download, memory)
        module.notes = {section(j): download.section(section(j)) for j in range(self.clusters)}
        choose(module, 0)

    def prepare(self, module: ClientModule, batches: Batches, validation: Batches) -> None:
        """Load the model with the lowest loss on the training data (line 9)."""
        losses = []
        with torch.no_grad():
            for cluster in range(self.clusters):
                choose(module, cluster)
                losses.append(mean_loss(module, batches))
        chosen = best_cluster(torch.stack(losses))
        choose(module, chosen)
        module.notes = {CHOICE: {"cluster": torch.tensor(chosen)}}

    def upload(self, module: ClientModule, batches: Batches, n_samples: int, num_classes: int) -> Message:
        """Return the weights and the number of their cluster."""
        message = super().upload(module, batches, n_samples, num_classes)
        return Message(message.tensors, message.numbers | {"cluster": int(module.notes[CHOICE]["cluster"])})


def choose(module: ClientModule, cluster: int) -> None:
    """Load one of the models that a module holds into its backbone."""
    load_weights(module.backbone, module.notes[section(cluster)])
