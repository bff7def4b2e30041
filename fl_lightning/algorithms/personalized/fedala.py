"""FedALA: before training, each client mixes the received model element by element with its own last model.

Zhang, Hua, Wang, Song, Xue, Ma, Guan: "FedALA: Adaptive Local Aggregation for Personalized Federated Learning", AAAI
2023. Equations below are the paper's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn
from torch.func import functional_call

from fl_lightning.algorithms.base import Algorithm, Batches
from fl_lightning.client.module import ClientModule
from fl_lightning.client.weights import load_weights, to_cpu
from fl_lightning.core.arguments import number
from fl_lightning.core.message import Message, Tensors
from fl_lightning.core.state_dicts import State

LOCAL, WEIGHTS = "ala_local", "ala_weights"
"""The sections of the client state with the top layers of the client's last model and the mixing weights."""

LAST = 10
"""Number of the last passes over the data by which convergence is tested."""


def mix_models(local: Tensors, received: Tensors, weights: Tensors) -> Tensors:
    """Return the mixture of a client's last model and the received one, `θ̂ = θ_i + (θ - θ_i) ⊙ W` (Eq. 5)."""
    return {name: own + (received[name] - own) * weights[name] for name, own in local.items()}


def update_weights(weights: Tensors, gradients: Tensors, local: Tensors, received: Tensors, eta: float) -> Tensors:
    """Return the next mixing weights `clip(W - η ∇_W L, 0, 1)` (Eq. 6), with `∇_W L = g ⊙ (θ - θ_i)`.

    Args:
        weights: `W`.
        gradients: `g`, the gradients of the loss with respect to the mixed model.
        local: `θ_i`.
        received: `θ`.
        eta: η.
    """
    return {
        name: (w - eta * gradients[name] * (received[name] - local[name])).clamp(0, 1) for name, w in weights.items()
    }


def has_converged(losses: Sequence[float], threshold: float) -> bool:
    """Return whether the training loss has converged: the standard deviation of its latest values is small.

    It must be below `threshold` over the last `LAST` values, after at least one earlier value.
    """
    last = torch.tensor(losses[-LAST:], dtype=torch.float64)
    return len(losses) > LAST and float(last.std(correction=0)) < threshold


def top_names(backbone: nn.Module, layers: int) -> list[str]:
    """Return the names of the last `layers` parameter tensors of a backbone, not counting its `predictor` module."""
    names = [name for name, _ in backbone.named_parameters() if not name.startswith("predictor.")]
    return names[max(0, len(names) - layers) :]


class FedALA(Algorithm):
    """FedAvg in which a client starts from an element-wise mix of the received and its own last model.

    Before it trains, a client learns the weights of the mixture on part of its data. The lower layers are not mixed.
    With `layers` 0 this is FedAvg, bit for bit. A client's personalised model is the mixture before training: evaluate
    it with `evaluation.client_model: received`. BatchNorm's statistics are not mixed.

    Bytes a round, each participant: down `model`, up `model + 8`.

    Kept by a client: the mixed layers of its last model, and their mixing weights.

    Args:
        layers: p, the number of the model's last parameter tensors that are mixed. A layer's bias is a tensor of its
            own.
        rand_percent: s, the percentage of its training data that a client samples to learn the mixing weights.
        eta: η, the learning rate of the mixing weights, 0 or more. The weights are clipped to [0, 1].
        threshold: The first time, a client learns the weights until the losses of ten passes have a standard deviation
            below this threshold; later, in one pass.
        max_epochs: Maximum number of passes the first time.
        loss_terms: Loss terms for training. They are not used to learn the mixing weights.
    """

    layers: int = number(2, "[0, inf)", "0 mixes nothing")
    rand_percent: float = number(80.0, "(0, 100]")
    eta: float = number(1.0, "[0, inf)")
    threshold: float = number(0.1, "[0, inf)", "0 takes max_epochs passes")
    max_epochs: int = number(100, "[1, inf)")

    search_space: ClassVar = {  # Zhang et al., ablation of s and p
        "rand_percent": {"values": [5.0, 20.0, 40.0, 80.0, 100.0]},
        "layers": {"values": [1, 2, 4, 6]},
    }

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        self.share = self.rand_percent / 100

    def receive(self, module: ClientModule, download: Message, memory: State) -> None:
        """Load the received model, and keep the client's last model in `module.notes`. `prepare` mixes the two.

        A client that has not trained keeps the initial model instead.
        """
        initial = dict(module.backbone.named_parameters())
        names = top_names(module.backbone, self.layers)
        module.notes = {
            LOCAL: memory.get(LOCAL) or {name: initial[name].detach().clone() for name in names},
            WEIGHTS: memory.get(WEIGHTS, {}),
        }
        super().receive(module, download, memory)

    def prepare(self, module: ClientModule, batches: Batches, validation: Batches) -> None:
        """If the client's last model differs from the received model, learn the mixing weights and load the mixture."""
        parameters = dict(module.backbone.named_parameters())
        local = {name: own.to(parameters[name]) for name, own in module.notes[LOCAL].items()}
        received = {name: parameters[name].detach() for name in local}
        if all(torch.equal(own, received[name]) for name, own in local.items()):
            return
        weights = {name: w.to(parameters[name]) for name, w in module.notes[WEIGHTS].items()}
        weights = self._learn_weights(module, batches, local, received, weights)
        load_weights(module.backbone, mix_models(local, received, weights))
        module.notes[WEIGHTS] = weights

    def is_untrained(self, module: ClientModule, memory: State) -> bool:
        """Return whether the mixture contains initial weights, because the client has no last model yet."""
        weights = {} if LOCAL in memory else module.notes[WEIGHTS]
        return super().is_untrained(module, memory) or any(bool((w < 1).any()) for w in weights.values())

    def remember(self, module: ClientModule, upload: Message) -> State:
        """Return the client state: the trained layers that are mixed, and the mixing weights."""
        model = module.backbone.state_dict()
        kept = {LOCAL: {name: model[name] for name in module.notes[LOCAL]}, WEIGHTS: module.notes[WEIGHTS]}
        return super().remember(module, upload) | to_cpu({name: tensors for name, tensors in kept.items() if tensors})

    def _learn_weights(
        self, module: ClientModule, batches: Batches, local: Tensors, received: Tensors, weights: Tensors
    ) -> Tensors:
        """Learn the mixing weights on a random sample of the client's data, and return them.

        Empty `weights` start from 1 and are trained until they converge, for at most `max_epochs`
        passes. Other weights are trained for one pass.
        """
        x, y = (torch.cat(part) for part in zip(*batches, strict=True))
        sample = torch.randperm(len(y))[: max(1, int(self.share * len(y)))].to(y.device)
        passes = 1 if weights else self.max_epochs
        weights = weights or {name: torch.ones_like(own) for name, own in local.items()}
        losses: list[float] = []
        while len(losses) < passes and not has_converged(losses, self.threshold):
            for chosen in sample.split(module.context.batch_size):
                model = {name: value.requires_grad_() for name, value in mix_models(local, received, weights).items()}
                loss = module.objective.loss(functional_call(module.backbone, model, (x[chosen],)), y[chosen])
                gradients = torch.autograd.grad(loss, list(model.values()))
                weights = update_weights(weights, dict(zip(model, gradients, strict=True)), local, received, self.eta)
            losses.append(loss.item())
        return weights
