"""FedKD: mutual distillation between an own and a shared network, whose changes are compressed before they are sent.

Wu, Wu, Lyu, Huang, Xie: "Communication-efficient federated learning via knowledge distillation", Nature Communications
2022, Methods.

The client's own network is the paper's mentor (or teacher), and the shared network its mentee (or student). They distil
each other's outputs and features, the less the larger their losses on the labels are. Clients and server send changes
of the mentee, each matrix as the product of two small ones from its singular value decomposition.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.algorithms.aggregators import Aggregator, WeightedMean
from fl_lightning.algorithms.base import Batches
from fl_lightning.algorithms.personalized.fml import FML, output_loss
from fl_lightning.client.loss_term import Step
from fl_lightning.client.module import ClientModule
from fl_lightning.client.own_network import TwoLearners
from fl_lightning.client.sgd import check_one_rate
from fl_lightning.client.weights import load_weights, to_cpu
from fl_lightning.core.arguments import count, number
from fl_lightning.core.message import Message, Tensors, Upload
from fl_lightning.core.precision import at_least_float32, without_autocast
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import RunningMean, State
from fl_lightning.models.base import with_features

RECEIVED = "received"
"""The section of the client state with the shared network as the client received it in its last round."""
TRANSFORM = "transform"
"""The section of the client state with the matrix that maps the shared network's features to the own network's."""
FACTORS = "factors"
"""The section of a message with two factors for each compressed matrix, `<name>/left` and `<name>/right`."""
LAST_CHANGE = ("last_dense", "last_factors")
"""The sections of the state with the parts of the server's last message: whole entries, and factors."""
TRAINED = "trained"
"""The section of the state with the last finished round, and the last round of each client."""

# --- Adaptive mutual distillation ---------------------------------------------------------------------------------


def adaptive_weight(own_task: Tensor, shared_task: Tensor) -> Tensor:
    """Return the weight of all distillation losses, `1 / (L_own + L_shared)`, which gets no gradient.

    Args:
        own_task: `L_own`, the own network's loss on the labels.
        shared_task: `L_shared`, the shared network's loss on the labels.
    """
    total = (own_task + shared_task).detach()
    return 1 / total.clamp(min=torch.finfo(total.dtype).eps)


def hidden_loss(own: Tensor, shared: Tensor, transform: Tensor) -> Tensor:
    """Return the mean squared distance between the own network's features and the transformed shared ones.

    Args:
        own: `H_own`, `(B, d)`.
        shared: `H_shared`, `(B, d')`.
        transform: `W`, `(d, d')`; the distance is `||H_own - H_shared Wᵀ||² / (B d)`.
    """
    with without_autocast(own.device):
        return F.mse_loss(F.linear(at_least_float32(shared), at_least_float32(transform)), at_least_float32(own))


# --- Compression by singular value decomposition ------------------------------------------------------------------


def energy_threshold(round: int, rounds: int, start: float, end: float) -> float:
    """Return the share of a matrix's energy that its factors keep, `T(t) = T_start + (T_end - T_start) t`.

    Args:
        round: The round, from 1.
        rounds: Number of rounds after which the share stays at `T_end`; `t` is `(round - 1) / rounds`, at most 1.
        start: `T_start`.
        end: `T_end`.
    """
    return start + (end - start) * min(1.0, (round - 1) / rounds)


def truncated_factors(matrix: Tensor, energy: float) -> tuple[Tensor, Tensor]:
    """Return two factors, `U Σ` and `V`, of the best approximation of a matrix that keeps a share of its energy.

    The energy of a matrix is the sum of its squared singular values. The factors have the smallest rank that keeps the
    share; the rank of a zero matrix is 0.

    Args:
        matrix: `(m, n)`, float64.
        energy: The share, in (0, 1].

    Returns:
        `(m, K)` and `(K, n)`.
    """
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    kept = values.square().cumsum(dim=0)
    rank = int((kept < energy * kept[-1]).sum()) + 1 if kept.any() else 0
    return left[:, :rank] * values[:rank], right[:rank]


