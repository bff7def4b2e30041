"""Per-FedAvg: a global model that each client adapts with one local step.

Fallah, Mokhtari, Ozdaglar: "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach", NeurIPS 2020, Algorithm 1. Equations below are the paper's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from fl_lightning.algorithms.aggregators import Weighting
from fl_lightning.algorithms.base import Algorithm, Batches
from fl_lightning.client.loss_term import Step
from fl_lightning.client.losses import loss_with_gradients, total_loss
from fl_lightning.client.module import ClientModule
from fl_lightning.client.weights import load_parameters, trainable_parameters
from fl_lightning.core.arguments import number
from fl_lightning.core.message import Tensors
from fl_lightning.core.precision import without_autocast
from fl_lightning.core.seeding import RandomStates

Order = Literal["first", "hessian_free"]
Batch = TypeVar("Batch")


def take_step(weights: Tensors, gradient: Tensors, length: float) -> Tensors:
    """Return the weights after one gradient step, `w - length · g`; without a gradient they do not change."""
    return weights | {name: weights[name] - length * g for name, g in gradient.items()}


def meta_gradient(
    gradient: Callable[[Tensors, Batch], Tensors],
    weights: Tensors,
    batches: Sequence[Batch],
    alpha: float,
    delta: float | None = None,
) -> Tensors:
    """Estimate the meta-gradient, `(I - α ∇²f(w)) ∇f(w - α ∇f(w))` (Eq. 5), the gradient of `F(w) = f(w - α ∇f(w))`.

    The first-order estimate omits the Hessian. The Hessian-free estimate computes its product with
    `v = ∇f(w - α ∇f(w))` from a difference of gradients (Eq. 10): `v - α (∇f(w + δ v) - ∇f(w - δ v)) / 2δ`.

    Args:
        gradient: Returns `∇f` at given weights on a given batch. Both gradients of the difference use the same random
            numbers.
        weights: `w`.
        batches: The batches `D`, `D'` and, with a δ, `D''`.
        alpha: α.
        delta: δ; None for the first-order estimate.
    """
    v = gradient(take_step(weights, gradient(weights, batches[0]), alpha), batches[1])
    if delta is None:
        return v
    draws = RandomStates(next(iter(v.values())).device)
    ahead = gradient(take_step(weights, v, -delta), batches[2])
    with draws.drawing():  # different dropout masks would have more effect than δ
        behind = gradient(take_step(weights, v, delta), batches[2])
    return {name: g - alpha / (2 * delta) * (ahead[name] - behind[name]) for name, g in v.items()}


def split_batch(batch: tuple[Tensor, Tensor], parts: int) -> list[tuple[Tensor, Tensor]]:
    """Split a batch into parts whose sizes differ by at most one. If it is too small, each part is the whole batch."""
    x, y = batch
    if len(y) < 2 * parts:
        return [batch] * parts
    return list(zip(x.tensor_split(parts), y.tensor_split(parts), strict=True))


class MetaStep(ClientModule):
    """A client's module whose training step minimises the meta-objective: the loss after one step of length α.

    Logged losses, shared knowledge and BatchNorm's statistics come from the batch `D'`, after that step. The trainer
    receives a loss with this value whose gradient is the meta-gradient.

    Args:
        parts: The arguments of `ClientModule`.
        alpha: α.
        delta: δ, or None for the first-order estimate.
    """

    def __init__(self, *parts: Any, alpha: float, delta: float | None) -> None:
        super().__init__(*parts)
        self.alpha, self.delta = alpha, delta

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return a loss for a batch. The gradient of this loss is the meta-gradient."""
        seen: list[tuple[Step, dict[str, Tensor]]] = []
        own = trainable_parameters(self.backbone)
        start = {name: p.detach().clone() for name, p in own.items()}

        def gradient(weights: Tensors, batch: tuple[Tensor, Tensor]) -> Tensors:
            load_parameters(own.values(), weights.values())
            statistics = {buffer: buffer.clone() for buffer in self.backbone.buffers()}
            exact = without_autocast(self.device)  # a difference of gradients needs full precision
            with exact if len(seen) > 1 else nullcontext():
                step = self.step(batch)
                losses = self.losses(step)
            gradients = torch.autograd.grad(total_loss(losses), list(own.values()), allow_unused=True)
            seen.append((step, losses))
            if len(seen) != 2:
                for buffer, value in statistics.items():
                    buffer.copy_(value)
            return {name: g for name, g in zip(own, gradients, strict=True) if g is not None}

        parts = split_batch(batch, 2 if self.delta is None else 3)
        estimate = meta_gradient(gradient, start, parts, self.alpha, self.delta)
        load_parameters(own.values(), start.values())
        step, losses = seen[1]
        self.record_step(step, losses)
        return loss_with_gradients(total_loss(losses), [own[name] for name in estimate], estimate.values())


def adapt(module: ClientModule, batches: Batches, alpha: float) -> None:
    """Take one gradient step `w - α ∇f(w)` in place, on the mean loss over all of a client's training data."""
    optimizer, units = torch.optim.SGD(module.backbone.parameters(), lr=alpha), []
    optimizer.zero_grad()
    with torch.enable_grad():
        for x, y in batches:
            module.objective.loss(module(x), y, "sum").backward()
            units.append(module.objective.units(y))
    for group in optimizer.param_groups:
        group["lr"] /= int(torch.stack(units).sum())
    optimizer.step()
    optimizer.zero_grad()
    torch.clear_autocast_cache()


class PerFedAvg(Algorithm):
    """Meta-learning (MAML) of a global model that each client adapts with local steps of length alpha.

    With `alpha: 0` this is FedAvg of the same weighting on the part `D'` of each batch.

    Bytes a round, each participant: down `model`, up `model + 8`.

    Args:
        order: `first` omits the Hessian from the meta-gradient. `hessian_free` computes its product with a vector from
            a difference of two gradients, which doubles the cost of a step.
        alpha: α, the length of the adaptation step, 0 or more. The length of the meta-step, β, is the optimizer's
            learning rate.
        delta: δ of the difference, above 0.
        adapt_steps: Number of adaptation steps before a client's model is evaluated or returned, 0 or more. Each uses
            all of the client's training data.
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
    """

    order: Order = "first"
    alpha: float = number(0.01, "[0, inf)", "the paper's experiments use 0.01")
    delta: float = number(0.001, "(0, inf)", "use 0.001")
    adapt_steps: int = number(1, "[0, inf)", "use 0 to measure without adapting")
    weighting: Weighting = "uniform"

    search_space: ClassVar = {  # around the 0.01 of Fallah et al.
        "alpha": {"distribution": "log_uniform_values", "min": 0.001, "max": 0.1},
    }

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        delta = None if self.order == "first" else self.delta
        self.module_class = partial(MetaStep, alpha=self.alpha, delta=delta)

    def personalize(self, module: ClientModule, batches: Batches) -> None:
        """Adapt the model to the client with `adapt_steps` gradient steps on its training data."""
        for _ in range(self.adapt_steps):
            adapt(module, batches, self.alpha)
