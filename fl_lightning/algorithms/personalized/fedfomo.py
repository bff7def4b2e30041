"""FedFomo: a client mixes other clients' models, weighted by their benefit on its validation data.

Zhang, Sapra, Fidler, Yeung, Alvarez: "Personalized Federated Learning with First Order Model Optimization", ICLR 2021.
Equations below are the paper's.
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
from fl_lightning.algorithms.base import Algorithm, Batches
from fl_lightning.client.module import ClientModule
from fl_lightning.client.weights import load_weights, to_cpu
from fl_lightning.core.arguments import number
from fl_lightning.core.message import Message, Tensors, Upload, bundle, message_to_tensors, tensors_to_message, unbundle
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import State, VisibleState, flatten, weighted_mean
from fl_lightning.evaluation.evaluation import evaluate

UPLOADED = "uploaded"
"""The section of the client state with the client's last upload, which is its model."""

PREVIOUS = "fomo_previous"
"""The section of the client state with the model from which the client's last training started."""

AFFINITY = "affinity"
"""The section of the state with the affinity matrix, and of uploads with the benefits of the received models."""


def model_benefit(previous_loss: float, loss: float, distance: float) -> float:
    """Return the benefit of another client's model to this client, `(L(θ_prev) - L(θ_n)) / ||θ_n - θ_prev||` (Eq. 3).

    Args:
        previous_loss: `L(θ_prev)` on the client's validation data.
        loss: `L(θ_n)` on the same data.
        distance: `||θ_n - θ_prev||_2`, over all parameters.
    """
    return (previous_loss - loss) / (distance + 1e-5)


def mixing_shares(benefits: Tensor) -> Tensor:
    """Return each model's share in the mixture, `(M,)`: its positive benefit, normalised to sum 1 (Eq. 4).

    A negative benefit counts as 0. All shares are 0 if no benefit is positive.
    """
    positive = benefits.clamp(min=0)
    total = positive.sum()
    return positive / total if total > 0 else positive


def choose_models(
    row: Tensor, others: Sequence[int], models: int, explores: bool, rng: np.random.Generator
) -> list[int]:
    """Choose the other clients' models to send to a client: those of highest affinity, or random ones to explore.

    Args:
        row: The client's row of the affinity matrix, `(N,)`. Ties are broken at random.
        others: The clients to choose from.
        models: Maximum number of models.
        explores: Whether to ignore the affinities.
        rng: Random numbers of this client and round.
    """
    order = rng.permutation(np.asarray(others, dtype=np.int64)).tolist()
    return sorted((order if explores else sorted(order, key=lambda j: -float(row[j])))[:models])


class Affinities(Aggregator):
    """Keep a matrix of how much each client has benefited from every other client's models.

    It also records which clients have uploaded a model.
    """

    only_in = "FedFomo"

    def fold(self, folded: list[tuple[int, Tensors]], upload: Upload) -> None:
        """Keep a participant's id and its uploaded benefits: how much each received model helped it (Eq. 3)."""
        folded.append((upload.client, upload.message.section(AFFINITY)))

    def finish(self, folded: list[tuple[int, Tensors]], round: Round, knowledge: State) -> State:
        """Add this round's uploaded benefits (Eq. 3) to the affinity matrix, and return the new matrix.

        A benefit is added in the participant's row and in the column of the client whose model it received.
        """
        matrix, trained = round.before[AFFINITY]["matrix"].clone(), round.before[AFFINITY]["trained"].clone()
        for client, benefits in folded:
            trained[client] = True
            matrix[client, benefits["peer"]] += benefits["worth"]
        return {AFFINITY: {"matrix": matrix, "trained": trained, "rounds": round.before[AFFINITY]["rounds"] + 1}}


