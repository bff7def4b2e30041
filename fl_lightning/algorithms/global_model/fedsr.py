"""FedSR: a random representation with a small norm, and with little information about the input beyond its class.

Nguyen, Torr, Lim: "FedSR: A Simple and Effective Domain Generalization Method for Federated Learning", NeurIPS 2022.

`RepresentationNorm` is the paper's L2R, and `ConditionalInformation` its CMI.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.algorithms.base import Algorithm
from fl_lightning.client.loss_term import LossTerm, Step
from fl_lightning.client.module import ClientModule
from fl_lightning.core.arguments import number
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.precision import at_least_float32, without_autocast
from fl_lightning.models.base import Backbone, with_encoder, with_features

GAUSSIAN, SAMPLE = "head.0.draw", "head.1"
"""Names of the layers that get the parameters of the Gaussian, and the representation that is drawn from it."""


def gaussian_of(parameters: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean μ and the standard deviation σ of `p(z|x)`, `(B, d)` each, from a layer's output `(B, 2d)`."""
    mean, raw = parameters.chunk(2, dim=1)
    return mean, F.softplus(raw)


def gaussian_divergence(mean: Tensor, std: Tensor, other_mean: Tensor, other_std: Tensor) -> Tensor:
    """Return `KL[N(μ, σ²) ‖ N(m, s²)]` of diagonal Gaussians, one number per row.

    It is the sum over the dimensions of `log(s/σ) + (σ² + (μ - m)²) / 2s² - 1/2`.

    Args:
        mean: μ, `(B, d)`.
        std: σ, `(B, d)`, above 0.
        other_mean: m, `(B, d)`.
        other_std: s, `(B, d)`, above 0.
    """
    quadratic = (std.square() + (mean - other_mean).square()) / (2 * other_std.square())
    return (other_std.log() - std.log() + quadratic - 0.5).sum(dim=1)


class DrawGaussian(nn.Module):
    """Draw `z = μ + σ ε`, `(B, d)`, in train mode, with standard normal ε; return μ in eval mode."""

    def forward(self, parameters: Tensor) -> Tensor:
        """Return a sample or the mean of the Gaussian with these parameters, `(B, 2d)`."""
        mean, std = gaussian_of(parameters)
        if not self.training:
            return mean
        return mean + std * torch.randn(mean.shape, dtype=mean.dtype, device=mean.device)


class GaussianRepresentation(nn.Module):
    """Map features to a random representation `z ~ p(z|x) = N(μ(x), σ(x)²)` of the same size.

    A linear layer computes μ and, before a softplus, σ. The module also holds the reference distributions
    `r(z|y) = N(m_y, s_y²)`, one per class, which are trained with the other weights.

    Args:
        width: Size `d` of a feature and of the representation.
        num_classes: Number of classes, `C`.

    Attributes:
        reference_mean: `m`, `(C, d)`, initially 0.
        reference_raw: `(C, d)`, initially 1; `s` is its softplus.
    """

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.gaussian = nn.Linear(width, 2 * width)
        self.draw = DrawGaussian()
        self.reference_mean = nn.Parameter(torch.zeros(num_classes, width))
        self.reference_raw = nn.Parameter(torch.ones(num_classes, width))

    def forward(self, features: Tensor) -> Tensor:
        """Return the representation of a batch of features, `(B, d)`."""
        drawn: Tensor = self.draw(self.gaussian(features))
        return drawn


class RepresentationNorm(LossTerm):
    """Loss term `α ‖z‖`: the mean Euclidean norm of the representations of a batch.

    Args:
        l2r: α, 0 or more; 0 switches the term off.
        layer: Name of the layer whose inputs are the representations; by default they are the encoder's outputs.

    Example:
        >>> step = Step(torch.zeros(2, 3), torch.tensor([0, 1]), torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
        >>> float(RepresentationNorm(0.5)(step))
        1.5
    """

    l2r: float = number(0.01, "[0, inf)", "the authors use 0.01 on PACS")
    layer: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.active = self.l2r > 0
        self.taps = [self.layer] if self.layer else []

    def begin(self, module: ClientModule) -> None:
        """Check that the model returns features, or has the layer."""
        if not self.active:
            return
        if self.layer is None:
            with_features(module.backbone)
        elif self.layer not in dict(module.backbone.named_modules()):
            raise ConfigError(f"algorithm.layer: {self.layer!r} is no layer of {type(module.backbone).__name__}")

    def forward(self, step: Step) -> Tensor:
        """Return the mean norm of the representations, times α, in float32."""
        z = step.taps.get(self.layer) if self.layer else step.features
        if z is None:
            return self.outside_fit(step.logits.new_zeros(()))
        with without_autocast(z.device):
            return self.l2r * at_least_float32(z).flatten(1).norm(dim=1).mean()