def compress(after: Tensors, before: Tensors, energy: float) -> State:
    """Return the sections of a message with the entries of a network that has changed.

    The change of a matrix, or of a convolution's kernel as a matrix with one row per output channel, is sent as
    factors if they are smaller than the entry. Other entries are sent as they are; with an energy of 1, all are.

    Args:
        after: The network's entries to send.
        before: The entries that the receiver has.
        energy: The share of each change's energy to keep.
    """
    dense: Tensors = dict(after)
    factors: Tensors = {}
    for name, value in after.items() if energy < 1 else ():
        if value.dim() < 2 or not value.is_floating_point() or not value.isfinite().all():  # the server reports NaN
            continue
        change = (value.double() - before[name].double()).flatten(start_dim=1)
        left, right = truncated_factors(change, energy)
        if left.numel() + right.numel() < change.numel():
            factors |= {f"{name}/left": left.to(value.dtype), f"{name}/right": right.to(value.dtype)}
            del dense[name]
    return {"model": dense, FACTORS: factors}


def decompress(sections: Mapping[str, Tensors], before: Tensors) -> Tensors:
    """Return the entries of a network from the sections that `compress` returned.

    Args:
        sections: The sections `model` and `factors`; a missing one is empty.
        before: The entries that the receiver has. Not needed if all entries were sent as they are.
    """
    dense, factors = sections.get("model", {}), sections.get(FACTORS, {})

    def restored(name: str) -> Tensor:
        change = factors[f"{name}/left"].double() @ factors[f"{name}/right"].double()
        return (before[name].double() + change.view_as(before[name])).to(before[name].dtype)

    changed = {name.removesuffix("/left") for name in factors if name.endswith("/left")}
    return {name: restored(name) if name in changed else dense[name] for name in (before if changed else dense)}


class DistillingModule(TwoLearners):
    """A client's module with a shared network (`backbone`) and an own one, which distil each other.

    Loss terms are added to the loss of the shared network. The matrix that transforms its features is trained with the
    own network.

    Args:
        parts: The arguments of `ClientModule`; the backbone is the shared network.
        distillation: The weight of all distillation losses.
    """

    method = "FedKD"
    transform: nn.Linear

    def __init__(self, *parts: Any, distillation: float) -> None:
        super().__init__(*parts)
        self.distillation = distillation

    def set_own(self, network: nn.Module) -> None:
        """Use a network as the client's own, with a new matrix that transforms the shared network's features.

        Raises:
            ConfigError: A network does not return features.
        """
        super().set_own(network)
        shared, own = (with_features(one).feature_dim for one in (self.backbone, network))
        self.transform = nn.Linear(shared, own, bias=False)

    def check_fit(self) -> None:
        """Raise an error if gradients are accumulated, or with `lr_factors`, which has none for the transformation."""
        super().check_fit()
        check_one_rate(self, "FedKD")

    def own_parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters of the own network and of the transformation of features."""
        return [*self.own.parameters(), *self.transform.parameters()]

    def own_losses(self, own: Step, shared: Step) -> dict[str, Tensor]:
        """Return the losses of the own network in a training step by name."""
        losses = {self.objective.term: self.objective.loss(own.logits, own.targets)}
        if self.distillation:
            weight = self.distillation_weight(own, shared)
            losses["distillation"] = weight * output_loss(own.logits, shared.logits)
            hidden = hidden_loss(features_of(own), features_of(shared).detach(), self.transform.weight)
            losses["hidden"] = weight * hidden
        return losses

    def shared_losses(self, own: Step, shared: Step) -> dict[str, Tensor]:
        """Return the losses of the shared network in a training step by name."""
        losses = self.losses(shared)
        if self.distillation:
            weight = self.distillation_weight(own, shared)
            losses["distillation"] = weight * output_loss(shared.logits, own.logits)
            transform = self.transform.weight.detach().clone()  # it changes before the backward pass
            losses["hidden"] = weight * hidden_loss(features_of(own).detach(), features_of(shared), transform)
        return losses

    def distillation_weight(self, own: Step, shared: Step) -> Tensor:
        """Return the weight of all distillation losses in a training step."""
        tasks = (self.objective.loss(step.logits, step.targets) for step in (own, shared))
        return self.distillation * adaptive_weight(*tasks)

    @property
    def loss_names(self) -> list[str]:
        """Names of the losses that are recorded: those of the shared and of the own network."""
        parts = ["distillation", "hidden"] if self.distillation else []
        return [*super().loss_names, *parts, *(f"own_{name}" for name in (self.objective.term, *parts))]


def features_of(step: Step) -> Tensor:
    """Return the features of a training step."""
    assert step.features is not None
    return step.features


def distilling_module(module: ClientModule) -> DistillingModule:
    """Assert that a client's module is a `DistillingModule`, and return it with this type."""
    assert isinstance(module, DistillingModule)
    return module


