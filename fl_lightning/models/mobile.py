"""Networks for small devices: torchvision's definitions, with strides for small images."""

from __future__ import annotations

from torch import nn
from torchvision.models import MobileNetV2 as ImageNetMobileNetV2
from torchvision.models import shufflenet_v2_x1_0

from fl_lightning.models.base import Backbone
from fl_lightning.models.heads import Head
from fl_lightning.models.layers import GlobalAveragePool, Norm, image_shape, initialise_convolutions, with_norm


class ShuffleNetV2(Backbone):
    """torchvision's ShuffleNet V2 (Ma et al. 2018, width 1) with a stem that keeps small images' size.

    1,263,854 parameters for colour images and 10 classes.

    Args:
        in_shape: `(channels, height, width)`, height and width at least 8.
        num_classes: Number of classes, `C`.
        norm: `batch` or `group`.
        head: What comes after the features.

    Raises:
        ValueError: The input is not an image, or is smaller than 8x8.
    """

    def __init__(self, in_shape: tuple[int, ...], num_classes: int, norm: Norm = "batch", head: Head = Head()) -> None:
        channels, _, _ = image_shape(in_shape, smallest=8)
        encoder = shufflenet_v2_x1_0(num_classes=1)
        encoder.conv1[0] = nn.Conv2d(channels, 24, 3, padding=1, bias=False)
        encoder.maxpool = encoder.fc = nn.Identity()
        super().__init__(*head.attach(with_norm(encoder, norm), 1024, num_classes))


class MobileNetV2(Backbone):
    """torchvision's MobileNet V2 (Sandler et al. 2018) with strides of 1 in its stem and second stage.

    Width 1; 2,236,682 parameters for colour images and 10 classes.

    Args:
        in_shape: `(channels, height, width)`, height and width at least 8.
        num_classes: Number of classes, `C`.
        norm: `batch` or `group`.
        head: What comes after the features.

    Raises:
        ValueError: The input is not an image, or is smaller than 8x8.
    """

    # Expansion, channels, blocks and stride of each stage: Table 2 of the paper, less the second stage's stride.
    stages = (
        (1, 16, 1, 1),
        (6, 24, 2, 1),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    def __init__(self, in_shape: tuple[int, ...], num_classes: int, norm: Norm = "batch", head: Head = Head()) -> None:
        channels, _, _ = image_shape(in_shape, smallest=8)
        features = ImageNetMobileNetV2(1, inverted_residual_setting=[list(stage) for stage in self.stages]).features
        features[0][0] = nn.Conv2d(channels, 32, 3, padding=1, bias=False)
        initialise_convolutions(features)
        encoder = nn.Sequential(*with_norm(features, norm), GlobalAveragePool())
        super().__init__(*head.attach(encoder, 1280, num_classes))
