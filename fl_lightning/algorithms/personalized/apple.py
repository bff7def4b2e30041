"""APPLE: every client trains a core model, and its personalised model mixes all cores in learned ratios.

Luo, Wu: "Adapt to Adaptation: Learning Personalization for Cross-Silo Federated Learning", IJCAI 2022.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import field
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fl_lightning.algorithms.aggregators import Aggregator
from fl_lightning.algorithms.base import Algorithm, Batches, Buffers
from fl_lightning.client.loss_term import Step
from fl_lightning.client.module import ClientModule
from fl_lightning.client.weights import to_cpu, trainable_parameters
from fl_lightning.core.arguments import number
from fl_lightning.core.message import Message, Tensors, Upload, bundle, message_to_tensors, tensors_to_message, unbundle
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import State, VisibleState

Schedule = Literal["epsilon", "cosine"]

CORE, RATIOS, CORES = "core", "ratios", "cores"
"""Sections: the last upload and the ratios in the client state, and the cores in the shared state."""

EPSILON = 1e-3
"""ε of the schedule: the final λ."""


def personal_model(ratios: Tensor, client: int, core: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """Return client i's personalised model `w_i = Σ_j p_ij c_j`, parameter by parameter.

    With `g = ∂L/∂w_i`, the gradient of the core is `∂L/∂c_i = p_ii g`, and that of a ratio is the sum over all
    parameters `∂L/∂p_ij = ⟨g, c_j⟩`.

    Args:
        ratios: `p_i`, `(N,)`.
        client: i.
        core: The parameters of `c_i`.
        others: The parameters of all clients' cores, each `(N, ...)`. The client's own row is zero.
    """
    pairs = zip(core, others, strict=True)
    return [ratios[client] * own + torch.tensordot(ratios, rest, dims=1) for own, rest in pairs]


def penalty_weight(round: int, length: float, schedule: Schedule) -> float:
    """Return the weight `λ(r)` of the penalty on the mixing ratios. It decreases to 0 at round `length`.

    Args:
        round: r, from 0.
        length: L.
        schedule: Before round L, λ is `ε^(r/L)` with `epsilon`, and `(cos(π r/L) + 1) / 2` with `cosine`.
    """
    if round >= length:
        return 0.0
    return EPSILON ** (round / length) if schedule == "epsilon" else (math.cos(math.pi * round / length) + 1) / 2


class MixedModule(ClientModule):
    """A client's module whose weights are a mix of several clients' core models. It trains its own core and the ratios.

    The backbone holds the mixture, which is updated after each step. The gradients of the backbone's weights are passed
    on to the core and the ratios. Without other clients' cores it trains like a `ClientModule`.

    Args:
        parts: The arguments of `ClientModule`.
        dr_lr: The learning rate of the ratios.
        mu: μ, the weight of the squared distance between the ratios and the initial ones.
        length: L of `penalty_weight`.
        schedule: The schedule of `penalty_weight`.
    """

    def __init__(
        self, *parts: Any, dr_lr: float = 1e-3, mu: float = 0.1, length: float = 16, schedule: Schedule = "epsilon"
    ) -> None:
        super().__init__(*parts)
        self.dr_lr, self.mu, self.length, self.schedule = dr_lr, mu, length, schedule
        self._mixture: list[Tensor] = []
        weights = list(trainable_parameters(self.backbone).values())
        self.set_mixture(0, torch.ones(1), torch.ones(1), weights, [torch.zeros_like(p)[None] for p in weights])

    def set_mixture(
        self, client: int, ratios: Tensor, first: Tensor, core: Sequence[Tensor], others: Sequence[Tensor]
    ) -> None:
        """Set the core models and the client's mixing ratios, and load the mixture of core models into the backbone.

        Args:
            client: i.
            ratios: `p_i`, `(N,)`.
            first: `p^0`, the initial ratios, `(N,)`.
            core: The parameters of `c_i`.
            others: The parameters of all clients' cores, as for `personal_model`.
        """
        like = next(iter(trainable_parameters(self.backbone).values()))
        self.client = client
        self.core = nn.ParameterList([nn.Parameter(value.detach().to(like, copy=True)) for value in core])
        self.ratios = nn.Parameter(ratios.detach().to(like, copy=True))
        self.first: Tensor
        self.register_buffer("first", first.to(like), persistent=False)
        self.others = [value.to(like) for value in others]
        self.mix()

    def mix(self) -> list[Tensor]:
        """Load the mixture of core models into the backbone. Return the mixture with its autograd graph."""
        mixture = personal_model(self.ratios, self.client, list(self.core), self.others)
        with torch.no_grad():
            for weights, value in zip(trainable_parameters(self.backbone).values(), mixture, strict=True):
                weights.copy_(value)
        return mixture

    def trainables(self) -> Iterable[Any]:
        """Return the optimizer's parameter groups: the core, and the mixing ratios with their own learning rate."""
        return [{"params": list(self.core)}, {"params": [self.ratios], "lr": self.dr_lr}]

    def on_fit_start(self) -> None:
        """Move the other clients' core models to the training device, and load the client's mixture of core models."""
        self.others = [value.to(self.device) for value in self.others]
        self._mixture = self.mix()
        super().on_fit_start()

    def losses(self, step: Step) -> dict[str, Tensor]:
        """Return the losses of a step and the penalty on the mixing ratios, `μ λ(r) ||p_i - p^0||²`."""
        losses = super().losses(step)
        if scale := self.mu * penalty_weight(self.context.round - 1, self.length, self.schedule):
            losses["ratios"] = scale * (self.ratios - self.first).square().sum()
        return losses

    @property
    def loss_names(self) -> list[str]:
        """The names of the losses, including the penalty on the mixing ratios."""
        return [*super().loss_names, *["ratios"] * (self.mu > 0)]

    def on_after_backward(self) -> None:
        """Propagate the gradient of the mixture's weights to the core and the mixing ratios."""
        weights = trainable_parameters(self.backbone).values()
        pairs = [(value, p.grad) for value, p in zip(self._mixture, weights, strict=True)]
        mixture, gradients = zip(*[(value, grad) for value, grad in pairs if grad is not None], strict=True)
        torch.autograd.backward(mixture, gradients)
        self.backbone.zero_grad()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Compute and load the mixture of core models again, because the step has changed the core and the ratios."""
        with torch.enable_grad():
            self._mixture = self.mix()

    def on_train_end(self) -> None:
        """Free the autograd graph of the mixture."""
        self._mixture = []


class Cores(Aggregator):
    """Aggregator that records which clients have trained a core model. It does not average the cores."""

    only_in = "APPLE"

    def fold(self, folded: list[int], upload: Upload) -> None:
        """Keep the id of a client that uploaded a core model this round."""
        folded.append(upload.client)

    def finish(self, folded: list[int], round: Round, knowledge: State) -> State:
        """Return the server's record of the clients that have trained a core model in any round."""
        trained = round.before[CORES]["trained"].clone()
        trained[folded] = True
        return {CORES: round.before[CORES] | {"trained": trained}}