class FedFomo(Algorithm):
    """Clients mix their own model with a few others, weighted by how much each model lowers their validation loss.

    The server keeps the last model of each client and the affinities between clients. A client weights its own and the
    received models by their gain over the model from which its last training started. If no model is better than that
    one, it keeps its own. With `models` 0 this is `Local` without the share `validation` of the training data, bit for
    bit.

    Bytes a round, each participant, at most: down `models * (model + 8)`, up `model + 16 * models + 8`.

    Kept by a client: its last trained model, and the model from which that training started. Kept by the server: the
    last model of each client, and the affinities of all pairs.

    Args:
        models: M, the maximum number of models that a client receives. Only models of clients that have trained are
            sent.
        epsilon: ε, the initial probability that a client receives random models, in [0, 1].
        decay: Decrease of that probability per round, in [0, 1].
        validation: Share of a client's training data that is used for validation instead, in [0, 1). With 0, the
            weights come from the training data.
        buffers: BatchNorm's running statistics: `average` mixes them like the weights; `local` or `drop`.
    """

    models: int = number(5, "[0, inf)", "0 sends none")
    epsilon: float = number(0.3, "[0, 1]")
    decay: float = number(0.05, "[0, 1]")
    validation: float = number(0.2, "[0, 1)")
    aggregator: Aggregator = field(init=False)

    search_space: ClassVar = {  # around the values of Zhang et al.
        "models": {"values": [1, 3, 5, 10]},
        "epsilon": {"distribution": "uniform", "min": 0.0, "max": 1.0},
    }
    one_model = False
    public = UPLOADED
    uploads_vary = True

    def own_aggregator(self) -> Aggregator:
        """Return the store of the clients' models and affinities."""
        return Affinities()

    def initial_state(self, backbone: nn.Module, num_classes: int, clients: int, rng: np.random.Generator) -> State:
        """Return the initial weights, and an affinity matrix in which each client prefers its own model."""
        affinity = {
            "matrix": torch.eye(clients, dtype=torch.float64),
            "trained": torch.zeros(clients, dtype=torch.bool),
            "rounds": torch.tensor(0),
        }
        return super().initial_state(backbone, num_classes, clients, rng) | {AFFINITY: affinity}

    def add_client(self, state: State, memory: State) -> State:
        """Return the state with one more client, which has not received any model.

        Its affinities are 0, so the server sends it random models.
        """
        matrix = pad(state[AFFINITY]["matrix"], (0, 1, 0, 1))
        return state | {AFFINITY: state[AFFINITY] | {"matrix": matrix}}

    def download(self, state: State, client: int, rng: np.random.Generator) -> Message:
        """Return the message to a client: models of other clients, and the tensors that loss terms need, if any."""
        assert isinstance(state, VisibleState)
        affinity = state[AFFINITY]
        others = [j for j in affinity["trained"].nonzero()[:, 0].tolist() if j != client]
        explores = rng.random() < self.epsilon - self.decay * int(affinity["rounds"])
        peers = choose_models(affinity["matrix"][client], others, self.models, explores, rng)
        models = bundle({j: tensors_to_message(state.peer(j)) for j in peers})
        known = super().download(state, client, rng).without("model")
        return Message(known.tensors | models.tensors, models.numbers)

    def receive(self, module: ClientModule, download: Message, memory: State) -> None:
        """Load the client's own last model, and keep the received models for `prepare`."""
        own = tensors_to_message(memory.get(UPLOADED, {})).section("model")
        super().receive(module, download.plus({"model": own}), memory)
        module.notes = {PREVIOUS: memory.get(PREVIOUS) or self._copy_model(module)}
        module.notes |= {str(each.client): each.message.section("model") for each in unbundle(download)}

    def prepare(self, module: ClientModule, batches: Batches, validation: Batches) -> None:
        """Load the mixture of the client's own and the received models, weighted by their benefit (Eq. 3 and 4).

        If no model has a benefit, the client keeps its own.
        """
        previous = module.notes.pop(PREVIOUS)
        received = {int(peer): model for peer, model in module.notes.items()}
        models = [self._copy_model(module), *received.values()]
        benefits = self._benefits(module, previous, models, list(validation) or list(batches))
        mixture = weighted_mean(models, mixing_shares(benefits).tolist()) if (benefits > 0).any() else models[0]
        load_weights(module.backbone, mixture)
        of_peers = {"peer": torch.tensor([*received], dtype=torch.int64), "worth": benefits[1:]}
        module.notes = {AFFINITY: of_peers, PREVIOUS: self._copy_model(module)}  # for `upload` and `remember`

    def is_untrained(self, module: ClientModule, memory: State) -> bool:
        """Return whether the model is the initial one: the client has no own model, and no received one was better."""
        benefits = module.notes.get(AFFINITY, {}).get("worth", torch.zeros(0))
        return super().is_untrained(module, memory) or (UPLOADED not in memory and not bool((benefits > 0).any()))

    def upload(self, module: ClientModule, batches: Batches, n_samples: int, num_classes: int) -> Message:
        """Return the trained model, and how much each received model lowered the client's validation loss (Eq. 3)."""
        message = super().upload(module, batches, n_samples, num_classes)
        return message.plus({AFFINITY: module.notes[AFFINITY]})

    def remember(self, module: ClientModule, upload: Message) -> State:
        """Return the client state: the trained model, which others may receive, and the mixture before training."""
        model = Message.pack({"model": upload.section("model")}, n_samples=upload.numbers["n_samples"])
        own = {UPLOADED: message_to_tensors(model), PREVIOUS: module.notes[PREVIOUS]}
        return super().remember(module, upload) | own

    def _copy_model(self, module: ClientModule) -> Tensors:
        """Return a CPU copy of the module's weights, without those that stay on the client, such as a personal head."""
        return to_cpu({"model": self._shared(module.backbone)})["model"]

    def _benefits(self, module: ClientModule, previous: Tensors, models: Sequence[Tensors], batches: Batches) -> Tensor:
        """Return each model's benefit, `(M,)`: its loss reduction relative to `previous`, per unit of distance (Eq. 3).

        It is the loss of `previous` minus the loss of the model, divided by the distance between the two models.

        This overwrites the module's weights.
        """

        def loss(model: Tensors) -> float:
            load_weights(module.backbone, model)
            return evaluate(module, batches, module.objective).values["loss"]

        with torch.no_grad():
            before, (start, *ends) = loss(previous), flatten([previous, *models], self.aggregator.buffers)
            gains = [
                model_benefit(before, loss(model), float((end - start).norm()))
                for model, end in zip(models, ends, strict=True)
            ]
        return torch.tensor(gains, dtype=torch.float64)
