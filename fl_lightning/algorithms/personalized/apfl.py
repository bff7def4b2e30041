"""APFL: each client mixes its own model with the shared one, and learns how much of each.

Deng, Kamani, Mahdavi: "Adaptive Personalized Federated Learning", 2020, Algorithm 1 and Eq. 10.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.func import functional_call

from fl_lightning.algorithms.aggregators import Weighting
from fl_lightning.algorithms.base import Algorithm, Batches
from fl_lightning.client.module import ClientModule
from fl_lightning.client.own_network import OwnNetwork
from fl_lightning.client.sgd import check_one_rate
from fl_lightning.client.weights import buffer_names, kept_model, load_weights, to_cpu, trainable_parameters
from fl_lightning.core.arguments import number
from fl_lightning.core.fixed_tensors import copy_network
from fl_lightning.core.message import Message, Tensors
from fl_lightning.core.state_dicts import State

OWN_MODEL = "own_model"
"""The section of the client state with the client's own model `v`."""
MIXING = "mixing"
"""The section of the client state with the share of the own model, `alpha`."""


class MixedModels(OwnNetwork):
    """A client's module that trains the shared model `w`, and a personal model `v` for the mixture `α v + (1 - α) w`.

    Both take a step on each batch. The step of `v` follows the gradient of the mixture's loss, and does not affect `w`.
    Its optimizer, scheduler and gradient clipping are like those of the shared model.

    Args:
        parts: The arguments of `ClientModule`.
        alpha: α before the client's first round.
        adaptive: Whether α takes a gradient step in each round.
    """

    method = "APFL"

    def __init__(self, *parts: Any, alpha: float, adaptive: bool) -> None:
        super().__init__(*parts)
        self.own, self.adaptive = copy_network(self.backbone), adaptive
        self.register_buffer("alpha", torch.tensor(alpha, dtype=torch.float64), persistent=False)
        self.alpha: Tensor

    def check_fit(self) -> None:
        """Raise an error if gradients are accumulated, or if `lr_factors` leaves no learning rate for an adaptive α."""
        super().check_fit()
        if self.adaptive:  # α takes a step with the learning rate
            check_one_rate(self, "APFL with adaptive alpha")

    def mixture(self) -> Tensors:
        """Return the mixture `v̄ = α v + (1 - α) w` of own and shared parameters, differentiable in `v` only."""
        shared = dict(self.backbone.named_parameters())
        own = trainable_parameters(self.own)
        mixed = {name: self.alpha * v + (1 - self.alpha) * shared[name].detach() for name, v in own.items()}
        return {name: value.to(own[name].dtype) for name, value in mixed.items()}  # α promotes a 0-dim parameter

    def train_own(self, x: Tensor, y: Tensor) -> None:
        """Take a gradient step on the own model `v`. On the round's first batch, also take the step on α.

        By the chain rule, the gradient for `v` is that of the mixture times α: `∇_v f(v̄) = α ∇f(v̄)`.
        """
        mixed, own = self.mixture(), dict(self.own.named_parameters())
        loss = self.objective.loss(functional_call(self.own, mixed, (x,)), y)
        found = torch.autograd.grad(loss, list(mixed.values()), allow_unused=True)
        gradients = {name: g for name, g in zip(mixed, found, strict=True) if g is not None}
        mixture_alpha = self.alpha.clone()  # before `_adapt` changes it
        is_first_batch = not self.steps
        if self.adaptive and is_first_batch:
            self._adapt(gradients)
        self.own_optimizer.zero_grad()
        for name, gradient in gradients.items():
            own[name].grad = (mixture_alpha * gradient).to(gradient.dtype)
        self.clip_gradients(self.own_optimizer)
        self.own_optimizer.step()
        torch.clear_autocast_cache()  # it may contain weights from before the step

    def _adapt(self, gradients: Tensors) -> None:
        """Take a gradient step on α: `α - η <v - w, ∇f(v̄)>` (Eq. 10), clipped to [0, 1]."""
        own, shared = dict(self.own.named_parameters()), dict(self.backbone.named_parameters())
        slope = sum(((own[name] - shared[name]) * g).detach().double().sum() for name, g in gradients.items())
        lr = self.own_optimizer.param_groups[0]["lr"]
        self.alpha.copy_((self.alpha - lr * slope).clamp(0, 1))


def mixed_models(module: ClientModule) -> MixedModels:
    """Assert that a client's module is a `MixedModels`, and return it with this type."""
    assert isinstance(module, MixedModels)
    return module


class APFL(Algorithm):
    """FedAvg, plus a second model that each client keeps. A client predicts with a mixture of both, in a learnt ratio.

    The shared model is that of FedAvg with the same weighting, bit for bit.

    Bytes a round, each participant: down `model`, up `model + 8`.

    Kept by a client: its own model and its α.

    Args:
        alpha: α, the share of the client's own model, in [0, 1].
        adaptive: Let each client learn its α, by one gradient step in each of its rounds.
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
    """

    alpha: float = number(0.5, "[0, 1]")
    adaptive: bool = True
    weighting: Weighting = "samples"

    search_space: ClassVar = {  # Deng et al.: 0.25, 0.5, 0.75
        "alpha": {"distribution": "uniform", "min": 0.1, "max": 0.9},
    }
    trains_new_clients = True
    personal_section = OWN_MODEL

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        self.module_class = partial(MixedModels, alpha=self.alpha, adaptive=self.adaptive)

    def receive(self, module: ClientModule, download: Message, memory: State) -> None:
        """Load the shared model, the client's own model and its share α in the mixture of both."""
        super().receive(module, download, memory)
        if OWN_MODEL in memory:
            mixed = mixed_models(module)
            load_weights(mixed.own, memory[OWN_MODEL])
            mixed.alpha.copy_(memory[MIXING]["alpha"])

    def remember(self, module: ClientModule, upload: Message) -> State:
        """Return the client state, with the client's own model and its share α in the mixture.

        Raises:
            NonFiniteError: The own model contains NaN or Inf.
        """
        mixed = mixed_models(module)
        kept = {OWN_MODEL: kept_model(mixed.own, self.fixed, "client's own model", "Lower the learning rate.")}
        return super().remember(module, upload) | kept | to_cpu({MIXING: {"alpha": mixed.alpha}})

    def personalize(self, module: ClientModule, batches: Batches) -> None:
        """Load the mixture of the client's own and the shared model, for evaluation."""
        mixed = mixed_models(module)
        buffers = buffer_names(mixed.own)  # not the second names of tied parameters
        statistics = {name: value for name, value in mixed.own.state_dict().items() if name in buffers}
        load_weights(module.backbone, statistics | {name: p.detach() for name, p in mixed.mixture().items()})
