"""Residual networks (He et al. 2016) for small images."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torchvision.models import resnet18, resnet50
from torchvision.models.resnet import BasicBlock, ResNet

from fl_lightning.models.base import Backbone
from fl_lightning.models.heads import Head
from fl_lightning.models.layers import GlobalAveragePool, Norm, image_shape, initialise_convolutions, with_norm


class ResNet8(Backbone):
    """FedSKC's ResNet-8: a 3x3 stem and three BasicBlocks of 64, 128 and 256 channels, strides 1, 2, 2.

    BatchNorm, global average pooling, a linear head; He-normal convolutions (fan-out).

    Args:
        in_shape: `(channels, height, width)`, height and width at least 4.
        num_classes: Number of classes, `C`.
        norm: `batch` or `group`.
        head: What comes after the features.

    Raises:
        ValueError: The input is not an image, or is smaller than 4x4.
    """

    def __init__(self, in_shape: tuple[int, ...], num_classes: int, norm: Norm = "batch", head: Head = Head()) -> None:
        channels, _, _ = image_shape(in_shape, smallest=4)
        stem = [nn.Conv2d(channels, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
        stages = [basic_block(64, 64, 1), basic_block(64, 128, 2), basic_block(128, 256, 2)]
        encoder = with_norm(nn.Sequential(*stem, *stages, GlobalAveragePool()), norm)
        super().__init__(*head.attach(encoder, 256, num_classes))
        initialise_convolutions(self)


class SmallImageResNet(Backbone):
    """A torchvision ResNet with the stem for small images: one 3x3 convolution, no pooling.

    Args:
        in_shape: `(channels, height, width)`, height and width at least 8.
        num_classes: Number of classes, `C`.
        norm: `batch` or `group`.
        head: What comes after the features.

    Raises:
        ValueError: The input is not an image, or is smaller than 8x8.
    """

    build: Callable[..., ResNet]
    width: int

    def __init__(self, in_shape: tuple[int, ...], num_classes: int, norm: Norm = "batch", head: Head = Head()) -> None:
        channels, _, _ = image_shape(in_shape, smallest=8)
        encoder = type(self).build(num_classes=1)
        encoder.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        encoder.maxpool = encoder.fc = nn.Identity()
        initialise_convolutions(encoder)
        super().__init__(*head.attach(with_norm(encoder, norm), self.width, num_classes))


class ResNet18(SmallImageResNet):
    """torchvision's ResNet-18 with the stem for small images: one 3x3 convolution, no pooling.

    11,173,962 parameters for colour images and 10 classes.
    """

    build = staticmethod(resnet18)
    width = 512


class ResNet50(SmallImageResNet):
    """torchvision's ResNet-50 with the stem for small images: one 3x3 convolution, no pooling.

    23,520,842 parameters for colour images and 10 classes.
    """

    build = staticmethod(resnet50)
    width = 2048


def basic_block(channels: int, width: int, stride: int) -> BasicBlock:
    """Return a residual block of two 3x3 convolutions. A 1x1 convolution is the shortcut if the shape changes."""
    shortcut = None
    if stride != 1 or channels != width:
        shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))
    return BasicBlock(channels, width, stride, shortcut)
