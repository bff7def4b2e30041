"""Layers and initial weights that several convolutional networks share."""

from __future__ import annotations

from math import gcd
from typing import Literal, TypeVar, cast

import torch
from torch import Tensor, nn

Norm = Literal["batch", "group"]
Module = TypeVar("Module", bound=nn.Module)

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def image_shape(in_shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    """Return an image's channels, height and width, and raise an error if it is too small for a network.

    Raises:
        ValueError: The shape is not that of an image, or is too small.
    """
    if len(in_shape) != 3 or min(in_shape[1:]) < smallest:
        raise ValueError(
            f"model: this network needs images (channels, height, width) of at least {smallest}x{smallest}, "
            f"the dataset has {tuple(in_shape)}; use MLP, or another dataset"
        )
    return in_shape[0], in_shape[1], in_shape[2]


class GlobalAveragePool(nn.Module):
    """Average feature maps `(B, d, h, w)` to `(B, d)`. Unlike adaptive pooling, this is deterministic on CUDA."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of feature maps over height and width."""
        return cast(Tensor, torch.mean(x, dim=(2, 3)))


def with_norm(module: Module, norm: Norm) -> Module:
    """Return a network, with every BatchNorm2d replaced by GroupNorm if `norm` is `group`.

    GroupNorm has no statistics to average. It has 32 groups (Wu and He 2018), or the greatest common divisor of 32 and
    the number of channels.
    """
    if norm == "group":
        for parent in list(module.modules()):
            for name, child in parent.named_children():
                if isinstance(child, nn.BatchNorm2d):
                    channels = child.num_features
                    setattr(parent, name, nn.GroupNorm(gcd(32, channels), channels))
    return module


def initialise_convolutions(module: nn.Module) -> None:
    """Initialise every convolution of a network with He-normal weights (fan-out) and zero biases."""
    for child in module.modules():
        if isinstance(child, nn.Conv2d):
            nn.init.kaiming_normal_(child.weight, mode="fan_out", nonlinearity="relu")
            if child.bias is not None:
                nn.init.zeros_(child.bias)
