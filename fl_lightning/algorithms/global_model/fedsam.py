"""FedSAM: clients take sharpness-aware local steps. MoFedSAM also mixes the server's last direction into each step.

Qu, Li, Duan, Liu, Tang, Lu: "Generalized Federated Learning via Sharpness Aware Minimization", ICML 2022, Algorithms 1
and 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fl_lightning.algorithms.aggregators import Weighting
from fl_lightning.algorithms.base import Algorithm
from fl_lightning.algorithms.global_model.fedcm import ClientMomentum, FedCM
from fl_lightning.client.losses import loss_with_gradients, total_loss
from fl_lightning.client.module import ClientModule
from fl_lightning.client.weights import load_parameters, trainable_parameters
from fl_lightning.core.arguments import number
from fl_lightning.core.errors import ConfigError


def ascent(gradients: Sequence[Tensor], rho: float) -> list[Tensor]:
    """Return the perturbation `ρ g / ||g||` of each parameter, with the norm over all parameters; zero for `g = 0`."""
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    scale = torch.where(norm > 0, rho / norm, torch.zeros_like(norm))
    return [scale * gradient for gradient in gradients]


class SharpnessAware(ClientModule):
    """A client's module whose steps take the gradient at `w + ρ g / ||g||`, where `g` is the gradient at `w`.

    Recorded losses and BatchNorm's statistics are those at `w`.

    Args:
        parts: The arguments of `ClientModule`.
        rho: ρ, the radius.
    """

    def __init__(self, *parts: Any, rho: float) -> None:
        super().__init__(*parts)
        self.rho = rho

    def check_fit(self) -> None:
        """Raise an error for the precision `16-mixed`, because the first gradient of a step is not scaled."""
        if self.rho and self.trainer.precision == "16-mixed":
            raise ConfigError("trainer.precision: FedSAM's first gradient is not scaled in 16-mixed. Use bf16-mixed.")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss at `w`. Its backward pass gives the gradient at the perturbed weights `w + ρ g / ||g||`."""
        if not self.rho:
            return super().training_step(batch, batch_idx)
        step = self.step(batch, batch_idx)
        losses = self.losses(step)
        self.record_step(step, losses)
        parameters = list(trainable_parameters(self.backbone).values())
        own = total_loss({name: loss for name, loss in losses.items() if name != ClientMomentum.name})
        buffers = [buffer.clone() for buffer in self.backbone.buffers()]
        moves = ascent(torch.autograd.grad(own, parameters, materialize_grads=True), self.rho)
        gradients = self._gradients_at(moves, parameters, batch, batch_idx)
        for buffer, value in zip(self.backbone.buffers(), buffers, strict=True):
            buffer.copy_(value)
        return loss_with_gradients(total_loss(losses), parameters, gradients)

    def _gradients_at(
        self, moves: list[Tensor], parameters: list[nn.Parameter], batch: tuple[Tensor, Tensor], batch_idx: int
    ) -> Sequence[Tensor]:
        """Return the gradients of the batch's loss at the perturbed weights. The weights are restored."""
        starts = [p.detach().clone() for p in parameters]
        load_parameters(parameters, [start + move for start, move in zip(starts, moves, strict=True)])
        loss = total_loss(self.losses(self.step(batch, batch_idx)))
        gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
        load_parameters(parameters, starts)
        return gradients


class FedSAM(Algorithm):
    """FedAvg whose clients look for flat minima, with sharpness-aware minimization (SAM) as local optimizer.

    With `rho` 0 and `weighting: samples` this is FedAvg, bit for bit. Each step computes two gradients.

    Bytes a round, each participant: down `model`, up `model + 8`.

    Args:
        rho: ρ, the radius of the perturbation, 0 or more.
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
    """

    rho: float = number(0.05, "[0, inf)", "the paper uses 0.01 to 0.5")
    weighting: Weighting = "uniform"

    search_space: ClassVar = {  # Qu et al.: 0.01, 0.02, 0.05, 0.1, 0.5
        "rho": {"distribution": "log_uniform_values", "min": 0.01, "max": 0.5},
    }

    def __post_init__(self) -> None:
        """Train clients with SAM."""
        super().__post_init__()
        self.module_class = partial(SharpnessAware, rho=self.rho)


class MoFedSAM(FedCM):
    """FedSAM in which each local step mixes the client's gradient with the direction of the last global update.

    With `rho` 0 this is FedCM, bit for bit. It needs plain SGD. Each step computes two gradients.

    Bytes a round, each participant: down `model + 4 * P`, up `model + 16`.

    Kept by the server: the last descent direction.

    Args:
        rho: ρ, the radius of the perturbation, 0 or more.
        alpha: The share of the client's own gradient, β in the paper, in (0, 1].
        server_lr: Server learning rate η_g, above 0. With 1, a step ends at the clients' mean.
    """

    rho: float = number(0.05, "[0, inf)", "the paper uses 0.01 to 0.5")

    search_space: ClassVar = FedCM.search_space | FedSAM.search_space

    def __post_init__(self) -> None:
        """Train clients with SAM."""
        super().__post_init__()
        self.module_class = partial(SharpnessAware, rho=self.rho)