@dataclass
class RestoredModels:
    """The models of a round so far: their mean, and the clients that sent them.

    Args:
        before: The model that the clients received.
    """

    before: Tensors
    mean: RunningMean = field(default_factory=RunningMean)
    clients: list[int] = field(default_factory=list)


class CompressedMean(WeightedMean):
    """Average the clients' models from their compressed changes, and compress the change of the mean.

    The next shared model is the one that clients restore from the compressed change. The state keeps this change for
    clients that took part in the last round. Others receive the whole model.

    Args:
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
        energy_start: See `energy_threshold`.
        energy_end: See `energy_threshold`.
        energy_rounds: See `energy_threshold`.
    """

    energy_start: float = number(0.95, "(0, 1]", "1 sends whole weights")
    energy_end: float = number(0.98, "(0, 1]", "1 sends whole weights")
    energy_rounds: int = count(100)

    only_in = "FedKD"

    def energy(self, round: int) -> float:
        """Return the share of energy that messages of a round keep."""
        return energy_threshold(round, self.energy_rounds, self.energy_start, self.energy_end)

    def initial(self, model: Tensors, num_classes: int) -> State:
        """Return the state of a server to which no client has sent its model yet."""
        never = {"last": torch.tensor(0), "clients": torch.zeros(self.clients, dtype=torch.int64)}
        return {TRAINED: never} | {section: {} for section in LAST_CHANGE}

    def begin(self, round: Round) -> RestoredModels:  # type: ignore[override]
        """Return an empty mean, and the model that the clients received."""
        return RestoredModels(round.before["model"])

    def fold(self, folded: RestoredModels, upload: Upload) -> None:  # type: ignore[override]
        """Restore a client's model, and add it to the mean."""
        model = decompress(upload.message.sections, folded.before)
        folded.mean.add(model, upload.n_samples if self.weighting == "samples" else 1)
        folded.clients.append(upload.client)

    def finish(self, folded: RestoredModels, round: Round, knowledge: State) -> State:  # type: ignore[override]
        """Return the next model, its compressed change, and the round in which each client took part last."""
        change = compress(folded.mean.value(), folded.before, self.energy(round.number))
        rounds = round.before[TRAINED]["clients"].clone()
        rounds[folded.clients] = round.number
        kept = change if change[FACTORS] else {"model": {}, FACTORS: {}}  # otherwise the change is the model
        return {
            "model": decompress(change, folded.before),
            **dict(zip(LAST_CHANGE, (kept["model"], kept[FACTORS]), strict=True)),
            TRAINED: {"last": torch.tensor(round.number), "clients": rounds},
        }


