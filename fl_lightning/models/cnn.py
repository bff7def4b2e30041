"""Small convolutional networks of the federated-learning literature."""

from __future__ import annotations

from torch import nn

from fl_lightning.models.base import Backbone


class CNN(Backbone):
    """The two-convolution network of McMahan et al. 2017: 5x5 convolutions of 32 and 64 channels, then 512 units.

    Each convolution keeps the size, is followed by ReLU and halved by 2x2 max pooling; 1,663,370 parameters for
    28x28 grey images and 10 classes, as the paper counts.

    Args:
        in_shape: `(channels, height, width)`, height and width at least 4.
        num_classes: Number of classes, `C`.
        feature_dim: Width of the fully connected layer, the feature size.

    Raises:
        ValueError: The input is no image or smaller than 4x4.
    """

    def __init__(self, in_shape: tuple[int, ...], num_classes: int, feature_dim: int = 512) -> None:
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
        super().__init__(encoder, nn.Linear(feature_dim, num_classes), feature_dim)


def image_shape(in_shape: tuple[int, ...], smallest: int) -> tuple[int, int, int]:
    """Check that one input is an image `(channels, height, width)` large enough for a network.

    Raises:
        ValueError: It is not; the message says what the network needs.
    """
    if len(in_shape) != 3 or min(in_shape[1:]) < smallest:
        raise ValueError(
            f"model: this network needs images (channels, height, width) of at least {smallest}x{smallest}, "
            f"the dataset has {tuple(in_shape)}; use MLP, or another dataset"
        )
    return in_shape[0], in_shape[1], in_shape[2]