class APPLE(Algorithm):
    """Each client trains a core model. Its personalised model mixes all clients' core models in learned ratios.

    The server keeps the last core of each client and does not average. The core of a client that has not trained yet is
    the initial model. With constant ratios of 1 for the own core and 0 otherwise, this is `Local`, bit for bit.

    Bytes a round, each participant, at most: down `(N - 1) * (model - buffers + 8) + 4 * N + 8`, up
    `model - buffers + 8`.

    Kept by a client: its core model, its ratios and BatchNorm's statistics. Kept by the server: the last core model of
    each client.

    Args:
        dr_lr: Learning rate of the ratios. With 0 they stay constant. Cores use the optimizer's learning rate.
        mu: μ, the weight of the squared distance between the ratios and the initial ones, which are the clients' shares
            of all training samples.
        length: L, the number of rounds until that weight is 0. The paper uses a tenth of all rounds.
        schedule: How the weight falls until then: `epsilon`, down to a thousandth, or `cosine`.
        loss_terms: Loss terms on the mixture.
    """

    dr_lr: float = number(1e-3, "[0, inf)")
    mu: float = number(0.1, "[0, inf)")
    length: float = number(16, "[0, inf)")
    schedule: Schedule = "epsilon"
    aggregator: Aggregator = field(init=False)
    buffers: Buffers = field(default="local", init=False)

    search_space: ClassVar = {  # around the values of Luo and Wu
        "dr_lr": {"distribution": "log_uniform_values", "min": 1e-4, "max": 0.1},
        "mu": {"distribution": "log_uniform_values", "min": 0.01, "max": 1.0},
    }
    one_model = False
    whole = False
    public = CORE
    personal_section = CORE

    def __post_init__(self) -> None:
        """Train clients with a mixture of cores."""
        super().__post_init__()
        self.module_class = partial(
            MixedModule, dr_lr=self.dr_lr, mu=self.mu, length=self.length, schedule=self.schedule
        )

    def own_aggregator(self) -> Aggregator:
        """Return the record of the clients that have trained a core."""
        return Cores()

    def initial_state(self, backbone: nn.Module, num_classes: int, clients: int, rng: np.random.Generator) -> State:
        """Return the initial weights, a record of clients with a trained core, and the initial mixing ratios."""
        samples = torch.tensor(self.samples, dtype=torch.float64)
        cores = {
            "trained": torch.zeros(clients, dtype=torch.bool),
            "ratios": (samples / samples.sum()).to(torch.get_default_dtype()),
        }
        return super().initial_state(backbone, num_classes, clients, rng) | {CORES: cores}

    def add_client(self, state: State, memory: State) -> State:
        """Return the server's state with one more client, which has no core model yet.

        Its initial mixing ratio is that of a client with as many samples as the others have on average.
        """
        ratios = state[CORES]["ratios"]
        ratios = torch.cat([ratios, ratios.mean()[None]])
        return state | {CORES: {"trained": pad(state[CORES]["trained"], (0, 1)), "ratios": ratios / ratios.sum()}}

    def download(self, state: State, client: int, rng: np.random.Generator) -> Message:
        """Return the message to a client: the other clients' core models, and the initial mixing ratios.

        The tensors that every client gets, such as those of loss terms, are added.
        """
        assert isinstance(state, VisibleState)
        others = [j for j in state[CORES]["trained"].nonzero()[:, 0].tolist() if j != client]
        cores = bundle({j: tensors_to_message(state.peer(j)) for j in others})
        first = {RATIOS: {"first": state[CORES]["ratios"], "client": torch.tensor(client)}}
        known = super().download(state, client, rng).without("model").plus(first)
        return Message(known.tensors | cores.tensors, cores.numbers)

    def receive(self, module: ClientModule, download: Message, memory: State) -> None:
        """Load the client's core model and mixing ratios, and the mixture of all core models in these ratios."""
        assert isinstance(module, MixedModule)
        initial = {name: p.detach().clone() for name, p in trainable_parameters(module.backbone).items()}
        super().receive(module, download, memory)
        start = download.section(RATIOS)
        client, first = int(start["client"]), start["first"]
        trained = {each.client: each.message.section("model") for each in unbundle(download)}
        zero = {name: torch.zeros_like(value) for name, value in initial.items()}
        cores = [zero if j == client else trained.get(j, initial) for j in range(len(first))]
        own = tensors_to_message(memory.get(CORE, {})).section("model") or initial
        ratios = memory[RATIOS]["values"] if RATIOS in memory else first
        others = [torch.stack([one[name] for one in cores]) for name in initial]
        module.set_mixture(client, ratios, first, [own[name] for name in initial], others)

    def upload(self, module: ClientModule, batches: Batches, n_samples: int, num_classes: int) -> Message:
        """Return the client's trained core model; the mixture is not uploaded."""
        assert isinstance(module, MixedModule)
        core = to_cpu({"model": dict(zip(trainable_parameters(module.backbone), module.core, strict=True))})
        return super().upload(module, batches, n_samples, num_classes).without("model").plus(core)

    def remember(self, module: ClientModule, upload: Message) -> State:
        """Return the client state: the core model, which the server sends to others, and the private mixing ratios."""
        assert isinstance(module, MixedModule)
        core: Tensors = message_to_tensors(Message.pack({"model": upload.section("model")}, **upload.numbers))
        return super().remember(module, upload) | {CORE: core} | to_cpu({RATIOS: {"values": module.ratios}})
