"""MOON: pull features towards those of the global model, and away from those of the client's last model.

Li, He, Song: "Model-Contrastive Federated Learning", CVPR 2021, Section 3.3.

The term, `ModelContrast`, also works in any other method's `loss_terms`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.algorithms.base import Algorithm
from fl_lightning.client.loss_term import LossTerm, Step
from fl_lightning.client.module import ClientModule
from fl_lightning.core.arguments import count, number
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.inputs import Inputs
from fl_lightning.core.message import Tensors
from fl_lightning.core.precision import at_least_float32, without_autocast
from fl_lightning.models import with_encoder
from fl_lightning.models.base import frozen_copy, tapped


def contrastive_loss(now: Tensor, received: Tensor, previous: Sequence[Tensor], tau: float) -> Tensor:
    """Return the model-contrastive loss (Eq. 3): features `z` are pulled to `z_glob`, and pushed away from `z_prev`.

    Args:
        now: `z`, the representations of the model in training, `(B, d)`.
        received: `z_glob`, the representations of the received model, `(B, d)`.
        previous: `z_prev`, the representations of each earlier model, `(B, d)`.
        tau: τ, the temperature.
    """
    cosines = F.cosine_similarity(now[:, None], torch.stack([received, *previous], dim=1), dim=2)
    return F.cross_entropy(cosines / tau, torch.zeros(len(now), dtype=torch.long, device=now.device))


class ModelContrast(LossTerm):
    """Model-contrastive loss: pulls features towards those of the received model, away from those of past local models.

    The loss is Eq. 3, times `μ`. The client keeps the encoders from the end of its last rounds, which never leave it.
    In its first round the received encoder takes their place: the term is then `μ log 2` and has no gradient. All kept
    encoders are in eval mode. With `layer`, this holds for whole networks.

    Args:
        mu: μ, 0 or more; 0 switches the term off.
        tau: τ, the temperature, above 0.
        history: Number of its last models that the client compares with, 1 or more.
        layer: Name of the layer whose inputs are the representations; by default they are the encoder's outputs.

    Raises:
        ConfigError: A fit begins with a model without an encoder, or without the layer.
    """

    mu: float = number(5.0, "[0, inf)", "the paper uses 0.1 to 10")
    tau: float = number(0.5, "(0, inf)", "the paper uses 0.5")
    history: int = count(1)
    layer: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.active = self.mu > 0
        self.taps = (self.layer,) if self.layer else ()
        self._kept: list[Tensors] = []  # the newest first
        self._received: list[nn.Module] = []  # lists keep them out of the client's module
        self._previous: list[nn.Module] = []

    def begin(self, module: ClientModule) -> None:
        """Copy the received encoder, and build the encoders of the client's last rounds."""
        if self.active:
            part = self._compared(module)
            self._received = [frozen_copy(part)]
            self._previous = [frozen_copy(part, kept) for kept in self._kept or [{}]]

    def _compared(self, module: ClientModule) -> nn.Module:
        if self.layer is None:
            return with_encoder(module.backbone).encoder
        if self.layer not in dict(module.backbone.named_modules()):
            raise ConfigError(f"algorithm.layer: the model has no layer {self.layer!r}")
        return module.backbone

    def remember(self, module: ClientModule) -> Tensors:
        """Return the encoders at the end of the client's last fits, with names `<rounds ago>/<name>`."""
        if not self.active:
            return {}
        newest = self._compared(module).state_dict()
        kept = [newest, *self._kept][: self.history]
        return {f"{age}/{name}": value for age, weights in enumerate(kept) for name, value in weights.items()}

    def recall(self, kept: Tensors) -> None:
        """Restore the encoders that the client kept from its last rounds."""
        ages = len({name.partition("/")[0] for name in kept})
        self._kept = [{} for _ in range(ages)]
        for key, value in kept.items():
            age, _, name = key.partition("/")
            self._kept[int(age)][name] = value

    def forward(self, step: Step) -> Tensor:
        """Return `μ` times the model-contrastive loss (Eq. 3) on a batch, or zero outside a fit."""
        now = step.taps.get(self.layer) if self.layer else step.features
        if not self._received or step.inputs is None or now is None:
            return self.outside_fit(step.logits.new_zeros(()))
        if now.ndim > 2:
            shape = tuple(now.shape[1:])
            raise ConfigError(f"model: ModelContrast compares feature vectors, and these have the shape {shape}")
        others = (self._representation(part, step.inputs) for part in (*self._received, *self._previous))
        received, *previous = map(at_least_float32, others)
        with without_autocast(now.device):
            return self.mu * contrastive_loss(at_least_float32(now), received, previous, self.tau)

    def _representation(self, part: nn.Module, inputs: Tensor | Inputs) -> Tensor:
        with tapped(part, self.taps) as taps:
            output = part(inputs)
        return taps[self.layer] if self.layer else cast(Tensor, output)


class MOON(Algorithm):
    """FedAvg that pulls features towards those of the global model, away from the client's last model.

    With `mu` 0 this is FedAvg, bit for bit, and so is the first round of every client. The paper's network has a
    projection before the classification layer: `model.head.projection: 256`. Without it, features are compared
    directly.

    Bytes a round, each participant: down `model`, up `model + 8`.

    Kept by a client: the encoders of its last `history` rounds.

    Args:
        mu: μ, the weight of the term. The paper uses 5 for CIFAR-10 and 1 for CIFAR-100.
        tau: τ, the temperature.
        history: Number of its last models that a client compares with. The paper uses one.
        layer: Name of the layer whose inputs are compared, such as `head.3`; by default the encoder's outputs are.
    """

    mu: float = 5.0
    tau: float = 0.5
    history: int = 1
    layer: str | None = None

    search_space: ClassVar = {  # Li et al., Section 4: 0.1, 1, 5, 10
        "mu": {"distribution": "log_uniform_values", "min": 0.1, "max": 10.0},
    }

    def own_terms(self) -> list[LossTerm]:
        """Return the model-contrastive loss."""
        return [ModelContrast(self.mu, self.tau, self.history, self.layer)]
