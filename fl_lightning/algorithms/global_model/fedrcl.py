"""FedRCL: a contrastive loss on every level of the network, relaxed for similar samples of a class.

Seo, Kim, Kim, Han: "Relaxed Contrastive Learning for Federated Learning", CVPR 2024.

The loss compares the samples of a local batch with one another, without another model. As in the authors' published
code, it uses the hardest pairs only.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.algorithms.aggregators import Weighting
from fl_lightning.algorithms.base import Algorithm
from fl_lightning.client.loss_term import LossTerm, Step
from fl_lightning.client.module import ClientModule
from fl_lightning.core.arguments import number
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.precision import at_least_float32, without_autocast
from fl_lightning.models.base import with_encoder

HARDEST = 2
"""Number of samples of other classes, the most similar ones, that a sample is pushed away from."""


def similarities(features: Tensor) -> Tensor:
    """Return the cosines `s_ij` between the features of a batch, `(B, B)`.

    Args:
        features: `(B, d)`, or feature maps `(B, d, ...)`, which are averaged over their positions.
    """
    pooled = features.flatten(2).mean(dim=2) if features.ndim > 2 else features
    unit = F.normalize(pooled, dim=1)
    return unit @ unit.T


def contrastive_loss(similar: Tensor, targets: Tensor, tau: float) -> Tensor:
    """Return the contrastive loss SCL. It compares each sample with the hardest samples of its own and other classes.

    It is the mean over i of `-s⁺/τ + log(exp(s⁺/τ) + Σ_k exp(s_ik/τ))`. `s⁺` is the least similarity of i to a sample
    of its class, itself included; `k` are the two most similar samples of other classes. A sample with
    no other class in the batch adds zero.

    Args:
        similar: `s_ij`, `(B, B)`.
        targets: `(B,)` class indices.
        tau: τ, the temperature.
    """
    same = targets[:, None] == targets
    positive = torch.where(same, similar, torch.inf).amin(dim=1, keepdim=True)
    negatives = torch.where(same, -torch.inf, similar).topk(min(HARDEST, len(targets)), dim=1).values
    return F.cross_entropy(torch.cat([positive, negatives], dim=1) / tau, torch.zeros_like(targets))


def relaxation_loss(similar: Tensor, targets: Tensor, tau: float, threshold: float) -> Tensor:
    """Return the mean penalty PEN on samples that are too similar to the other samples of their class.

    It is the mean over i of `log(1 + exp((q - 1)/τ))`. `q` is the least similarity of i to another sample of its class
    if it is at least λ. Otherwise, and without another sample, `q` is -1.

    Args:
        similar: `s_ij`, `(B, B)`.
        targets: `(B,)` class indices.
        tau: τ, the temperature.
        threshold: λ.
    """
    partners = (targets[:, None] == targets) & ~torch.eye(len(targets), dtype=torch.bool, device=targets.device)
    least = torch.where(partners, similar, torch.inf).amin(dim=1)
    q = torch.where((least >= threshold) & partners.any(dim=1), least, -1.0)
    return F.softplus((q - 1) / tau).mean()


def level_taps(backbone: nn.Module, levels: list[str] | None = None) -> tuple[str, ...]:
    """Return the names of the last ReLU in each level (stage) of a network; their inputs are the levels' features.

    Args:
        backbone: The network.
        levels: Names of the network's modules. By default the encoder's parts with a ReLU: the stem and stages of a
            residual network, or each hidden layer of a plain one. A level without a ReLU is itself the layer.

    Raises:
        ConfigError: The network does not have a level, or no level was found.
    """
    modules = dict(backbone.named_modules())
    if levels is None:
        encoder = with_encoder(backbone).encoder
        parts = [f"encoder.{name}" for name, _ in encoder.named_children()]
        levels = [part for part in parts if relu_names(modules, part)]
    for level in levels:
        if level not in modules:
            known = ", ".join(name for name in modules if name.count(".") == 1)
            raise ConfigError(f"algorithm.levels: the model has no {level!r}; it has, for example, {known}")
    if not levels:
        raise ConfigError(
            "algorithm.levels: the model has no ReLU layers, which mark the levels. List the layers to use."
        )
    return tuple((relu_names(modules, level) or [level])[-1] for level in levels)


def relu_names(modules: dict[str, nn.Module], part: str) -> list[str]:
    """Return the names of the ReLU layers in a part of a network, in order."""
    return [
        name
        for name, module in modules.items()
        if isinstance(module, nn.ReLU | nn.ReLU6) and f"{name}.".startswith(f"{part}.")
    ]


class RelaxedContrastive(LossTerm):
    """Relaxed contrastive loss, `w_s · SCL + w_p · PEN`, averaged over the levels (stages) of the network.

    It is computed in float32 under mixed precision.

    Args:
        w_s: Weight of the contrastive loss, 0 or more.
        w_p: Weight of the relaxation, 0 or more. With both 0 the term is off.
        tau: τ, above 0.
        threshold: λ, the similarity of samples of a class above which the relaxation acts.
        levels: Names of the network's modules to use as levels; see `level_taps`.

    Raises:
        ConfigError: A fit begins with a model that does not have the levels.
    """

    w_s: float = number(1.0, "[0, inf)", "the paper uses 1")
    w_p: float = number(1.0, "[0, inf)", "the paper uses 1")
    tau: float = number(0.05, "(0, inf)", "the paper uses 0.05")
    threshold: float = number(0.7, "(-inf, inf)", "the paper uses 0.7")
    levels: list[str] | None = None

    needs_classes = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.levels == []:
            raise ConfigError("algorithm.levels: [] is empty. Name at least one level, or omit the option.")
        self.active = self.w_s > 0 or self.w_p > 0

    def begin(self, module: ClientModule) -> None:
        """Choose one layer per level (stage) of the network. The loss uses the inputs of these layers as features."""
        if self.active:
            self.taps = level_taps(module.backbone, self.levels)

    def forward(self, step: Step) -> Tensor:
        """Return the relaxed contrastive loss on a batch, averaged over the levels (stages) of the network."""
        losses = [self._level(step.taps[name], step.targets) for name in self.taps]
        return torch.stack(losses).mean()

    def _level(self, features: Tensor, targets: Tensor) -> Tensor:
        with without_autocast(features.device):
            similar = similarities(at_least_float32(features))
            parts = []
            if self.w_s:
                parts.append(self.w_s * contrastive_loss(similar, targets, self.tau))
            if self.w_p:
                parts.append(self.w_p * relaxation_loss(similar, targets, self.tau, self.threshold))
            return torch.stack(parts).sum()


class FedRCL(Algorithm):
    """FedAvg with a relaxed contrastive loss on every level of the network. By default, all clients weigh the same.

    With `w_s` and `w_p` 0 this is FedAvg of the same weighting, bit for bit.

    Bytes a round, each participant: down `model`, up `model + 8`.

    Args:
        w_s: Weight of the contrastive loss.
        w_p: Weight of the relaxation, which keeps the samples of a class from collapsing into one.
        tau: τ, the temperature of both.
        threshold: λ, the similarity of samples of a class above which the relaxation acts.
        levels: Names of the network's modules. The inputs of their last ReLU are contrasted. By default the encoder's
            parts with a ReLU, such as a residual network's stem and stages.
        weighting: Weight clients equally (`uniform`), or by their number of `samples`.
    """

    w_s: float = 1.0
    w_p: float = 1.0
    tau: float = 0.05
    threshold: float = 0.7
    levels: list[str] | None = None
    weighting: Weighting = "uniform"

    search_space: ClassVar = {  # around the values of Seo et al.
        "w_p": {"distribution": "log_uniform_values", "min": 0.1, "max": 10.0},
        "threshold": {"distribution": "uniform", "min": 0.5, "max": 0.95},
    }

    def own_terms(self) -> list[LossTerm]:
        """Return the relaxed contrastive loss."""
        return [RelaxedContrastive(self.w_s, self.w_p, self.tau, self.threshold, self.levels)]
