"""Small convolutional networks of the federated-learning literature."""

from __future__ import annotations

from torch import nn

from fl_lightning.core.errors import check_positive
from fl_lightning.models.base import Backbone
from fl_lightning.models.heads import Head
from fl_lightning.models.layers import image_shape


class CNN(Backbone):
    """The CNN of McMahan et al. 2017: 5x5 convolutions of 32 and 64 channels, then 512 hidden units.

    Each convolution keeps the size, is followed by ReLU and halved by 2x2 max pooling; 1,663,370 parameters for
    28x28 grey images and 10 classes, as the paper counts.

    Args:
        in_shape: `(channels, height, width)`, height and width at least 4.
        num_classes: Number of classes, `C`.
        feature_dim: Width of the fully connected layer, the feature size.
        head: What comes after the features.

    Raises:
        ValueError: The input is not an image, or is smaller than 4x4.
    """

    def __init__(
        self, in_shape: tuple[int, ...], num_classes: int, feature_dim: int = 512, head: Head = Head()
    ) -> None:
        check_positive("model.", feature_dim=feature_dim)
        channels, height, width = image_shape(in_shape, smallest=4)
        encoder = nn.Sequential(
            nn.Conv2d(channels, 32, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * (height // 4) * (width // 4), feature_dim),
            nn.ReLU(),
        )
        super().__init__(*head.attach(encoder, feature_dim, num_classes))


class CNN4(Backbone):
    """The 4-layer CNN of cwFedAVG's code: two 5x5 convolutions (32, 64), then 512 units in the head.

    Each convolution is unpadded, and followed by ReLU and 2x2 max pooling. The encoder ends with the convolutions, so
    that both fully connected layers are the classifier `h` that UA-PDFL keeps personal. The paper of UA-PDFL describes
    such a network without its sizes. Its code has 3x3 convolutions, one pooling and dropout.

    582,026 parameters for 28x28 grey images and 10 classes, 878,538 for 32x32 colour images.

    Args:
        in_shape: `(channels, height, width)`, height and width at least 16.
        num_classes: Number of classes, `C`.
        head: What comes after the features.

    Raises:
        ValueError: The input is not an image, or is smaller than 16x16.
    """

    def __init__(self, in_shape: tuple[int, ...], num_classes: int, head: Head = Head(hidden=(512,))) -> None:
        super().__init__(*head.attach(*two_convolutions(in_shape, (32, 64), pool=True), num_classes))


class LeNet(Backbone):
    """FedDW's LeNet-like CNN: two 5x5 convolutions, linear layers of 256 and 128 units, a last layer without bias.

    There is no ReLU before the last layer. FedDW uses the network without pooling for MNIST and with 2x2 max pooling
    for CIFAR-10. The published code for MNIST has 10 and 20 channels, and dropout 0.5, which this network does not
    have.

    Args:
        in_shape: `(channels, height, width)`, height and width at least 16, or 9 without pooling.
        num_classes: Number of classes, `C`.
        channels: Channels of the two convolutions.
        pool: Halve the image after each convolution.
        head: What comes after the features.

    Raises:
        ValueError: The input is not an image, or is too small.
    """

    def __init__(
        self,
        in_shape: tuple[int, ...],
        num_classes: int,
        channels: tuple[int, int] = (6, 16),
        pool: bool = True,
        head: Head = Head(mapping=(256, 128), classifier="bias_free"),
    ) -> None:
        super().__init__(*head.attach(*two_convolutions(in_shape, channels, pool), num_classes))


def two_convolutions(in_shape: tuple[int, ...], widths: tuple[int, int], pool: bool) -> tuple[nn.Sequential, int]:
    """Return two unpadded 5x5 convolutions with ReLU, optional 2x2 pooling and a flatten layer.

    Returns:
        The layers, and the size of their output for one image.

    Raises:
        ValueError: The input is not an image, or is too small for the convolutions.
    """
    channels, *sides = image_shape(in_shape, smallest=16 if pool else 9)
    layers: list[nn.Module] = []
    for width in widths:
        check_positive("model.", channels=width)
        layers += [nn.Conv2d(channels, width, 5), nn.ReLU(), *([nn.MaxPool2d(2)] if pool else [])]
        channels, sides = width, [(side - 4) // (2 if pool else 1) for side in sides]
    return nn.Sequential(*layers, nn.Flatten()), channels * sides[0] * sides[1]
