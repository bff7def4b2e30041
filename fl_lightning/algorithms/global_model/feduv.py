"""FedUV: two loss terms, which keep predictions varied and features spread out, as on balanced data.

Son, Kim, Chung, Huang, Liu: "FedUV: Uniformity and Variance for Heterogeneous Federated Learning", CVPR 2024.

`ClassifierVariance` regularises the classifier's outputs, `HypersphericalUniformity` the encoder's. Each loss term also
works in other methods.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.algorithms.base import Algorithm
from fl_lightning.client.loss_term import LossTerm, Step
from fl_lightning.client.module import ClientModule
from fl_lightning.core.arguments import number
from fl_lightning.core.precision import at_least_float32, without_autocast
from fl_lightning.models.base import with_features


def variance_loss(probabilities: Tensor) -> Tensor:
    """Return the variance loss V, `1/C Σ_c max(0, γ - std_b(p_bc))`, of class probabilities over a batch.

    γ is the standard deviation of a column of the `C x C` identity, `1/√C`, as for one-hot predictions on balanced
    data. Standard deviations are unbiased. The loss is zero for a batch of one.

    Args:
        probabilities: `(B, C)`; rows sum to 1.
    """
    samples, classes = probabilities.shape
    if samples < 2:
        return probabilities.new_zeros(())
    return (classes**-0.5 - probabilities.std(dim=0)).clamp(min=0).mean()


def uniformity_loss(features: Tensor, detach_sigma: bool = False) -> Tensor:
    """Return the uniformity loss U, the mean of `exp(-d / σ)` over the squared distances `d` of all pairs.

    σ is the median of the distances above 0, for an even number the lower of the middle two. The loss is zero if all
    features are equal, or for a batch of one.

    Args:
        features: `(B, d)`.
        detach_sigma: Treat σ as a constant in the gradient.
    """
    samples = len(features)
    if samples < 2:
        return features.new_zeros(())
    one, other = torch.triu_indices(samples, samples, 1, device=features.device)
    between = torch.cdist(features, features, compute_mode="donot_use_mm_for_euclid_dist")  # exactly 0 between equals
    distances = between[one, other].square()
    sigma = median_of_positive(distances)
    kernel = torch.exp(-distances / (sigma.detach() if detach_sigma else sigma))
    return torch.where((distances > 0).any(), kernel.mean(), 0)


def median_of_positive(values: Tensor) -> Tensor:
    """Return the lower median of the positive values in `(n,)`, or 1 if no value is positive.

    As in `torch.median`, all values equal to the median share the gradient. No branch depends on the values, so that
    `vmap` works.
    """
    positive = values > 0
    ordered = torch.where(positive, values.detach(), torch.inf).sort().values
    is_middle = torch.arange(len(values), device=values.device) == (positive.sum() - 1) // 2
    equal = values == torch.where(is_middle, ordered, 0).sum()
    median = torch.where(equal, values, 0).sum() / equal.sum().clamp(min=1)
    return torch.where(positive.any(), median, 1)


class ClassifierVariance(LossTerm):
    """Loss term `λ V`: penalises class probabilities that vary too little over a batch.

    The required standard deviation is that of one-hot predictions on balanced data.

    Args:
        lam: λ, 0 or more; 0 switches the term off.

    Example:
        >>> step = Step(torch.zeros(4, 4), torch.arange(4))
        >>> float(ClassifierVariance(1.0)(step)), float(ClassifierVariance(1.0)(Step(100 * torch.eye(4), step.targets)))
        (0.5, 0.0)
    """

    lam: float = number(2.5, "[0, inf)", "the paper uses 2.5")

    needs_classes = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.active = self.lam > 0

    def forward(self, step: Step) -> Tensor:
        """Return the variance term `λ V` for a batch's logits."""
        return self.lam * variance_loss(at_least_float32(step.logits).softmax(dim=1))


class HypersphericalUniformity(LossTerm):
    """Loss term `μ U`: pushes the features of a batch away from each other.

    Args:
        mu: μ, 0 or more; 0 switches the term off.
        normalize_z: Normalise the features to unit length first, as in the paper's text but not in its code.
        detach_sigma: Treat the median as a constant in the gradient.

    Raises:
        ConfigError: A fit begins with a model without an encoder.
    """

    mu: float = number(0.5, "[0, inf)", "the paper uses 0.5")
    normalize_z: bool = False
    detach_sigma: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.active = self.mu > 0

    def begin(self, module: ClientModule) -> None:
        """Check that the model is a `Backbone`, which returns features."""
        if self.active:
            with_features(module.backbone)

    def forward(self, step: Step) -> Tensor:
        """Return the uniformity term `μ U` for a batch's features, in float32."""
        assert step.features is not None
        with without_autocast(step.features.device):
            features = at_least_float32(step.features).flatten(1)
            if self.normalize_z:
                features = F.normalize(features, dim=1)
            return self.mu * uniformity_loss(features, self.detach_sigma)


class FedUV(Algorithm):
    """FedAvg that keeps clients' predictions varied (V) and features spread out (U), as on balanced data.

    With `lam` and `mu` 0 this is FedAvg, bit for bit.

    Bytes a round, each participant: down `model`, up `model + 8`.

    Args:
        lam: λ, the weight of V.
        mu: μ, the weight of U.
        normalize_z: Normalise the features to unit length for U.
        detach_sigma: Treat the median distance in U as a constant.
    """

    lam: float = 2.5
    mu: float = 0.5
    normalize_z: bool = False
    detach_sigma: bool = False

    search_space: ClassVar = {  # around the values of Son et al.
        "lam": {"distribution": "log_uniform_values", "min": 0.1, "max": 10.0},
        "mu": {"distribution": "log_uniform_values", "min": 0.05, "max": 5.0},
    }

    def own_terms(self) -> list[LossTerm]:
        """Return the terms V and U."""
        uniformity = HypersphericalUniformity(self.mu, self.normalize_z, self.detach_sigma)
        return [ClassifierVariance(self.lam), uniformity]
