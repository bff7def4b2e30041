"""VGG networks (Simonyan and Zisserman 2014) for small images."""

from __future__ import annotations

from torch import nn
from torchvision.models.vgg import cfgs, make_layers

from fl_lightning.models.base import Backbone
from fl_lightning.models.heads import Head
from fl_lightning.models.layers import GlobalAveragePool, Norm, image_shape, initialise_convolutions, with_norm


class VGG11(Backbone):
    """torchvision's VGG-11 convolutions with normalisation, then global average pooling.

    9,231,114 parameters for colour images and 10 classes; 28,149,514 with the fully connected layers of the paper,
    `head: {hidden: [4096, 4096]}`, but without their dropout.

    Args:
        in_shape: `(channels, height, width)`, height and width at least 32.
        num_classes: Number of classes, `C`.
        norm: `batch` or `group`.
        head: What comes after the features.

    Raises:
        ValueError: The input is not an image, or is smaller than 32x32.
    """

    def __init__(self, in_shape: tuple[int, ...], num_classes: int, norm: Norm = "batch", head: Head = Head()) -> None:
        channels, _, _ = image_shape(in_shape, smallest=32)
        features = make_layers(cfgs["A"], batch_norm=True)
        features[0] = nn.Conv2d(channels, 64, 3, padding=1)
        initialise_convolutions(features)
        encoder = nn.Sequential(*with_norm(features, norm), GlobalAveragePool())
        super().__init__(*head.attach(encoder, 512, num_classes))
