"""Residual networks (He et al. 2016) for small images."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

from fl_lightning.models.base import Backbone
from fl_lightning.models.cnn import image_shape


class ResNet8(Backbone):
    """FedSKC's ResNet-8: a 3x3 stem, three stages of one BasicBlock (64, 128, 256 channels; strides 1, 2, 2).

    BatchNorm, global average pooling, a linear head; He-normal convolutions (fan-out).

    Args:
        in_shape: `(channels, height, width)`, height and width at least 4.
        num_classes: Number of classes, `C`.

    Raises:
        ValueError: The input is no image or smaller than 4x4.
    """

    def __init__(self, in_shape: tuple[int, ...], num_classes: int) -> None:
        channels, _, _ = image_shape(in_shape, smallest=4)
        stem = [nn.Conv2d(channels, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
        stages = [_stage(64, 64, 1), _stage(64, 128, 2), _stage(128, 256, 2)]
        encoder = nn.Sequential(*stem, *stages, GlobalAveragePool())
        super().__init__(encoder, nn.Linear(256, num_classes), 256)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class GlobalAveragePool(nn.Module):
    """`(B, d, h, w)` to `(B, d)`; unlike adaptive pooling, deterministic on CUDA."""

    def forward(self, x: Tensor) -> Tensor:
        """Mean over height and width."""
        return cast(Tensor, torch.mean(x, dim=(2, 3)))


def _stage(channels: int, width: int, stride: int) -> BasicBlock:
    shortcut = None
    if stride != 1 or channels != width:
        shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))
    return BasicBlock(channels, width, stride, shortcut)