class FedKD(FML):
    """Clients train an own and a shared network, which distil each other. Compressed changes of the latter are sent.

    The client's own network is the experiment's `model`. It never leaves the client, and is evaluated as the client's
    model. The shared network is the global model. With `distillation: 0` the own networks are those of `Local`, bit for
    bit. If `energy_start` and `energy_end` are 1 as well, the shared network is that of FedAvg, bit for bit.

    Bytes a round, each participant, at most: down `model`, up `model + 8`. `model` is the shared network.

    Kept by a client: its own network, the received shared network and the matrix between their features. Kept by the
    server: the last compressed change.

    Args:
        shared_model: Builds the shared network, such as `MLP`. By default it is a copy of the client's own network,
            with the same initial weights.
        distillation: Weight of all distillation losses, 0 or more; the paper uses 1.
        energy_start: Share of the energy of each matrix that is kept in the first round, in (0, 1]. 1 sends whole
            weights.
        energy_end: This share at the end, in (0, 1].
        energy_rounds: Number of rounds in which the share goes from `energy_start` to `energy_end`, 1 or more.
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).

    Raises:
        ConfigError: A network does not return features.
    """

    distillation: float = number(1.0, "[0, inf)", "the paper uses 1")
    energy_start: float = number(0.95, "(0, 1]", "1 sends whole weights")
    energy_end: float = number(0.98, "(0, 1]", "1 sends whole weights")
    energy_rounds: int = number(100, "[1, inf)")
    alpha: float = field(default=0.5, init=False)
    beta: float = field(default=0.5, init=False)
    aggregator: Aggregator = field(init=False)

    search_space: ClassVar = {  # our choice, around the paper's 1
        "distillation": {"distribution": "log_uniform_values", "min": 0.1, "max": 10.0},
    }
    whole = False
    uploads_vary = True
    uploads_weights = False  # it has a compression of its own

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        self.module_class = partial(DistillingModule, distillation=self.distillation)

    def own_aggregator(self) -> Aggregator:
        """Return the mean of the clients' models with compressed messages."""
        return CompressedMean(self.weighting, self.energy_start, self.energy_end, self.energy_rounds)

    def download(self, state: State, client: int, rng: np.random.Generator) -> Message:
        """Server: return the compressed change of the last round to its participants, and the whole model to others."""
        message = super().download(state, client, rng)
        dense, factors = (state[section] for section in LAST_CHANGE)
        if factors and state[TRAINED]["clients"][client] == state[TRAINED]["last"]:
            return Message.pack({**message.sections, "model": dense, FACTORS: factors}, **message.numbers)
        return message

    def add_client(self, state: State, memory: State) -> State:
        """Server: return the state with one more client, which has not taken part yet."""
        rounds = F.pad(state[TRAINED]["clients"], (0, 1))
        return state | {TRAINED: {**state[TRAINED], "clients": rounds}}

    def receive(self, module: ClientModule, download: Message, memory: State) -> None:
        """Restore and load the shared network, and load the client's own one and its transformation of features."""
        model = decompress(download.sections, memory.get(RECEIVED, {}))
        module.notes = {RECEIVED: model}
        super().receive(module, Message.pack({**download.sections, "model": model}, **download.numbers), memory)
        if TRANSFORM in memory:
            load_weights(distilling_module(module).transform, memory[TRANSFORM])

    def upload(self, module: ClientModule, batches: Batches, n_samples: int, num_classes: int) -> Message:
        """Return the compressed change of the shared network, and the number of samples."""
        message = super().upload(module, batches, n_samples, num_classes)
        assert isinstance(self.aggregator, CompressedMean)
        energy = self.aggregator.energy(module.context.round)
        change = compress(message.section("model"), module.notes[RECEIVED], energy)
        return Message.pack({**message.sections, **change}, **message.numbers)

    def remember(self, module: ClientModule, upload: Message) -> State:
        """Return the client state: its own network, the transformation of features, and the received network.

        Raises:
            NonFiniteError: The own network contains NaN or Inf.
        """
        kept = {TRANSFORM: distilling_module(module).transform.state_dict(), RECEIVED: module.notes[RECEIVED]}
        return super().remember(module, upload) | to_cpu(kept)