class ConditionalInformation(LossTerm):
    """Loss term `α KL[p(z|x) ‖ r(z|y)]`, a bound on the information of z about x beyond the class y.

    The mean over a batch is an upper bound of the conditional mutual information `I(x; z | y)`, up to sampling.

    Args:
        cmi: α, 0 or more; 0 switches the term off.
    """

    cmi: float = number(0.001, "[0, inf)", "the authors use 0.001 on PACS")

    needs_classes = True
    only_in = "FedSR"
    taps: Sequence[str] = field(default=(GAUSSIAN,), init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.active = self.cmi > 0

    def forward(self, step: Step) -> Tensor:
        """Return the mean divergence from the references of the samples' classes, times α, in float32."""
        if step.backbone is None or GAUSSIAN not in step.taps:
            return self.outside_fit(step.logits.new_zeros(()))
        layer = representation_of(step.backbone)
        parameters = step.taps[GAUSSIAN]
        with without_autocast(parameters.device):
            mean, std = gaussian_of(at_least_float32(parameters))
            own_mean, own_raw = layer.reference_mean[step.targets], layer.reference_raw[step.targets]
            return self.cmi * gaussian_divergence(mean, std, own_mean, F.softplus(own_raw)).mean()


def representation_of(backbone: nn.Module) -> GaussianRepresentation:
    """Return the layer that FedSR has added to a backbone."""
    layer = backbone.get_submodule(GAUSSIAN.rpartition(".")[0])
    assert isinstance(layer, GaussianRepresentation)
    return layer


def add_representation(backbone: Backbone, num_classes: int) -> None:
    """Put a `GaussianRepresentation` before the head of a backbone, in place.

    Args:
        backbone: The network.
        num_classes: Number of classes, `C`.
    """
    layers = backbone.head if isinstance(backbone.head, nn.Sequential) else [backbone.head]
    backbone.head = nn.Sequential(GaussianRepresentation(backbone.feature_dim, num_classes), *layers)


class FedSR(Algorithm):
    """FedAvg with a random representation z of small norm (L2R), close to a reference distribution of its class (CMI).

    A layer between encoder and head draws z from a Gaussian in training. In evaluation, z is the Gaussian's mean. The
    reference distributions are averaged with the weights. With `l2r` and `cmi` 0 and `probabilistic` false, this is
    FedAvg, bit for bit.

    Bytes a round, each participant: down `model`, up `model + 8`.

    Args:
        l2r: The weight of L2R.
        cmi: The weight of CMI.
        probabilistic: Whether z is random. Otherwise z is the encoder's output, no layer is added, and `cmi` must be 0
            (the authors' FedL2R).

    Raises:
        ConfigError: `cmi` is above 0 without `probabilistic`, or the model has no encoder and head.
    """

    l2r: float = number(0.01, "[0, inf)", "the authors use 0.01 on PACS")
    cmi: float = number(0.001, "[0, inf)", "the authors use 0.001 on PACS")
    probabilistic: bool = True

    search_space: ClassVar = {  # around the values in the authors' instructions
        "l2r": {"distribution": "log_uniform_values", "min": 0.0001, "max": 0.1},
        "cmi": {"distribution": "log_uniform_values", "min": 0.00001, "max": 0.01},
    }

    def __post_init__(self) -> None:
        """Check that CMI has a Gaussian."""
        if self.cmi and not self.probabilistic:
            raise ConfigError(f"algorithm.cmi: {self.cmi} needs probabilistic true. Set it to 0, or probabilistic true")
        super().__post_init__()

    def own_terms(self) -> list[LossTerm]:
        """Return the terms L2R and CMI."""
        norm = RepresentationNorm(self.l2r, SAMPLE if self.probabilistic else None)
        return [norm, *([ConditionalInformation(self.cmi)] if self.probabilistic else [])]

    def prepare_network(self, backbone: nn.Module) -> None:
        """Add the Gaussian layer to the network, if `probabilistic` is true."""
        if self.probabilistic:
            network = with_encoder(backbone)
            add_representation(network, len(next(network.classifier.parameters())))
